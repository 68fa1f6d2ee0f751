"""The seam between the loop and a world: batches and transfers go down, events come up."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from jaxinfer.serving.batch import Batch, Row, Transfer
from jaxinfer.serving.request_state import RequestState


@dataclass(slots=True)
class Arrival:
    """A request has come in."""

    request: RequestState


@dataclass(slots=True)
class StepDone:
    """A step has ended.

    ``tokens`` (and ``logprobs``, and ``details``) are one per sampling row, in row order.
    ``details``, and ``prompt_details`` by request and position, the loop only passes on, and so
    it does ``stages``: start and end of each pipeline stage's part.
    """

    batch: Batch
    tokens: Sequence[int]
    start: float
    end: float
    logprobs: Sequence[float] = ()
    details: Sequence[object] = ()
    prompt_details: Mapping[str, Mapping[int, object]] = field(default_factory=dict)
    stages: Sequence[tuple[float, float]] = ()
    instance: str = field(init=False)
    rows: Sequence[Row] = field(init=False)

    def __post_init__(self) -> None:
        self.instance, self.rows = self.batch.instance, self.batch.rows  # Systems look at these.


@dataclass(slots=True)
class TransferDone:
    """A transfer's last byte has landed. ``num_bytes`` counts KV entries, not padding."""

    transfer: Transfer
    start: float
    end: float
    num_bytes: int = 0


@dataclass(slots=True)
class Tick:
    """The time asked for with ``World.wake_at`` has come."""


@dataclass(slots=True)
class InstanceLost:
    """An instance has failed: nothing of its steps and transfers comes any more.

    ``reason`` is for the user, in one line. ``returns``: it is being started again; InstanceBack is
    to come or, where it cannot be started, InstanceLost once more.
    """

    instance: str
    reason: str
    returns: bool = False


@dataclass(slots=True)
class InstanceBack:
    """An instance that was lost takes requests again. It has no KV."""

    instance: str


@dataclass(slots=True)
class GoesWithout:
    """An instance has all shards of its KV but these, by their numbers, from here on.

    Those that it has again are empty; what lies in the others stays. ``returns``: more of them are
    being started again, and the next GoesWithout says what has come of it.
    """

    instance: str
    without: Sequence[int] = ()
    returns: bool = False


Event = Arrival | StepDone | TransferDone | Tick | InstanceLost | InstanceBack | GoesWithout


class World(Protocol):
    """Supplies time and execution. Times are seconds since the run began."""

    def now(self) -> float:
        """The time."""

    def due_events(self) -> Sequence[Event]:
        """The events that are due, in order; waits for the first.

        Empty only where nothing is outstanding: no arrival, step, transfer, tick or return.
        """

    def arrivals_left(self) -> bool:
        """Tell whether an Arrival is still to come."""

    def launch(self, batch: Batch) -> None:
        """Start a step, and its transfers, whose TransferDone comes after the StepDone.

        Steps of one instance run in the order of their launches.
        """

    def start_transfer(self, transfer: Transfer) -> None:
        """Start moving KV entries whose source data exists and whose destination is reserved."""

    def wake_at(self, time: float) -> None:
        """Ask for a Tick."""

    def kv_token_s(self, source: str, dest: str) -> float:
        """Seconds of one KV token from one instance to another alone; 0 where it is not known."""
