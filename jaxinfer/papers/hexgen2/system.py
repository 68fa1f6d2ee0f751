"""HexGen-2: planned flows spread requests over pairs of prefill and decode instances (section 3.3).

This is the runtime. A planner chooses the instances and the flows between them, which the run file
contains.
"""

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from itertools import product

from pydantic import Field

from jaxinfer.errors import JaxinferError
from jaxinfer.options.validation import Named, OptionError, Options, did_you_mean
from jaxinfer.serving.system import Assignment, System
from jaxinfer.serving.views import ClusterView, HandOffRule, Leg, RequestView
from jaxinfer.systems.instances import KVRoom, alive, most_entries, whole_on_least_loaded

Pair = tuple[str, str]
_IN_PREFILL = 16


class HexGen2Options(Options):
    """Options of ``HexGen2``.

    Attributes:
        flows: Requests per second from each prefill instance to its decode instances; only their
            ratios matter. Each pair gets its share of the requests, to within one.
        hand_off: When KV is sent.
        max_in_prefill: Largest number of requests in a prefill instance: a number, or one for each
            instance.
    """

    flows: Named[Named[float]] = Field(min_length=1)
    hand_off: HandOffRule = "on_demand"
    max_in_prefill: int | Named[int] = _IN_PREFILL

    def model_post_init(self, context: object, /) -> None:
        """Refuse flows and limits that are not positive."""
        for source, flows in self.flows.items():
            for dest, flow in flows.items():
                if flow <= 0:
                    raise OptionError(f"flows.{source}.{dest} is {flow:g}, must be above 0")
            if not flows:
                raise OptionError(f"flows.{source} is empty, must have a decode instance")
        own = self.max_in_prefill
        for name, most in own.items() if isinstance(own, dict) else [("", own)]:
            where = f"max_in_prefill.{name}".rstrip(".")
            if name and name not in self.flows:
                raise OptionError(f"{where}: {did_you_mean(name, self.flows)}")
            if most < 1:
                raise OptionError(f"{where} is {most}, must be from 1 on")


class Shares:
    """Chooses the next pair, so that each pair stays within one request of its due share.

    This is Tijdeman's rule ("The chairman assignment problem", 1980). If some pairs cannot take a
    request, several can fall behind; the one that is owed the most then goes first, so that of n
    pairs none is owed (n + 3) / 2. While some have no room, the others continue, but only up to
    ``ahead`` requests beyond their share. Otherwise a queue that is never empty would keep all of
    them full, whatever their shares.

    Args:
        ahead: number of requests by which each pair may exceed its share.
    """

    def __init__(self, weights: Mapping[Pair, float], ahead: Mapping[Pair, float]) -> None:
        self._weights, self._ahead = weights, ahead
        # The number of requests that each is owed; they add up to 0.
        self.owed = dict.fromkeys(weights, 0.0)
        self._least = 0.5 / max(len(weights) - 1, 1)

    def take(self, with_room: Collection[Pair], able: Collection[Pair] = ()) -> Pair | None:
        """Return the next pair among those with room; None if a pair without room must come first.

        Args:
            able: all pairs that may get the request, with or without room; by default those with
                room.
        """
        able = able or with_room
        # One that cannot take it gains at most one, or it would later get everything that it
        # missed.
        gaining = [p for p, owed in self.owed.items() if p in able or owed < 1]
        total = sum(self._weights[pair] for pair in gaining)
        owed = self.owed | {p: self.owed[p] + self._weights[p] / total for p in gaining}
        due = [pair for pair in able if owed[pair] >= self._least]
        if there := [pair for pair in due if pair in with_room]:
            # Of those that are owed a whole request, the one owed the most; otherwise, the next to
            # be so.
            behind = [pair for pair in there if owed[pair] > 1 - self._least]
            left = {p: (1 - self._least - owed[p]) / self._weights[p] for p in there}
            chosen = (
                max(behind, key=owed.__getitem__) if behind else min(there, key=left.__getitem__)
            )
        else:
            early = [p for p in with_room if not due or owed[p] - 1 >= -self._ahead[p]]
            if not early:
                return None
            chosen = max(early, key=owed.__getitem__)
        self.owed = owed
        self.owed[chosen] -= 1
        return chosen


class HexGen2(System):
    """Sends each request to a pair of instances, in proportion to the planned flow between them.

    Only pairs whose prefill instance has room, and whose pools hold the request, are considered. A
    lost instance takes its pairs out. If no pair is left, all pairs of the remaining instances get
    equal shares; if all instances of one role are lost, each request runs whole on one of the
    others.
    """

    Options = HexGen2Options
    options: HexGen2Options
    ttft_counts_transfer = True

    def __init__(self, options: HexGen2Options) -> None:
        super().__init__(options)
        self._pools = KVRoom()
        self._flows = {(p, d): flow for p, row in options.flows.items() for d, flow in row.items()}
        self._prefill = list(options.flows)
        self._decode = list(dict.fromkeys(dest for _, dest in self._flows))
        most = options.max_in_prefill
        own = most if isinstance(most, dict) else dict.fromkeys(self._prefill, most)
        self._most = {name: own.get(name, _IN_PREFILL) for name in self._prefill}
        self.shares = self._shares_of(self._flows)
        self._alive = self._prefill, self._decode
        self._some_lost = False

    def check(self, instances: Collection[str]) -> None:
        """Check that all instances exist, each in one role."""
        for source, flows in self.options.flows.items():
            for where, name in [("flows", source), *((f"flows.{source}", d) for d in flows)]:
                if name not in instances:
                    raise OptionError(f"{where}.{name}: {did_you_mean(name, instances)}")
        if both := [name for name in self._decode if name in self._prefill]:
            raise JaxinferError(f"flows: {both[0]!r} both prefills and decodes")
        if left := [name for name in instances if name not in (*self._prefill, *self._decode)]:
            raise OptionError(f"flows: instance {left[0]!r} has none")

    def routes(self, instances: Collection[str]) -> Collection[Pair]:
        """Return routes from each prefill to each decode instance, since any may be lost."""
        return list(product(self._prefill, self._decode))

    def route(self, waiting: Collection[RequestView], cluster: ClusterView) -> Sequence[Assignment]:
        """Assign a leg up to the end of the prompt, then one up to the end of the request."""
        prefill, decode = alive(self._prefill, cluster), alive(self._decode, cluster)
        if bool(prefill) != bool(decode):
            return whole_on_least_loaded(prefill or decode, waiting, cluster)
        if (prefill, decode) != self._alive:
            self._alive, self._some_lost = (prefill, decode), True
            left = {p: f for p, f in self._flows.items() if p[0] in prefill and p[1] in decode}
            self.shares = self._shares_of(left or dict.fromkeys(product(prefill, decode), 1.0))
        given: Counter[str] = Counter()
        assignments, full = [], False
        for request in waiting:
            holding = self._that_hold(request, cluster)
            if request.held_by in prefill:
                # Its prompt is done, and the decode instance that was to get it is lost.
                mine = [pair for pair in holding if pair[0] == request.held_by]
                taken = self.shares.take(mine or holding)
                assert taken  # None is waited for.
                there = taken[1]
                assignments.append(Assignment(request.id, (Leg(there),)))
                continue
            room = [pair for pair in holding if self._has_room(pair[0], cluster, given)]
            taken = None if full else self.shares.take(room, holding)
            if taken is None:
                full = True
                if not self._some_lost:
                    break
                continue  # Some of those behind it may need no room.
            here, there = taken
            given[here] += 1
            first = Leg(here, request.prompt_len, self.options.hand_off)
            assignments.append(Assignment(request.id, (first, Leg(there))))
        return assignments

    def _shares_of(self, flows: Mapping[Pair, float]) -> Shares:
        """Return shares.

        A prefill instance may be ahead by as many requests as it may have at once.
        """
        whole: defaultdict[str, float] = defaultdict(float)
        for (here, _), flow in flows.items():
            whole[here] += flow
        return Shares(flows, {p: self._most[p[0]] * f / whole[p[0]] for p, f in flows.items()})

    def _has_room(self, name: str, cluster: ClusterView, given: Mapping[str, int]) -> bool:
        return cluster.instances[name].num_requests + given[name] < self._most[name]

    def _that_hold(self, request: RequestView, cluster: ClusterView) -> Collection[Pair]:
        """Return pairs whose pools hold the prompt and the whole request; all pairs if
        none does.
        """
        pairs, hold = self.shares.owed, self._pools.that_hold
        prefill = hold(request.prompt_len, self._alive[0], cluster)
        decode = hold(most_entries(request), self._alive[1], cluster)
        return [pair for pair in pairs if pair[0] in prefill and pair[1] in decode] or list(pairs)
