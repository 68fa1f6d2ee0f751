"""Views of a serving system: requests, steps, instances, and the cluster of instances."""

from collections.abc import Callable, Collection, Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

from jaxinfer.serving.step_fit import AttentionFit, StepFit

HandOffRule = Literal["on_demand", "at_end", "when_room", "per_chunk", "per_segment"]


@dataclass(frozen=True)
class Leg:
    """A part of one request, run by one instance.

    Attributes:
        instance: instance that runs it.
        until: number of KV entries at which it ends; None is the end of the request. The instance
            that computes the prompt's last position samples the first token.
        hand_off: when the KV is sent to the next leg's instance. ``on_demand``: when that instance
            admits the request. ``at_end``: when this leg ends, if there is room (otherwise on
            demand). ``when_room``: when this leg ends, or as soon as there is room, ahead of
            requests that wait there, and even beside steps whose token budget is used up.
            ``per_chunk``: after each step, once the next instance has room. ``per_segment``: as
            ``per_chunk``, but during the step, after each piece of the model's layers.
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
    def session(self) -> str | None:
        """Name of the session that the request belongs to, if any."""

    @property
    def first_token_at(self) -> float | None:
        """Time at which the first token existed; None before."""

    @property
    def predicted(self) -> tuple[int, int] | None:
        """Smallest and largest predicted number of output tokens, if predicted."""

    @property
    def computed(self) -> int:
        """Number of existing KV entries."""

    @property
    def num_known(self) -> int:
        """Number of prompt and output tokens on the host."""

    @property
    def held_by(self) -> str | None:
        """Instance that has the KV between two legs; None if the KV must be recomputed."""

    @property
    def legs(self) -> Sequence[Leg]:
        """The current leg and the next ones."""

    @property
    def paused(self) -> bool: ...  # noqa: D102
    @property
    def slices(self) -> Sequence[Collection[int]]:
        """Slices of KV heads in each shard of the instance, or empty."""


class ShardView(Protocol):
    """One shard of an instance's KV, read-only."""

    @property
    def stage(self) -> int:
        """Pipeline stage. A slice can be in any shard of its stage."""

    @property
    def group(self) -> str:
        """Name of the device group, if the instance comes from a run file."""

    @property
    def device(self) -> int:
        """Number of the device in its group, if each device is its own shard; otherwise 0."""

    @property
    def slices(self) -> Collection[int]:
        """Slices of KV heads that are here unless a request has them elsewhere."""

    @property
    def num_pages(self) -> int: ...  # noqa: D102
    @property
    def num_free_pages(self) -> int: ...  # noqa: D102
    @property
    def num_pairs(self) -> int:
        """Number of slices here, over all requests."""

    @property
    def fit(self) -> AttentionFit | None:
        """Fitted time of attention here, if a stage has several shards and was profiled."""

    @property
    def layers(self) -> int:
        """Number of the model's layers in the stage."""

    @property
    def dense(self) -> Callable[[float], float] | None:
        """Seconds of one layer without its attention, as a function of a step's tokens.

        Given for a stage's own shard if steps may be computed as two halves in turn.
        """


class Counts(NamedTuple):
    """Counts of the requests on an instance.

    Attributes:
        running: number of requests that take part in steps.
        decodes: number of these whose prompts are computed.
        decode_entries: existing KV entries of the decodes.
        kv_entries: existing KV entries of all running requests.
        prompt_tokens_left: see ``InstanceView``.
    """

    running: int
    decodes: int
    decode_entries: int
    kv_entries: int
    prompt_tokens_left: int


class InstanceView(Protocol):
    """An instance's statistics, read-only. Pages are counted per slice of KV heads.

    In a simulation, reading ``running`` takes time for each request; reading counts does not.
    """

    @property
    def name(self) -> str: ...  # noqa: D102
    @property
    def role(self) -> str: ...  # noqa: D102
    @property
    def draining(self) -> bool:
        """True if a new role takes effect once the last request has left."""

    @property
    def num_pages(self) -> int:
        """Pages of the largest request that the instance can hold when empty."""

    @property
    def num_free_pages(self) -> int: ...  # noqa: D102
    @property
    def num_awaited_pages(self) -> int:
        """Number of pages that the waiting requests without KV here will need."""

    @property
    def shards(self) -> Sequence[ShardView]:
        """The shards of its KV, by number: where slices of KV heads are or could move."""

    @property
    def page_size(self) -> int: ...  # noqa: D102
    @property
    def max_num_batched_tokens(self) -> int: ...  # noqa: D102
    @property
    def max_num_seqs(self) -> int: ...  # noqa: D102
    @property
    def fit(self) -> StepFit | None:
        """Fitted step times, if profiled."""

    @property
    def num_requests(self) -> int:
        """Number of requests waiting, importing or running here."""

    @property
    def num_running(self) -> int: ...  # noqa: D102
    @property
    def kv_entries(self) -> int:
        """Number of existing KV entries of the requests running here."""

    @property
    def counts(self) -> Counts:
        """Counts of the requests here, taken in one pass."""

    def longest_decodes(self, count: int, but: Container[str] = ()) -> Sequence[tuple[str, int]]:
        """Return ids and KV entries of the ``count`` longest decodes, the longest first.

        Among equal ones, the first admitted comes first. In a simulation this costs only as much as
        the number of requests that have come and gone since the last call.

        Args:
            but: ids to leave out. A request left out once may stay left out until it leaves.
        """

    @property
    def prompt_tokens_left(self) -> int:
        """Number of prompt tokens that waiting, importing and running requests still have to
        compute.

        Tokens count up to the end of the request's leg; those of a preempted request count again.
        """

    def cached_tokens(self, request: RequestView) -> int:
        """Return the number of a request's prompt tokens in the instance's prefix cache.

        Only whole pages from the beginning of the prompt count, and never its last token. The time
        of this call is proportional to the number of the prompt's pages.
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
    """The instances that are not lost, by name, as they are at ``now``.

    It is valid for one call: anything that a system keeps of it, including requests, may be out of
    date in the next call.

    Attributes:
        kv_token_s: seconds to send one KV token from the first instance to the second over an idle
            link, without latency; 0 if unknown.
    """

    now: float
    instances: Mapping[str, InstanceView]
    kv_token_s: Callable[[str, str], float] = lambda source, dest: 0.0
