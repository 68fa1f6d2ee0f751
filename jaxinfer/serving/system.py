"""The interface of serving systems: the decisions that they make (``views.py``: what they see)."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import Any, ClassVar

from jaxinfer.options.validation import Options
from jaxinfer.serving.features.head_slices import Placement, SliceMove
from jaxinfer.serving.views import (
    ClusterView,
    HandOffRule,
    InstanceView,
    Leg,
    RequestView,
    StepView,
)


@dataclass(slots=True)
class Assignment:
    """The legs that a waiting request will take; later ones may be left open.

    Attributes:
        fetch_from: instance from whose prefix cache the first leg's instance fetches the part of
            the prompt that it lacks, if there is one; for a request that has no KV yet.
    """

    request: str
    legs: tuple[Leg, ...]
    fetch_from: str | None = None


@dataclass(slots=True)
class Reassign:
    """Replace a request's legs. Existing KV is handed over; a running leg is cut short.

    Attributes:
        hand_off: rule of the leg that is cut short, for a request that runs or is being imported.
    """

    request: str
    legs: tuple[Leg, ...]
    hand_off: HandOffRule = "on_demand"


@dataclass(frozen=True)
class MoveSlices:
    """Move slices of KV heads of one running request between shards of its instance.

    Each of ``moves`` has the number of the source shard, the number of the destination shard in the
    same stage, and the slices to move. Either all of them move, or none if a shard lacks room. The
    request continues while full pages are copied, and pauses for the rest. A second move during
    this time is ignored, and counted.
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
    """Exclude a running request from steps; it keeps its pages."""

    request: str


@dataclass(frozen=True)
class Resume:
    """Let a paused request take part in steps again."""

    request: str


@dataclass(frozen=True)
class Budget:
    """Limit the prompt tokens of each of an instance's steps from now on, until it is lost.

    Attributes:
        prompt_tokens: at least 1; None for no limit except that of the step as a whole. A longer
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
        needs_fits: whether the system needs ``InstanceView.fit``.
        needs_attention_fits: whether it needs ``ShardView.fit`` of instances with attention groups.
        needs_caches: whether it fetches KV from prefix caches, so that all instances must have one.
        roles: values that an instance's ``role`` may have in a run file; None for any.
        ttft_counts_transfer: whether a first token sampled by an instance that hands the request on
            counts only once the KV has arrived; a run file may override this.
    """

    Options: ClassVar[type[Options]] = NoOptions
    tick_interval: float | None = None
    needs_fits: bool = False
    needs_attention_fits: bool = False
    needs_caches: bool = False
    ttft_counts_transfer: bool = False
    roles: Collection[str] | None = None

    def __init__(self, options: Any = None) -> None:
        self.options = options if options is not None else self.Options()

    @property
    def needs_decode_rows(self) -> bool:
        """True if ``on_step`` reads rows of decodes; otherwise a simulation may leave them out."""
        return type(self).on_step is not System.on_step

    @property
    def hears_decodes(self) -> bool:
        """True if ``on_step`` has something to do after steps of decodes that have no rows."""
        return type(self).on_step is not System.on_step

    def check(self, instances: Collection[str]) -> None:
        """Raise JaxinferError if the system cannot work with instances of these names."""

    def routes(self, instances: Collection[str]) -> Collection[tuple[str, str]]:
        """Return pairs of instances between which KV may be sent (from, to); by default all."""
        return list(permutations(instances, 2))

    def route(self, waiting: Collection[RequestView], cluster: ClusterView) -> Sequence[Assignment]:
        """Assign legs to some of the waiting requests; the others continue to wait.

        Called when requests wait and something has changed. A request waits after its arrival, and
        again if its last leg ended before the request did.
        """
        raise NotImplementedError

    def place(self, request: RequestView, instance: InstanceView) -> Placement | None:
        """Choose where to place a request's slices of KV heads; called before it is admitted.

        Called only for instances whose stages have several shards; called again after a preemption,
        and as long as the chosen shards have no room.

        Returns:
            The slices in each shard; each slice of a stage must be in exactly one shard of that
            stage. None means the default shards or, without room there, others.
        """
        return None

    def make_room(
        self, request: RequestView, shard: int, instance: InstanceView
    ) -> Sequence[MoveSlices]:
        """Choose moves that avoid a preemption for ``request``, which lacks pages in a shard.

        Called only if a stage has several shards. If slices move, the request waits until the move
        has ended; without a move, another request is preempted.
        """
        return ()

    def on_step(self, step: StepView, cluster: ClusterView) -> Sequence[Action]:
        """Called when a step has been committed."""
        return ()

    def on_leg_end(self, request: RequestView, leg: Leg, cluster: ClusterView) -> None:
        """Called when a leg has ended and its request continues.

        All KV entries of ``leg`` exist. The request is already with its next leg's instance, or
        among those that wait for ``route``. For a leg that ``Reassign`` cut short, ``leg.until`` is
        where it was cut. All requests of a step are updated before one of them continues or ends;
        others may still have to.

        Not called for a leg that had nothing to compute, that was replaced before it ran, or that
        was lost with its instance (the request then returns to ``route``). Not called for the last
        leg of a request either; ``on_finish`` is called instead.
        """

    def on_finish(self, request: RequestView, cluster: ClusterView) -> None:
        """Called once for each request that has ended, successfully or not.

        This includes requests that no pool can hold, and requests that failed with a lost instance.
        The request has left its instance and returned its pages; ``legs`` is empty, and
        ``num_known`` includes its output. As with ``on_leg_end``, others of its step may still have
        to end.
        """

    def report(self) -> Mapping[str, object]:
        """Return the system's report on a finished run, as JSON values."""
        return {}

    def on_tick(self, cluster: ClusterView) -> Sequence[Action]:
        """Called every ``tick_interval`` seconds while requests are unfinished."""
        return ()
