"""A simulated world whose times come from the ledger of a real run."""

import heapq
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxinfer.errors import JaxinferError
from jaxinfer.ledger.ledger_file import Entry, as_text
from jaxinfer.ledger.observer import way_of
from jaxinfer.serving.batch import Batch, Transfer
from jaxinfer.serving.loop import Stop
from jaxinfer.serving.request_state import RequestState
from jaxinfer.serving.world import (
    Event,
    GoesWithout,
    InstanceBack,
    InstanceLost,
    StepDone,
    Tick,
    TransferDone,
)
from jaxinfer.simulate.cluster import ModelledCluster
from jaxinfer.simulate.world import SimulatedWorld

# When an event reached the loop: the time of its round, and its place among all events.
When = tuple[float, int]
# For each transfer, the result of ``way_of``, and the losses of its ends so far.
Way = tuple[str, int, int]


@dataclass
class Measured:
    """The measurements in a ledger, sorted by subject.

    Attributes:
        steps: times of steps, by instance and number of its losses so far, in order.
        transfers: times of transfers, by path, in order.
        ticks: times of ticks, in order.
        arrivals: arrivals in order.
        losses: losses in order.
        predicted: predicted output tokens, by request.
        ends: for each request, the reason of its end, the number of its tokens, and details of the
            reason.
        kv_token_s: seconds of one KV token, by source and destination.
        start: time at which the loop began.
        cached: pages that prefix caches had at the start.
        keeps_tokens: whether prompts and sampled tokens are recorded.
        without: numbers of the shards that were lost at the start, by instance.
        known: ids of the requests whose uses of pages were known at the start.
    """

    steps: dict[tuple[str, int], deque[tuple[When, Any]]] = field(
        default_factory=lambda: defaultdict(deque)
    )
    transfers: dict[Way, deque[tuple[When, Any]]] = field(
        default_factory=lambda: defaultdict(deque)
    )
    ticks: deque[When] = field(default_factory=deque)
    arrivals: list[tuple[When, RequestState]] = field(default_factory=list)
    losses: list[tuple[When, Event]] = field(default_factory=list)
    predicted: dict[str, tuple[int, int]] = field(default_factory=dict)
    ends: dict[str, tuple[str, int, Any]] = field(default_factory=dict)
    kv_token_s: dict[tuple[str, str], float] = field(default_factory=dict)
    start: float = 0.0
    cached: int = 0
    keeps_tokens: bool = False
    without: dict[str, list[int]] = field(default_factory=dict)
    known: list[str] = field(default_factory=list)

    def predict(self, request: RequestState) -> tuple[int, int] | None:
        """Return the prediction that the real run recorded for a request."""
        return self.predicted.get(request.id)

    @property
    def known_requests(self) -> list[RequestState]:
        """Requests that arrived and whose uses of pages were known at the start."""
        arrived = {request.id: request for _, request in self.arrivals}
        return [arrived[name] for name in self.known if name in arrived]

    def check_stop(self, request: RequestState, token: int) -> Stop | None:
        """End a request at the token at which the real one ended because of its text or a NaN."""
        reason, count, detail = self.ends.get(request.id, ("", 0, None))
        if len(request.output_token_ids) != count:
            return None
        if reason == "error" and detail == "nan":
            return "error", detail
        return ("stop", detail) if reason == "stop" else None


def measured(entries: Sequence[Entry]) -> Measured:
    """Sort what a ledger measured by subject."""
    found, lives, now = Measured(), defaultdict[str, int](int), 0.0
    for number, (kind, decided, given) in enumerate(entries):
        when = now, number
        match kind:
            case "start":
                found.start, found.keeps_tokens, found.cached, found.without, *known = given
                found.known = known[0] if known else []
            case "round":
                now = given
            case "arrival":
                found.arrivals.append((when, _request(decided, given)))
            case "step":
                found.steps[decided[0], lives[decided[0]]].append((when, given))
            case "landed":
                way = as_text(decided), lives[decided[1]], lives[decided[2]]
                found.transfers[way].append((when, given))
            case "way":
                found.kv_token_s[decided[0], decided[1]] = given
            case "tick":
                found.ticks.append(when)
            case "lost":
                found.losses.append((when, InstanceLost(decided[0], given, decided[1])))
                lives[decided[0]] += 1
            case "back":
                found.losses.append((when, InstanceBack(*decided)))
            case "without":
                found.losses.append((when, GoesWithout(*decided)))
            case "legs" if given:
                found.predicted[decided[0]] = given[0], given[1]
            case "end":
                found.ends[decided[0]] = decided[1], decided[2], given
    return found


def _request(decided: Sequence[Any], given: Sequence[Any]) -> RequestState:
    id, prompt_len, max_tokens, (goes_first, takes_cached, *session) = decided
    arrival, tokens = given
    request = RequestState(id, prompt_len, max_tokens, arrival, tokens)
    request.goes_first, request.takes_cached = goes_first, takes_cached
    request.session = session[0] if session else None
    return request


class MeasuredWorld(SimulatedWorld):
    """Delivers each step, transfer, arrival and loss at the time recorded in the real run.

    Its rounds are those of ``SimulatedWorld``; recorded times replace all costs.
    """

    def __init__(self, given: Measured) -> None:
        super().__init__(ModelledCluster({}, {}, {}), (), given.start)
        self._given, self._is_over = given, False
        self._lives: dict[str, int] = defaultdict(int)
        for when, request in given.arrivals:
            self._num_added += 1
            self._then(when, lambda request=request: self._arrive(request))
        for when, event in given.losses:
            self._then(when, event)

    def _then(self, when: When, happens: Any) -> None:
        heapq.heappush(self.heap, (*when, 0, 0, happens))

    def launch(self, batch: Batch) -> None:
        """Start a step, which ends at the recorded time, or never if the real step was lost."""
        steps = self._given.steps[batch.instance, self._lives[batch.instance]]
        if steps:
            when, (start, end, stages, tokens) = steps.popleft()
            drawn = tokens if self._given.keeps_tokens else [0] * batch.work.sampled
            self._then(when, StepDone(batch, drawn, start, end, stages=stages))
        for transfer in batch.transfers:
            self.start_transfer(transfer)

    def start_transfer(self, transfer: Transfer) -> None:
        """Start a transfer with its recorded times."""
        lives = self._lives[transfer.source], self._lives[transfer.dest]
        way = way_of(transfer), *lives
        if found := self._given.transfers[way]:
            when, (start, end, num_bytes) = found.popleft()
            self._then(when, TransferDone(transfer, start, end, num_bytes))

    def kv_token_s(self, source: str, dest: str) -> float:
        """See World."""
        return self._given.kv_token_s.get((source, dest), 0.0)

    def wake_at(self, time: float) -> None:
        """Schedule a Tick for the time at which the real one came."""
        if self._given.ticks:
            self._then(self._given.ticks.popleft(), Tick())

    def due_events(self) -> Sequence[Event]:
        """See SimulatedWorld.

        Raises:
            JaxinferError: the loop waits for an event that the real loop never received.
        """
        events = super().due_events()
        if not events and self._is_over:
            raise JaxinferError("the real run has heard of nothing more")
        self._is_over = not events
        for event in events:
            if isinstance(event, InstanceLost):
                self._lives[event.instance] += 1
        return events
