"""The protocol of systems, a paper's or baseline's rules: what they see, and may decide."""

from collections.abc import Callable, Collection, Container, Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import Any, ClassVar, Literal, NamedTuple, Protocol

from jaxinfer.options.validation import Options
from jaxinfer.serving.features.head_slices import Placement, SliceMove
from jaxinfer.serving.step_fit import AttentionFit, StepFit

HandOffRule = Literal["on_demand", "at_end", "when_room", "per_chunk", "per_segment"]


@dataclass(frozen=True)
class Leg:
    """A stretch of one request, run by one instance.

    Attributes:
        instance: instance that runs it.
        until: KV entries at which it ends; None is the end of the request. The instance that
            computes the prompt's last position samples the first token.
        hand_off: when the KV goes on to the next leg's instance. ``on_demand``: when that instance
            admits the request; ``at_end``: when this leg ends, if there is room (on demand
            otherwise); ``when_room``: then, or as soon as there is room, ahead of those that wait
            there and beside steps whose tokens are all taken; ``per_chunk``: after each step, from
            the moment the next instance has room; ``per_segment``: as ``per_chunk``, but during the
            step, after each piece of the model's layers.
    """

    instance: str
    until: int | None = None
    hand_off: HandOffRule = "on_demand"


class RequestView(Protocol):
    """A request, read-only. All counts are in tokens, times in seconds."""

    @property
    def id(self) -> str: ...  # noqa: D102
    @property
    def prompt_len(self) -> int: ...  # noqa: D102
    @property
    def max_tokens(self) -> int: ...  # noqa: D102
    @property
    def arrival(self) -> float: ...  # noqa: D102
    @property
    def first_token_at(self) -> float | None:
        """Time at which its first token was there; None before."""

    @property
    def predicted(self) -> tuple[int, int] | None:
        """Output tokens, at least and at most, where something predicts them."""

    @property
    def computed(self) -> int:
        """KV entries that exist."""

    @property
    def num_known(self) -> int:
        """Prompt and output tokens on the host."""

    @property
    def held_by(self) -> str | None:
        """The instance where the KV lies between two legs; None if it must be computed again."""

    @property
    def legs(self) -> Sequence[Leg]:
        """The leg under way and those to come."""

    @property
    def paused(self) -> bool: ...  # noqa: D102
    @property
    def slices(self) -> Sequence[Collection[int]]:
        """Slices of KV heads that lie in each shard of its instance; or empty."""


class ShardView(Protocol):
    """The part of an instance's KV that lies in one place, read-only."""

    @property
    def stage(self) -> int:
        """Pipeline stage; slices go to any shard of their stage."""

    @property
    def group(self) -> str:
        """Name of the device group, of instances that a run file has."""

    @property
    def device(self) -> int:
        """Number among the group's devices, where each of them is a shard of its own; else 0."""

    @property
    def slices(self) -> Collection[int]:
        """The slices of KV heads that lie here unless a request has them elsewhere."""

    @property
    def num_pages(self) -> int: ...  # noqa: D102
    @property
    def num_free_pages(self) -> int: ...  # noqa: D102
    @property
    def num_pairs(self) -> int:
        """Slices that lie here, over all requests."""

    @property
    def fit(self) -> AttentionFit | None:
        """Fit of attention's time here, where a stage has several shards and it was profiled."""

    @property
    def layers(self) -> int:
        """Number of the model's layers that the stage has."""

    @property
    def dense(self) -> Callable[[float], float] | None:
        """Seconds of one layer without its attention, by a step's tokens.

        Of a stage's own shard, where steps may be computed as two halves in turn.
        """


class Counts(NamedTuple):
    """Counts of what is on an instance.

    Attributes:
        running: number of requests that take part in steps; ``decodes``: number of these whose
            prompts are computed.
        decode_entries: existing KV entries of the decodes; ``kv_entries``: those of all running
            requests.
        prompt_tokens_left: see ``InstanceView``.
    """

    running: int
    decodes: int
    decode_entries: int
    kv_entries: int
    prompt_tokens_left: int


class InstanceView(Protocol):
    """An instance's statistics, read-only. Pages are counted per slice of KV heads.

    In a simulation, ``running`` costs what its requests are; the counts do not.
    """

    @property
    def name(self) -> str: ...  # noqa: D102
    @property
    def role(self) -> str: ...  # noqa: D102
    @property
    def draining(self) -> bool:
        """True if a new role waits for the last request to leave."""

    @property
    def num_pages(self) -> int:
        """Pages of the largest request that it can hold when empty."""

    @property
    def num_free_pages(self) -> int: ...  # noqa: D102
    @property
    def num_awaited_pages(self) -> int:
        """Pages of those that wait here, but for those whose KV lies here already."""

    @property
    def shards(self) -> Sequence[ShardView]:
        """The pieces of its KV, by number: where slices of KV heads are, and could move."""

    @property
    def page_size(self) -> int: ...  # noqa: D102
    @property
    def max_num_batched_tokens(self) -> int: ...  # noqa: D102
    @property
    def max_num_seqs(self) -> int: ...  # noqa: D102
    @property
    def fit(self) -> StepFit | None:
        """Fit of the time of its steps, where that has been profiled."""

    @property
    def num_requests(self) -> int:
        """Requests waiting, importing or running here."""

    @property
    def num_running(self) -> int: ...  # noqa: D102
    @property
    def kv_entries(self) -> int:
        """Number of existing KV entries of the requests running here."""

    @property
    def counts(self) -> Counts:
        """Counts of what is here, taken in one pass."""

    def longest_decodes(self, count: int, but: Container[str] = ()) -> Sequence[tuple[str, int]]:
        """Ids and KV entries of the ``count`` decodes that have the most, the longest first.

        Of equal ones, the first admitted. In a simulation this costs no more than what has come
        and gone since the last call.

        Args:
            but: ids to leave out. A request left out once may stay left out until it leaves.
        """

    @property
    def prompt_tokens_left(self) -> int:
        """Prompt tokens that requests waiting, importing or running here have still to compute.

        Up to the end of their legs; those of a preempted request count again.
        """

    @property
    def waiting(self) -> Collection[RequestView]: ...  # noqa: D102
    @property
    def importing(self) -> Mapping[str, RequestView]:
        """Requests whose KV is on its way here, by id."""

    @property
    def running(self) -> Mapping[str, RequestView]:
        """Requests that run here, by id, in the order of admission."""


class RowView(Protocol):
    """A request's part of a step: KV entries ``start`` to ``start + count``."""

    @property
    def request(self) -> RequestView: ...  # noqa: D102
    @property
    def start(self) -> int: ...  # noqa: D102
    @property
    def count(self) -> int: ...  # noqa: D102


class StepView(Protocol):
    """A step that has ended. Times are in seconds."""

    @property
    def instance(self) -> str: ...  # noqa: D102
    @property
    def rows(self) -> Sequence[RowView]: ...  # noqa: D102
    @property
    def start(self) -> float: ...  # noqa: D102
    @property
    def end(self) -> float: ...  # noqa: D102


@dataclass(slots=True)
class ClusterView:
    """The instances by name, but for those that were lost, at one time in seconds.

    It holds for one call: what a system keeps of it, requests too, may be out of date in the next.

    Attributes:
        kv_token_s: seconds that one KV token takes from the first instance to the second while
            nothing else is on its way, latencies apart; 0 where that is not known.
    """

    now: float
    instances: Mapping[str, InstanceView]
    kv_token_s: Callable[[str, str], float] = lambda source, dest: 0.0


@dataclass(slots=True)
class Assignment:
    """The legs that a waiting request goes through; later ones may be left open."""

    request: str
    legs: tuple[Leg, ...]


@dataclass(slots=True)
class Reassign:
    """Replace a request's legs. KV that exists is handed over; a running leg is cut short.

    Attributes:
        hand_off: the rule of the leg that is cut, of a request that runs or is being imported.
    """

    request: str
    legs: tuple[Leg, ...]
    hand_off: HandOffRule = "on_demand"


@dataclass(frozen=True)
class MoveSlices:
    """Move slices of KV heads of one running request between shards of its instance.

    Each of ``moves`` has the number of a shard, that of another of the same stage, and the slices
    that go there from here. All of them move at once, or none where one of the shards lacks room.
    The request goes on while pages that are full are copied, and pauses for the rest. While a move
    of the request is under way, a second one is left out, and counted.
    """

    request: str
    moves: tuple[SliceMove, ...]


@dataclass(frozen=True)
class SetRole:
    """Give an instance another role once it has no request left."""

    instance: str
    role: str


@dataclass(frozen=True)
class Pause:
    """Leave a request out of steps; it keeps its pages."""

    request: str


@dataclass(frozen=True)
class Resume:
    """Let a paused request take part in steps again."""

    request: str


@dataclass(frozen=True)
class Budget:
    """Limit the prompt tokens of each of an instance's steps from now on, until it is lost.

    Attributes:
        prompt_tokens: at least 1; None for no limit but that of the step as a whole. A longer
            prompt is cut, under any batch policy.
    """

    instance: str
    prompt_tokens: int | None


Action = Reassign | MoveSlices | SetRole | Pause | Resume | Budget


class NoOptions(Options):
    """Options of a system that has none."""


class System:
    """Base of all systems. ``route`` decides where requests run; the hooks are optional.

    Args:
        options: an instance of the class's ``Options``.

    Attributes:
        Options: options that a run file may set, in addition to the system's name.
        tick_interval: seconds between calls of ``on_tick``; None for no ticks.
        needs_fits: whether ``InstanceView.fit`` has to be there; ``needs_attention_fits``: whether
            ``ShardView.fit`` has to, of instances with attention groups.
        roles: values that an instance's optional ``role`` may have in a run file; None for any.
        ttft_counts_transfer: whether a first token drawn by an instance that hands its request on
            counts only once the KV has arrived; a run file may say otherwise.
    """

    Options: ClassVar[type[Options]] = NoOptions
    tick_interval: float | None = None
    needs_fits: bool = False
    needs_attention_fits: bool = False
    ttft_counts_transfer: bool = False
    roles: Collection[str] | None = None

    def __init__(self, options: Any = None) -> None:
        self.options = options if options is not None else self.Options()

    @property
    def needs_decode_rows(self) -> bool:
        """True if ``on_step`` looks at rows of decodes; else a simulation may leave them out."""
        return type(self).on_step is not System.on_step

    @property
    def hears_decodes(self) -> bool:
        """True if ``on_step`` has something to do after steps of decodes that have no rows."""
        return type(self).on_step is not System.on_step

    def check(self, instances: Collection[str]) -> None:
        """Raise JaxinferError if the system cannot work with instances of these names."""

    def routes(self, instances: Collection[str]) -> Collection[tuple[str, str]]:
        """Pairs of instances from the first of which KV may go to the second; by default all."""
        return list(permutations(instances, 2))

    def route(self, waiting: Collection[RequestView], cluster: ClusterView) -> Sequence[Assignment]:
        """Assign legs to some of the requests that have none to run; the rest go on waiting.

        Called when requests wait and something has changed. A request is here on arrival, and
        again when its last leg ended before the request did.
        """
        raise NotImplementedError

    def place(self, request: RequestView, instance: InstanceView) -> Placement | None:
        """Say where a request's slices of KV heads are to lie; asked when it is to be admitted.

        It is asked only for instances whose stages have several shards; again after a preemption,
        and as long as there is no room where the answer says.

        Returns:
            The slices in each shard: each slice of a stage in one shard of that stage. None
            puts them where they belong, or else where there is room.
        """
        return None

    def make_room(
        self, request: RequestView, shard: int, instance: InstanceView
    ) -> Sequence[MoveSlices]:
        """Called before a request is preempted for ``request``, which lacks pages in a shard.

        Only where a stage has several. If slices move, the request waits until they have; with none
        under way, preemption takes its course.
        """
        return ()

    def on_step(self, step: StepView, cluster: ClusterView) -> Sequence[Action]:
        """Called when a step has been committed."""
        return ()

    def on_leg_end(self, request: RequestView, leg: Leg, cluster: ClusterView) -> None:
        """Called when a leg has ended and its request goes on.

        All KV entries of ``leg`` exist, and the request is where it goes next: with its next leg's
        instance, or among those that wait for ``route``. Of a leg that ``Reassign`` cut short,
        ``leg.until`` is where it was cut. Not called for a leg that had nothing to compute, one
        that a lost instance took along (the request comes back to ``route``), one that was
        replaced before it ran, and the one that the request ends in, of which ``on_finish`` tells.
        All requests of a step are brought up to date before one of them goes on or ends; others
        may still have to.
        """

    def on_finish(self, request: RequestView, cluster: ClusterView) -> None:
        """Called once for each request when it has ended, successfully or not.

        Also for one that no pool can hold, and one that failed with a lost instance. It has left
        its instance and given its pages back; ``legs`` is empty, and ``num_known`` counts its
        output. As with ``on_leg_end``, others of its step may still have to end.
        """

    def report(self) -> Mapping[str, object]:
        """Return the system's report on a run that has ended, as JSON values."""
        return {}

    def on_tick(self, cluster: ClusterView) -> Sequence[Action]:
        """Called every ``tick_interval`` seconds while requests are unfinished."""
        return ()
