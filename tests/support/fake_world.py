"""A world in virtual time whose KV cache is modelled cell by cell and verified as it runs.

Every cell of every page says what it holds: (request, epoch, position, token, slice), or with
prefix caching (all tokens so far, position, token, slice) since requests may share it. A step
reads all earlier positions of its rows through the page tables as they were at launch, and a
sampled token is a function of what was read: so a wrong page, a page reused too early, a
missing transfer or a lost token shows as an assertion or as a wrong output.
"""

import heapq
import itertools
import random
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from fake_tokens import Reference, logprob_of, next_token

from jaxinfer.serving.batch import Batch, Row, Transfer
from jaxinfer.serving.instance import Instance
from jaxinfer.serving.kv_shards import HeldPages
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
)

Cell = tuple[Hashable, ...]
# Of each page of each shard of each instance, what its places hold.
Cells = Mapping[tuple[str, int, int], dict[int, Cell]]
# For each shard, slice -> page numbers: a copy of HeldPages.tables.
Tables = list[dict[int, list[int]]]


@dataclass
class Step:
    """A launched batch, with what the host knew and where the pages were at that time."""

    batch: Batch
    tables: list[Tables]
    inputs: list[list[int | None]]
    start: float = 0.0
    end: float = 0.0


@dataclass
class Timing:
    """Durations are drawn from 1 to the maximum, in whole seconds, so that many events tie.

    ``transfers`` has the seconds of those to an instance, and ``lost`` says when one fails, is back
    and fails again, by turns; of those in ``fail_to_start``, what would be the last return is the
    news that there is none. An instance that is back goes ``without`` some shards, by number, for
    so many seconds; None: for good. What happens at one time happens in any order, unless
    ``in_order``.
    """

    seed: int = 0
    max_step: int = 1
    max_transfer: int = 1
    stages: dict[str, int] = field(default_factory=dict)
    transfers: dict[str, int] = field(default_factory=dict)
    lost: Mapping[str, float | Sequence[float]] = field(default_factory=dict)
    fail_to_start: Collection[str] = ()
    without: Mapping[str, tuple[Sequence[int], int | None]] = field(default_factory=dict)
    in_order: bool = False


class FakeWorld:
    """Implements ``jaxinfer.serving.world.World``.

    ``check`` is called after every change, and ``at_rest`` when all has been decided for now.
    """

    def kv_token_s(self, source: str, dest: str) -> float:
        return 0.0

    def __init__(
        self,
        instances: Sequence[Instance],
        requests: Sequence[RequestState],
        timing: Timing | None = None,
        check: Callable[[], None] = lambda: None,
        max_steps: int = 100_000,
        at_rest: Callable[[], None] = lambda: None,
        cells: Cells | None = None,
    ) -> None:
        self.instances = {i.name: i for i in instances}
        self.timing = timing or Timing()
        self.check = check
        self.at_rest = at_rest
        self.max_steps = max_steps
        self.max_time = 100_000.0
        self.references = {r.id: Reference(r) for r in requests}
        self.caching = any(i.kv.cache for i in instances)
        self.num_steps = 0
        self.batches: list[Batch] = []
        self.steps: list[Step] = []
        self.transfers: list[Transfer] = []
        self.sent_along: list[Transfer] = []
        self.in_flight_steps: dict[int, Step] = {}
        self.in_flight_transfers: dict[int, tuple[Transfer, Tables, Tables]] = {}
        self._rng = random.Random(self.timing.seed)
        self._now = 0.0
        self._heap: list[tuple[float, float, int, Callable[[], Event | None]]] = []
        self._order = itertools.count()
        self._arrivals = len(requests)
        self.cells: dict[tuple[str, int, int], dict[int, Cell]] = defaultdict(dict, cells or {})
        self._users: dict[tuple[str, int, int], Counter[HeldPages]] = defaultdict(Counter)
        self._device_tokens: dict[tuple[str, int, int], int] = {}
        self._unwritten: set[tuple[str, int, int]] = set()
        self._last: dict[str, tuple[float, float]] = {}
        self._delivered: deque[Event] = deque()
        self._gone: set[str] = set()
        self._lives = Counter[str]()
        for request in requests:
            self._at(request.arrival, lambda r=request: self._arrive(r))
        for name in self.timing.lost:
            self._plan_losses(name)

    def add(self, request: RequestState) -> None:
        """Let one more arrive, now."""
        self.references[request.id] = Reference(request)
        self._arrivals += 1
        self._at(self._now, lambda: self._arrive(request))

    # The World protocol.

    def now(self) -> float:
        return self._now

    def arrivals_left(self) -> bool:
        return self._arrivals > 0

    def due_events(self) -> list[Event]:
        self.check()
        self.at_rest()
        assert self._heap or not self.num_steps, "nothing is left to wait for"
        events: list[Event] = []
        while self._heap and (not events or self._heap[0][0] <= self._now):
            time, _, _, happen = heapq.heappop(self._heap)
            assert self._now <= time < self.max_time, "nothing but ticks is left"
            self._now = time
            if (event := happen()) is not None:
                events.append(event)
        committed = StepDone | TransferDone | InstanceLost | InstanceBack | GoesWithout
        self._delivered = deque(e for e in events if isinstance(e, committed))
        return events

    def wake_at(self, time: float) -> None:
        assert time > self._now
        self._at(time, Tick)

    def launch(self, batch: Batch) -> None:
        assert batch.rows
        self._check_counts(batch)
        self.num_steps += 1
        assert self.num_steps <= self.max_steps, "livelock"
        self.batches.append(batch)
        step = Step(batch, [copy_tables(row.hold) for row in batch.rows], [])
        for row, tables in zip(batch.rows, step.tables, strict=True):
            step.inputs.append(self._host_inputs(row))
            self._use(batch.instance, row.hold, tables, row.start + row.count)
            for position in range(row.start, row.start + row.count):
                self._unwritten.add((row.request.id, row.epoch, position))
        self.in_flight_steps[id(batch)] = step
        self.steps.append(step)
        stages = self.timing.stages.get(batch.instance, 1)
        stage_free, last_end = self._last.get(batch.instance, (0.0, 0.0))
        duration = self._rng.randint(1, self.timing.max_step)
        step.start = max(self._now, stage_free)
        step.end = max(step.start + duration * stages, last_end + 1)
        if stages == 1:
            step.start = max(step.start, last_end)
            step.end = step.start + duration
        self._last[batch.instance] = step.start + duration, step.end
        for transfer in batch.transfers:
            assert transfer.source == batch.instance
            self.sent_along.append(transfer)
            self._take_transfer(transfer)
        self._at(step.start, lambda: self._start_step(step))
        self._at(step.end, lambda: self._end_step(step))
        self.check()

    def _check_counts(self, batch: Batch) -> None:
        """Check the counts that a batch gives of its instance at launch."""
        instance = self.instances[batch.instance]
        pools = [shard.pool for shard in instance.kv.shards]
        assert batch.num_waiting == len(instance.waiting)
        assert batch.num_running == len(instance.running)
        assert batch.pages_in_use == sum(pool.num_usable - pool.num_free for pool in pools)
        assert batch.grouped == batch.grouped_context == 0
        assert batch.work.tokens == sum(row.count for row in batch.rows)
        assert batch.work.sampled == sum(row.samples for row in batch.rows)

    def start_transfer(self, transfer: Transfer) -> None:
        t = transfer
        assert t.stop <= t.request.computed
        source, dest = self._take_transfer(t)
        self._verify(t.source, t.request.id, t.epoch, source, range(t.start, t.stop))
        self._send(t, source, dest, self._now)

    def _send(
        self, t: Transfer, source: Tables, dest: Tables, start: float, shortest: int = 1
    ) -> None:
        """Send a slab, which ends some time from now."""
        drawn = self._rng.randint(shortest, self.timing.max_transfer)
        end = self._now + self.timing.transfers.get(t.dest, drawn)
        self._at(end, lambda: self._end_transfer(t, source, dest, start))

    def _take_transfer(self, t: Transfer) -> tuple[Tables, Tables]:
        """Note the pages that a transfer uses from here on."""
        assert t.source_hold.kv is self.instances[t.source].kv
        assert t.dest_hold.kv is self.instances[t.dest].kv
        assert t.requested == self._now
        assert t.epoch == t.request.epoch
        assert t.slice_move or t.source != t.dest
        self.transfers.append(t)
        source, dest = copy_tables(t.source_hold), copy_tables(t.dest_hold)
        if t.slice_move:
            source, dest = [{} for _ in source], [{} for _ in dest]
            for here, there, slices in t.slice_move.moves:
                source[here] |= {s: [*t.source_hold.tables[here][s]] for s in slices}
                dest[there] |= {s: [*t.dest_hold.copies[there][s]] for s in slices}
        assert 0 <= t.start < t.stop
        self._use(t.source, t.source_hold, source, t.stop)
        self._use(t.dest, t.dest_hold, dest, t.stop)
        self.in_flight_transfers[id(t)] = t, source, dest
        return source, dest

    def committed(self, event: Event) -> None:
        """Commit an event, as the loop's ``on_event``: from here on the pages may be reused."""
        assert self._delivered.popleft() is event
        if isinstance(event, StepDone):
            step = self.in_flight_steps.pop(id(event.batch))
            for row, tables in zip(step.batch.rows, step.tables, strict=True):
                self._unuse(event.batch.instance, row.hold, tables)
        elif isinstance(event, TransferDone):
            t, source, dest = self.in_flight_transfers.pop(id(event.transfer))
            self._unuse(t.source, t.source_hold, source)
            self._unuse(t.dest, t.dest_hold, dest)
        elif isinstance(event, InstanceLost):
            self._forget(event.instance)
        self.check()

    def holds_in_flight(self) -> Counter[HeldPages]:
        """Count each hold's users among unfinished steps and transfers."""
        users: Counter[HeldPages] = Counter()
        for step in self.in_flight_steps.values():
            users.update(row.hold for row in step.batch.rows)
        for transfer, _, _ in self.in_flight_transfers.values():
            users.update((transfer.source_hold, transfer.dest_hold))
        return users

    # Execution.

    def _plan_losses(self, name: str) -> None:
        times = self.timing.lost[name]
        times = [times] if isinstance(times, int | float) else times
        for number, time in enumerate(times):
            is_last = number == len(times) - 1
            if number % 2 == 0:
                self._at(time, lambda returns=not is_last: self._lose(name, returns))
            elif is_last and name in self.timing.fail_to_start:
                self._at(time, lambda: InstanceLost(name, "not started"))
            else:
                self._at(time, lambda: self._return(name))

    def _lose(self, name: str, returns: bool) -> Event:
        """Lose an instance: its earlier reports are still to be committed, and no others come."""
        self._gone.add(name)
        self._lives[name] += 1
        return InstanceLost(name, "killed", returns)

    def _return(self, name: str) -> Event:
        self._gone.remove(name)
        self._last.pop(name, None)
        assert not any(users for (of, *_), users in self._users.items() if of == name)
        if name in self.timing.without:
            shards, seconds = self.timing.without[name]
            self._go_without(name, 0, GoesWithout(name, shards, seconds is not None))
            if seconds is not None:
                self._go_without(name, seconds, GoesWithout(name))
        return InstanceBack(name)

    def _go_without(self, name: str, seconds: float, event: GoesWithout) -> None:
        """Tell of an instance's shards after a time, unless it is lost by then."""
        life = self._lives[name]
        self._at(self._now + seconds, lambda: event if self._lives[name] == life else None)

    def renew(self, instance: Instance) -> Instance:
        """Note the one that takes the place of a lost one."""
        self.instances[instance.name] = instance
        return instance

    def _forget(self, name: str) -> None:
        """Forget what an instance's pages held, and what was under way."""
        for page in [page for page in self.cells if page[0] == name]:
            del self.cells[page]
        for key, step in list(self.in_flight_steps.items()):
            if step.batch.instance == name:
                del self.in_flight_steps[key]
                for row, tables in zip(step.batch.rows, step.tables, strict=True):
                    self._unuse(name, row.hold, tables)
        for key, (t, source, dest) in list(self.in_flight_transfers.items()):
            if name in (t.source, t.dest):
                del self.in_flight_transfers[key]
                self._unuse(t.source, t.source_hold, source)
                self._unuse(t.dest, t.dest_hold, dest)

    def _at(self, time: float, happen: Callable[[], Event | None]) -> None:
        tie = 0.0 if self.timing.in_order else self._rng.random()
        heapq.heappush(self._heap, (time, tie, next(self._order), happen))

    def _arrive(self, request: RequestState) -> Event:
        self._arrivals -= 1
        return Arrival(request)

    def _host_inputs(self, row: Row) -> list[int | None]:
        request, reference = row.request, self.references[row.request.id]
        assert row.input_pending == (row.start >= request.num_known)
        if row.input_pending:
            assert row.count == 1
            return [None]
        stop = row.start + row.count
        assert stop <= request.num_known
        known = [reference.token(p) for p in range(request.prompt_len)] + request.output_token_ids
        return list(known[row.start : stop])

    def _start_step(self, step: Step) -> None:
        if self._is_gone(step):
            return
        for row, tables in zip(step.batch.rows, step.tables, strict=True):
            # What earlier steps still in flight write is there by this step's end.
            written = [
                p for p in range(row.start) if (row.request.id, row.epoch, p) not in self._unwritten
            ]
            self._verify(step.batch.instance, row.request.id, row.epoch, tables, written)

    def _is_gone(self, step: Step) -> bool:
        """Return whether the step is gone with its instance, which may be back."""
        return step.batch.instance in self._gone or id(step.batch) not in self.in_flight_steps

    def _end_step(self, step: Step) -> Event | None:
        if self._is_gone(step):
            return None
        name, tokens = step.batch.instance, []
        prompts: dict[str, dict[int, object]] = defaultdict(dict)
        for row, tables, inputs in zip(step.batch.rows, step.tables, step.inputs, strict=True):
            request, epoch = row.request, row.epoch
            key = (request.id, epoch)
            values = [self._device_tokens[*key, row.start]] if row.input_pending else inputs
            seen = self._verify(name, request.id, epoch, tables, range(row.start))
            for position, value in enumerate(values, row.start):
                assert value is not None
                assert position // self.instances[name].page_size not in row.hold.cached
                self._write(name, tables, position, self._content(request.id, epoch, position))
                assert value == self.references[request.id].token(position)
                if position < request.prompt_len:
                    prompts[request.id][position] = ("prompt", value)
                self._unwritten.remove((*key, position))
                seen.append(value)
            if row.samples:
                token = next_token(self.references[request.id].id, seen)
                self._device_tokens[*key, len(seen)] = token
                tokens.append(token)
        for transfer in step.batch.transfers:
            if id(transfer) in self.in_flight_transfers:
                _, source, dest = self.in_flight_transfers[id(transfer)]
                self._send(transfer, source, dest, step.start, shortest=0)
        return StepDone(
            step.batch,
            tokens,
            step.start,
            step.end,
            logprobs=[logprob_of(token) for token in tokens],
            details=[("sampled", token) for token in tokens],
            prompt_details=prompts,
        )

    def _end_transfer(
        self, t: Transfer, source: Tables, dest: Tables, start: float
    ) -> Event | None:
        if self._gone & {t.source, t.dest} or id(t) not in self.in_flight_transfers:
            return None
        positions = range(t.start, t.stop)
        values = self._verify(t.source, t.request.id, t.epoch, source, positions)
        assert len(values) == len(positions)
        for position in positions:
            assert position // self.instances[t.dest].page_size not in t.dest_hold.cached
            self._write(t.dest, dest, position, self._content(t.request.id, t.epoch, position))
        return TransferDone(t, start, self._now)

    # Pages.

    def _verify(
        self, name: str, request: str, epoch: int, tables: Tables, positions: Iterable[int]
    ) -> list[int]:
        """The tokens at ``positions``, read from every slice of every shard."""
        page_size = self.instances[name].page_size
        reference, cells, values = self.references[request], self.cells, []
        for p in positions:
            content, (page, place) = self._content(request, epoch, p), divmod(p, page_size)
            for shard, table in enumerate(tables):
                for piece, pages in table.items():
                    cell, wanted = cells[name, shard, pages[page]].get(place), (*content, piece)
                    assert cell == wanted, f"{name}/{shard} holds {cell}, not {wanted}"
            values.append(reference.token(p))
        return values

    def _content(self, request: str, epoch: int, position: int) -> Cell:
        reference = self.references[request]
        value = reference.token(position)
        if self.caching:
            return reference.beginning(position), position, value
        return request, epoch, position, value

    def _write(self, name: str, tables: Tables, position: int, content: Cell) -> None:
        page, cell = divmod(position, self.instances[name].page_size)
        for shard, table in enumerate(tables):
            for piece, pages in table.items():
                self.cells[name, shard, pages[page]][cell] = (*content, piece)

    def _use(self, name: str, hold: HeldPages, tables: Tables, num_tokens: int) -> None:
        kv = self.instances[name].kv
        assert hold.kv is kv
        assert not hold.released
        for shard, table in enumerate(tables):
            for pages in table.values():
                assert len(pages) >= kv.pages_for(num_tokens), "pages missing"
                for page in pages:
                    assert 1 <= page <= kv.shards[shard].pool.num_usable
                    users = self._users[name, shard, page]
                    users[hold] += 1
                    if len(users) == 1:
                        continue
                    others = {other for other in users if not shares(other, hold, shard, page)}
                    others -= {hold} | self._being_committed()
                    assert not others, f"{name}/{shard} page {page} has two holders at work"

    def _being_committed(self) -> set[HeldPages]:
        """Holds of the event that the loop applies now: it may reuse pages of an earlier row."""
        match self._delivered[0] if self._delivered else None:
            case StepDone() as done:
                return {row.hold for row in done.batch.rows}
            case TransferDone() as done:
                return {done.transfer.source_hold, done.transfer.dest_hold}
        return set()

    def _unuse(self, name: str, hold: HeldPages, tables: Tables) -> None:
        for shard, table in enumerate(tables):
            for page in itertools.chain(*table.values()):
                users = self._users[name, shard, page]
                users[hold] -= 1
                if not users[hold]:
                    del users[hold]


def shares(one: HeldPages, other: HeldPages, shard: int, page: int) -> bool:
    """Return whether both have the page from the prefix cache."""
    both = set(one.cached.values()) & set(other.cached.values())
    return any(page in cached.pages[shard].values() for cached in both)


def copy_tables(hold: HeldPages) -> Tables:
    return [{piece: list(pages) for piece, pages in table.items()} for table in hold.tables]
