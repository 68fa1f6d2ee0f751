"""The one observer of the loop: it stands between loop and world, real or simulated alike."""

from collections.abc import Callable, Sequence
from typing import Any

from jaxinfer.ledger.ledger_file import Keep
from jaxinfer.serving.batch import Batch, Row, Transfer
from jaxinfer.serving.kv_shards import HeldPages
from jaxinfer.serving.loop import ServingLoop
from jaxinfer.serving.request_state import RequestState
from jaxinfer.serving.system import MoveSlices
from jaxinfer.serving.world import (
    Arrival,
    Event,
    InstanceBack,
    InstanceLost,
    StepDone,
    Tick,
    TransferDone,
    World,
)


class Ledger:
    """Notes what a loop hears and decides, in order.

    A round has one time: what the clock says when its events have come. Systems that go by the
    time then decide alike wherever the events are the same.

    Args:
        keep: takes each entry: its kind, what was decided or heard, and what was measured.
        measures: whether somebody asks for what was measured; a simulation's times are its own.
    """

    def __init__(self, keep: Keep, measures: bool = True) -> None:
        self.keep, self.measures = keep, measures
        # Page digests are of tokens: where a prefix cache is, they are part of what was heard.
        self.keeps_tokens = False

    def around(self, world: World) -> "ObservedWorld":
        """The world as a loop is to see it."""
        return ObservedWorld(world, self)

    def watch(self, loop: ServingLoop) -> None:
        """Hear of a loop's decisions that do not reach its world."""
        assignments = loop.assignments
        instances = assignments.instances.values()
        self.keeps_tokens = any(each.kv.cache is not None for each in instances)
        cached = sum(shard.pool.num_idle for each in instances for shard in each.kv.shards)
        self.keep("start", [], [loop.world.now(), self.keeps_tokens, cached])
        assignments.on_legs = self._legs
        assignments.on_preempt = lambda name, request: self.keep("victim", [name, request.id], None)
        assignments.on_role = lambda name, role: self.keep("role", [name, role], None)

    def ended(self, request: RequestState) -> None:
        """Note the end of a request."""
        decided = [request.id, request.finish_reason, len(request.output_token_ids)]
        self.keep("end", decided, request.stop_reason)

    def _legs(self, request: RequestState) -> None:
        legs = [[leg.instance, leg.until, leg.hand_off] for leg in request.legs]
        self.keep("legs", [request.id, legs], request.predicted)


class ObservedWorld:
    """Implements ``jaxinfer.serving.world.World`` by another one, and notes what goes through."""

    def __init__(self, world: World, ledger: Ledger) -> None:
        self._world, self._ledger = world, ledger
        self._keep = ledger.keep
        self._now = world.now()
        self._kv_token_s: dict[tuple[str, str], float] = {}

    def now(self) -> float:
        """The time of this round."""
        return self._now

    def due_events(self) -> Sequence[Event]:
        """Return the next round's events, and note them."""
        events = self._world.due_events()
        self._now = self._world.now()
        self._keep("round", [], self._now if self._ledger.measures else None)
        for event in events:
            _NOTES[type(event)](self._ledger, event)
        return events

    def arrivals_left(self) -> bool:
        """See World."""
        return self._world.arrivals_left()

    def launch(self, batch: Batch) -> None:
        """Note a step, and start it."""
        self._keep("batch", _batch(batch), None)
        self._world.launch(batch)

    def start_transfer(self, transfer: Transfer) -> None:
        """Note a transfer, and start it."""
        self._keep("send", box_of(transfer), None)
        self._world.start_transfer(transfer)

    def wake_at(self, time: float) -> None:
        """See World."""
        self._world.wake_at(time)

    def kv_token_s(self, source: str, dest: str) -> float:
        """See World. What it says once is noted, and holds for the run."""
        way = source, dest
        if way not in self._kv_token_s:
            self._kv_token_s[way] = self._world.kv_token_s(source, dest)
            self._keep("way", list(way), self._kv_token_s[way])
        return self._kv_token_s[way]


def _batch(batch: Batch) -> list[Any]:
    """Instance, pages in use, grouped decodes, rows, the pages that each writes, and transfers."""
    found: list[Any] = [
        batch.instance, batch.pages_in_use, batch.grouped, batch.grouped_context
    ]  # fmt: skip
    if batch.rows:
        found.append([[row.request.id, row.start, row.count, row.samples] for row in batch.rows])
        found.append([_written(row) for row in batch.rows])
        if batch.transfers:
            found.append([box_of(transfer) for transfer in batch.transfers])
    return found


def _written(row: Row) -> list[Any]:
    return pages_of(row.hold, row.start, row.start + row.count)


def pages_of(hold: HeldPages, start: int, stop: int) -> list[Any]:
    """Pages of some tokens: of each slice of each shard or, where there is one, of that."""
    size = hold.kv.page_size
    here = slice(start // size, -(-stop // size))
    if len(hold.tables) == 1 and len(hold.tables[0]) == 1:
        (pages,) = hold.tables[0].values()
        return pages[here]
    return [[[piece, pages[here]] for piece, pages in table.items()] for table in hold.tables]


def box_of(transfer: Transfer) -> list[Any]:
    """Describe a transfer: request, ends, tokens, and the pages at both ends."""
    t = transfer
    ends = (t.source_hold, t.dest_hold)
    pages = [pages_of(hold, t.start, t.stop) for hold in ends]
    found = [t.request.id, t.source, t.dest, t.start, t.stop, *pages]
    return found if t.slice_move is None else [*found, _moves(t.slice_move)]


def way_of(t: Transfer) -> list[Any]:
    """A transfer without its pages: request, ends, tokens, and the slices that move."""
    found = [t.request.id, t.source, t.dest, t.start, t.stop]
    return found if t.slice_move is None else [*found, _moves(t.slice_move)]


def _moves(move: MoveSlices) -> list[Any]:
    return [[source, dest, list(slices)] for source, dest, slices in move.moves]


def _arrival(ledger: Ledger, event: Arrival) -> None:
    request = event.request
    tokens = list(request.prompt_token_ids) if ledger.keeps_tokens else []
    flags = [request.goes_first, request.takes_cached]
    decided = [request.id, request.prompt_len, request.max_tokens, flags]
    ledger.keep("arrival", decided, [request.arrival, tokens])


def _step(ledger: Ledger, event: StepDone) -> None:
    if not ledger.measures:
        ledger.keep("step", [event.instance], None)
        return
    tokens = list(event.tokens) if ledger.keeps_tokens else len(event.tokens)
    stages = list(event.stages) if len(event.stages) > 1 else []
    ledger.keep("step", [event.instance], [event.start, event.end, stages, tokens])


def _transfer(ledger: Ledger, event: TransferDone) -> None:
    t = event.transfer
    ledger.keep("landed", way_of(t), [event.start, event.end, event.num_bytes])


def _lost(ledger: Ledger, event: InstanceLost) -> None:
    ledger.keep("lost", [event.instance, event.returns], event.reason)


def _back(ledger: Ledger, event: InstanceBack) -> None:
    ledger.keep("back", [event.instance, *event.without], None)


def _tick(ledger: Ledger, event: Tick) -> None:
    ledger.keep("tick", [], None)


_NOTES: dict[type, Callable[[Ledger, Any], None]] = {
    Arrival: _arrival,
    StepDone: _step,
    TransferDone: _transfer,
    InstanceLost: _lost,
    InstanceBack: _back,
    Tick: _tick,
}
