"""The interface between loop and world: batches and transfers go out, events come back."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from jaxinfer.serving.batch import Batch, Row, Transfer
from jaxinfer.serving.request_state import RequestState


@dataclass(slots=True)
class Arrival:
    """A request has arrived."""

    request: RequestState


@dataclass(slots=True)
class StepDone:
    """A step has ended.

    ``tokens``, ``logprobs`` and ``details`` have one item per sampling row, in row order.
    ``prompt_details`` are by request and position. ``stages`` has the start and end of each
    pipeline stage's part. The loop only passes on ``details``, ``prompt_details`` and ``stages``.
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
        self.instance, self.rows = self.batch.instance, self.batch.rows  # Systems read these.


@dataclass(slots=True)
class TransferDone:
    """A transfer's last byte has landed. ``num_bytes`` counts KV entries, not padding."""

    transfer: Transfer
    start: float
    end: float
    num_bytes: int = 0


@dataclass(slots=True)
class Tick:
    """The time requested with ``World.wake_at`` has come."""


@dataclass(slots=True)
class InstanceLost:
    """An instance has failed: none of its steps and transfers will end.

    ``reason`` is one line for the user. With ``returns``, the instance is being restarted:
    InstanceBack will follow, or InstanceLost once more if the restart fails.
    """

    instance: str
    reason: str
    returns: bool = False


@dataclass(slots=True)
class InstanceBack:
    """A lost instance accepts requests again. It has no KV."""

    instance: str


@dataclass(slots=True)
class GoesWithout:
    """An instance continues without the shards of its KV that have these numbers.

    Shards that have returned are empty; the others keep their contents. With ``returns``, more
    shards are being restarted, and another GoesWithout will follow.
    """

    instance: str
    without: Sequence[int] = ()
    returns: bool = False


Event = Arrival | StepDone | TransferDone | Tick | InstanceLost | InstanceBack | GoesWithout


class World(Protocol):
    """Supplies time and execution. Times are seconds since the run began."""

    def now(self) -> float:
        """Return the time."""

    def due_events(self) -> Sequence[Event]:
        """Wait for the first due event, and return all that are due, in order.

        There is none only if nothing is outstanding: no arrival, step, transfer, tick or return.
        """

    def arrivals_left(self) -> bool:
        """Tell whether an Arrival is still to come."""

    def launch(self, batch: Batch) -> None:
        """Start a step and its transfers; each TransferDone comes after the StepDone.

        Steps of one instance run in the order of their launches.
        """

    def start_transfer(self, transfer: Transfer) -> None:
        """Start to move KV entries whose source data exists and whose destination is reserved."""

    def wake_at(self, time: float) -> None:
        """Ask for a Tick."""

    def kv_token_s(self, source: str, dest: str) -> float:
        """Return the seconds to send one KV token between two idle instances; 0 if unknown."""
