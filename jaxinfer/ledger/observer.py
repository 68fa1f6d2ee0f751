"""The observer, which sits between the loop and a real or simulated world."""

from collections.abc import Callable, Sequence
from json.encoder import encode_basestring_ascii as quoted
from typing import Any

from jaxinfer.ledger.ledger_file import Entries, as_text
from jaxinfer.serving.batch import Batch, Transfer
from jaxinfer.serving.kv_shards import HeldPages, KVShards
from jaxinfer.serving.loop import ServingLoop
from jaxinfer.serving.page_pool import CountedPages
from jaxinfer.serving.request_state import RequestState
from jaxinfer.serving.world import (
    Arrival,
    Event,
    GoesWithout,
    InstanceBack,
    InstanceLost,
    StepDone,
    Tick,
    TransferDone,
    World,
)

_BOOL = "false", "true"


class Ledger:
    """Records a loop's events and decisions, in order.

    Each round has a single time, at which its events had arrived. Systems that use the time
    therefore make the same decisions if the events are the same.

    Args:
        entries: receives each entry: its kind, the decision or event, and the measurement.
        hears: whether to record events, too; those of a simulation follow from its decisions.
    """

    def __init__(self, entries: Entries, hears: bool = True) -> None:
        self.entries, self.hears = entries, hears
        self.add = entries.decided.append
        # Page digests depend on tokens; with a prefix cache, they are part of the input.
        self.keeps_tokens = False

    def keep(self, kind: str, decided: Sequence[Any], measured: Any = None) -> None:
        """Add an entry whose decision and measurement are JSON values."""
        self.add(as_text((kind, decided)))
        self.measure(measured)

    def measure(self, value: Any) -> None:
        """Add the measurement of the latest entry, a JSON value or None."""
        if self.hears and value is not None:
            self.entries.measure(value)

    def around(self, world: World) -> World:
        """Return a world for the loop that records what passes between the loop and ``world``."""
        return ObservedWorld(world, self) if self.hears else DecidedWorld(world, self)

    def watch(self, loop: ServingLoop, known: Sequence[str] = ()) -> None:
        """Record a loop's decisions that do not reach its world.

        Args:
            known: ids of the requests whose uses of pages are known beforehand.
        """
        assignments = loop.assignments
        instances = assignments.instances.values()
        self.keeps_tokens = any(each.kv.cache is not None for each in instances)
        cached = sum(shard.pool.num_idle for each in instances for shard in each.kv.shards)
        without = {each.name: gone for each in instances if (gone := _closed(each.kv))}
        start = [loop.world.now(), self.keeps_tokens, cached, without]
        self.keep("start", [], [*start, list(known)] if known else start)
        assignments.on_legs = self._legs
        assignments.on_preempt = lambda name, request: self.keep("victim", [name, request.id])
        assignments.on_role = lambda name, role: self.keep("role", [name, role])

    def ended(self, request: RequestState) -> None:
        """Record the end of a request."""
        reason = request.finish_reason and quoted(request.finish_reason)
        tokens = len(request.output_token_ids)
        self.add(f'["end",[{quoted(request.id)},{reason or "null"},{tokens}]]')
        self.measure(request.stop_reason)
        self.entries.write()

    def _legs(self, request: RequestState) -> None:
        legs = [
            f"[{quoted(leg.instance)},{'null' if leg.until is None else leg.until},"
            f"{quoted(leg.hand_off)}]"
            for leg in request.legs
        ]
        self.add(f'["legs",[{quoted(request.id)},[{",".join(legs)}]]]')
        self.measure(request.predicted)


class DecidedWorld:
    """Passes calls on to another ``World``, and records the loop's decisions."""

    def __init__(self, world: World, ledger: Ledger) -> None:
        # A simulation has many steps, so functions are looked up only once.
        self._add, self._launch, self._start_transfer = (
            ledger.add,
            world.launch,
            world.start_transfer,
        )
        self.now, self.due_events, self.kv_token_s = world.now, world.due_events, world.kv_token_s
        self.arrivals_left, self.wake_at = world.arrivals_left, world.wake_at

    def launch(self, batch: Batch) -> None:
        """Record a step, and start it."""
        rest = _rows(batch) if batch.rows else ""
        self._add(
            f'["batch",[{quoted(batch.instance)},{batch.pages_in_use},{batch.grouped},'
            f"{batch.grouped_context}{rest}]]"
        )
        self._launch(batch)

    def start_transfer(self, transfer: Transfer) -> None:
        """Record a transfer, and start it."""
        self._add(f'["send",{box_of(transfer)}]')
        self._start_transfer(transfer)


class ObservedWorld(DecidedWorld):
    """Records the events of the other world, too."""

    def __init__(self, world: World, ledger: Ledger) -> None:
        super().__init__(world, ledger)
        self._world, self._ledger = world, ledger
        self._time = world.now()
        self._kv_token_s: dict[tuple[str, str], float] = {}
        self.now, self.due_events, self.kv_token_s = self._now, self._due_events, self._way_s

    def _now(self) -> float:
        """Return the time of this round."""
        return self._time

    def _due_events(self) -> Sequence[Event]:
        """Return the next round's events, and record them."""
        self._ledger.entries.write()
        events = self._world.due_events()
        self._time = self._world.now()
        self._ledger.keep("round", [], self._time)
        for event in events:
            _NOTES[type(event)](self._ledger, event)
        return events

    def _way_s(self, source: str, dest: str) -> float:
        """See ``World.kv_token_s``. Its first answer is recorded, and holds for the run."""
        way = source, dest
        if way not in self._kv_token_s:
            self._kv_token_s[way] = self._world.kv_token_s(source, dest)
            self._ledger.keep("way", way, self._kv_token_s[way])
        return self._kv_token_s[way]


def _closed(kv: KVShards) -> list[int]:
    """Return the numbers of the lost shards."""
    return [number for number, shard in enumerate(kv.shards) if shard.pool.is_closed]


def _rows(batch: Batch) -> str:
    """Return the rest of a step's entry: rows, their pages, and transfers.

    If the step is computed in parts, the numbers of each part's rows follow, but for the last.
    """
    rows = [
        f"[{quoted(row.request.id)},{row.start},{row.count},{_BOOL[row.samples]}]"
        for row in batch.rows
    ]
    pages = [_pages(row.hold, row.start, row.start + row.count) for row in batch.rows]
    found = [rows, pages]
    if batch.transfers or batch.halves:
        found.append([box_of(transfer) for transfer in batch.transfers])
    if batch.halves:
        numbers = {id(row): str(number) for number, row in enumerate(batch.rows)}
        found += [[numbers[id(row)] for row in part] for part in batch.halves[:-1]]
    return "".join([f",[{','.join(texts)}]" for texts in found])


def _pages(hold: HeldPages, start: int, stop: int) -> str:
    """Return the pages of some tokens, for each slice of each shard if there are several.

    If pages have no numbers and lie in one place, returns their count.
    """
    size = hold.kv.page_size
    first, last = start // size, -(-stop // size)
    found: list[Any]
    if len(hold.tables) == 1 and len(hold.tables[0]) == 1:
        (pages,) = hold.tables[0].values()
        if type(hold.kv.shards[0].pool) is CountedPages:
            return str(min(last, len(pages)) - first)
        found = pages[first:last]
    else:
        found = [
            [[piece, pages[first:last]] for piece, pages in table.items()] for table in hold.tables
        ]
    return str(found).replace(" ", "")  # Integers alone, whose JSON is the same.


def box_of(transfer: Transfer) -> str:
    """Describe a transfer as JSON: request, instances, tokens, and pages on both instances."""
    t = transfer
    source = _pages(t.source_hold, t.start, t.stop)
    dest = _pages(t.dest_hold, t.start, t.stop)
    return f"[{_way(t)},{source},{dest}{_moves(t)}]"


def way_of(transfer: Transfer) -> str:
    """Describe a transfer without its pages: request, instances, tokens, and slices that move."""
    return f"[{_way(transfer)}{_moves(transfer)}]"


def _way(t: Transfer) -> str:
    names = f"{quoted(t.request.id)},{quoted(t.source)},{quoted(t.dest)}"
    return f"{names},{t.start},{t.stop}"


def _moves(t: Transfer) -> str:
    return "" if t.slice_move is None else f",{as_text(t.slice_move.moves)}"


def _arrival(ledger: Ledger, event: Arrival) -> None:
    request = event.request
    sizes = f"{request.prompt_len},{request.max_tokens}"
    flags = f"{_BOOL[request.goes_first]},{_BOOL[request.takes_cached]}"
    if request.session is not None:
        flags += f",{quoted(request.session)}"
    ledger.add(f'["arrival",[{quoted(request.id)},{sizes},[{flags}]]]')
    tokens = list(request.prompt_token_ids) if ledger.keeps_tokens else []
    ledger.measure([request.arrival, tokens])


def _step(ledger: Ledger, event: StepDone) -> None:
    tokens = list(event.tokens) if ledger.keeps_tokens else len(event.tokens)
    stages = list(event.stages) if len(event.stages) > 1 else []
    ledger.keep("step", [event.instance], [event.start, event.end, stages, tokens])


def _transfer(ledger: Ledger, event: TransferDone) -> None:
    ledger.add(f'["landed",{way_of(event.transfer)}]')
    ledger.measure([event.start, event.end, event.num_bytes])


def _lost(ledger: Ledger, event: InstanceLost) -> None:
    ledger.keep("lost", [event.instance, event.returns], event.reason)


def _back(ledger: Ledger, event: InstanceBack) -> None:
    ledger.keep("back", [event.instance])


def _without(ledger: Ledger, event: GoesWithout) -> None:
    ledger.keep("without", [event.instance, list(event.without), event.returns])


def _tick(ledger: Ledger, event: Tick) -> None:
    ledger.keep("tick", [])


_NOTES: dict[type, Callable[[Ledger, Any], None]] = {
    Arrival: _arrival,
    StepDone: _step,
    TransferDone: _transfer,
    InstanceLost: _lost,
    InstanceBack: _back,
    GoesWithout: _without,
    Tick: _tick,
}
