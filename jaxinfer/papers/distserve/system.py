"""DistServe: units of prefill and decode instances, where decode instances fetch KV (section 4.3).

This is the runtime. The run file contains the result of the placement search: one unit of all
instances if any link is fast (Algorithm 1), or one for each pair that shares its nodes (Algorithm
2).
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from itertools import product

from pydantic import Field

from jaxinfer.options.validation import Options
from jaxinfer.serving.system import Assignment, System
from jaxinfer.serving.views import ClusterView, Leg, RequestView
from jaxinfer.systems.by_cache import ByCacheOptions, CachedParts
from jaxinfer.systems.instances import KVRoom, Names, alive, check_roles, most_entries


class Unit(Options):
    """Instances that exchange KV: one prefills a request, and another decodes it."""

    prefill: Names
    decode: Names


class DistServeOptions(ByCacheOptions):
    """Options of ``DistServe``.

    Attributes:
        units: List of ``{prefill: ..., decode: ...}``, each with one or more instances. Prompts go
            to the shortest queue of all, decodes to the least loaded of the same unit.
    """

    units: list[Unit] = Field(min_length=1)


# Instances that take new requests, and the unit of each.
Places = Mapping[str, Unit]


class DistServe(System):
    """Sends prompts to the shortest prefill queue, decodes to their unit's least loaded instance.

    KV stays with the prefill instance until a decode instance has room and fetches it. KV that is
    not yet fetched fills the prefill pool, and stops admission there. Among equal queues (often
    several are empty), the one in the unit with the least loaded decode instance is chosen. A unit
    that has lost one phase runs whole requests on the other.
    """

    Options = DistServeOptions
    options: DistServeOptions

    def __init__(self, options: DistServeOptions) -> None:
        super().__init__(options)
        # For each request that is or was in a prefill instance, the instance.
        self._prefilled: dict[str, str] = {}
        self._pools = KVRoom()
        self._units = {name: unit for unit in options.units for name in unit.prefill}

    def check(self, instances: Collection[str]) -> None:
        """Check that all instances exist, each in only one place of one unit."""
        roles = {
            f"units[{number}].{phase}": getattr(unit, phase)
            for number, unit in enumerate(self.options.units)
            for phase in ("prefill", "decode")
        }
        check_roles(roles, instances)

    def routes(self, instances: Collection[str]) -> Collection[tuple[str, str]]:
        """Return the routes within each unit, from each prefill to each decode instance."""
        return [pair for unit in self.options.units for pair in product(unit.prefill, unit.decode)]

    def route(self, waiting: Collection[RequestView], cluster: ClusterView) -> Sequence[Assignment]:
        """Assign a leg to the prompt's end and, once it is reached, one to the request's end."""
        given: Counter[str] = Counter()
        units = self.options.units
        takers = ((alive(u.prefill, cluster) or alive(u.decode, cluster), u) for u in units)
        # If none is left, asking for a lost one tells the loop that all are lost.
        places = {name: unit for names, unit in takers for name in names} or self._units
        assignments = []
        for request in waiting:
            if request.computed < request.prompt_len:
                legs = self._first(request, places, cluster, given)
            else:
                legs = (self._last(request, cluster, given),)
            given[legs[0].instance] += 1
            assignments.append(Assignment(request.id, legs))
        return assignments

    def on_finish(self, request: RequestView, cluster: ClusterView) -> None:
        """Forget on which instance the request was prefilled."""
        self._prefilled.pop(request.id, None)

    def _first(
        self, request: RequestView, places: Places, cluster: ClusterView, given: Mapping[str, int]
    ) -> tuple[Leg, ...]:
        parts = CachedParts.of(self.options, request, cluster)
        name = _shortest(places, cluster, given, parts)
        if not self._fits(request, name, places[name], cluster):
            fitting = {n: u for n, u in places.items() if self._fits(request, n, u, cluster)}
            name = _shortest(fitting, cluster, given, parts) if fitting else name
        decode = alive(places[name].decode, cluster)
        if not decode or name in decode:
            return (Leg(name),)
        self._prefilled[request.id] = name
        legs = Leg(name, request.prompt_len), Leg(decode[0])
        # If no pool holds it, it is refused now, and not after its prefill.
        return legs[:1] if self._pools.that_hold(most_entries(request), decode, cluster) else legs

    def _fits(self, request: RequestView, name: str, unit: Unit, cluster: ClusterView) -> bool:
        """Tell whether the prompt fits into this instance, and the whole request into a decode
        instance.
        """
        decode, hold = alive(unit.decode, cluster), self._pools.that_hold
        if not decode or name in decode:
            return bool(hold(most_entries(request), [name], cluster))
        prompt_fits = hold(request.prompt_len, [name], cluster)
        return bool(prompt_fits and hold(most_entries(request), decode, cluster))

    def _last(self, request: RequestView, cluster: ClusterView, given: Mapping[str, int]) -> Leg:
        prefilled = self._prefilled[request.id]
        decode = alive(self._units[prefilled].decode, cluster)
        fitting = self._pools.that_hold(most_entries(request), decode, cluster)
        names = fitting or decode or [prefilled]
        parts = CachedParts.of(self.options, request, cluster)
        return Leg(min(names, key=lambda n: _load(n, cluster, given) - parts.share(parts.kept(n))))


def _shortest(
    places: Places, cluster: ClusterView, given: Mapping[str, int], parts: CachedParts
) -> str:
    """Return the shortest queue; of equal ones, that in the unit with the least loaded decode.

    A request whose whole prompt is cached adds nothing to a queue, others their share.
    """
    queues = {
        name: _load(name, cluster, given) - parts.share(parts.spared(name)) for name in places
    }
    shortest = min(queues.values())
    names = [name for name, length in queues.items() if length == shortest]
    if all(places[name] is places[names[0]] for name in names):
        return names[0]

    loads = [
        min(
            (_load(each, cluster, given) for each in alive(places[name].decode, cluster)), default=0
        )
        for name in names
    ]
    return names[loads.index(min(loads))]


def _load(name: str, cluster: ClusterView, given: Mapping[str, int]) -> int:
    return cluster.instances[name].num_requests + given.get(name, 0)
