"""Runs of decodes in virtual time: steps of an instance that follow each other without the loop.

The ends of such steps are planned, and counted once the instance is looked at or changes. A step
that ends when something else happens is an event in the world's heap again, so that all happens in
its order; only what the loop, the policies and the system would find unchanged is left out.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import partial
from heapq import heappop, heappush
from itertools import accumulate
from typing import NamedTuple

from jaxinfer.report.metrics import RunTotals
from jaxinfer.serving.batch import Batch
from jaxinfer.serving.features.decode_group import DecodeGroup
from jaxinfer.serving.instance import Instance
from jaxinfer.serving.world import Event, StepDone, World
from jaxinfer.simulate.costs.model import CostModel, DecodeSeconds, decode_seconds
from jaxinfer.simulate.world import SimulatedWorld

# Steps planned at a time: a change of the instance makes those after it void.
_MOST = 64


class _Step(NamedTuple):
    """A step in flight: when it was launched and its number among all events, for their order."""

    launched_at: float
    number: int
    start: float
    end: float
    context: int
    pages: int


class _Run:
    """Decodes of an instance whose steps follow each other.

    Attributes:
        steps: those in flight that were launched here, the oldest first.
        ends: ends of these and of the steps that are to follow; empty where none are planned.
        pages: pages in use when each of these is launched.
        num_planned: number of these that end, each with the launch of another one.
    """

    def __init__(
        self, instance: Instance, group: DecodeGroup, cost: CostModel, free: dict[int, float]
    ) -> None:
        self.instance, self.group, self.cost, self.free = instance, group, cost, free
        (self.device,) = free
        self.name, self.rows, self.in_flight = instance.name, len(group.active), instance.in_flight
        self.pool = instance.kv.shards[0].pool
        self.shares = bool(instance.importing or instance.num_exported or instance.kv.reserved)
        self.steps: list[_Step] = []
        self.ends: list[float] = []
        self.pages: list[int] = []
        self.num_planned = self.pages_ahead = 0

    def has(self, step: _Step) -> bool:
        """Tell whether a step that the heap has is in flight, and not planned with others."""
        return not self.ends and any(step is each for each in self.steps)

    def __call__(self, step: _Step | None) -> StepDone | None:
        """The end of a step that was only counted so far."""
        if not step or not self.has(step):
            return None
        rows = self.rows
        batch = Batch(self.name, [], 0, rows, step.pages, rows, step.context)
        stages = [(step.start, step.end)]
        return StepDone(batch, [0] * rows, step.start, step.end, stages=stages)


class DecodeRuns:
    """Implements ``jaxinfer.serving.loop.Runs``; ``seen`` is the world as the loop sees it.

    Steps that have ended go to ``totals`` or, where something looks at each, to ``on_event``.
    """

    def __init__(
        self,
        world: SimulatedWorld,
        seen: World,
        on_event: Callable[[Event], None],
        totals: RunTotals | None,
    ) -> None:
        self._world, self._seen, self._on_event, self._totals = world, seen, on_event, totals
        self._runs: dict[str, _Run] = {}
        self._seconds: dict[tuple[str, int], DecodeSeconds] = {}
        # The run of each planned end; two at the same time are never planned.
        self._planned: dict[float, _Run] = {}
        if totals:
            totals.catch_up, world.at_time = self._stop_all, self._stop_at

    def give(self, instance: Instance) -> None:
        """Let an instance that has changed have such steps in place of those that it had."""
        name = instance.name
        if (run := self._runs.pop(name, None)) and run.ends:
            self._stop(run)
        group = instance.steady_group()
        if group and (device := self._world.single_device(name)):
            self._runs[name] = _Run(instance, group, *device)

    def go_on(self, asks: bool) -> None:
        """Take such steps, until something else is due, or is due at the same time.

        Args:
            asks: whether the loop has to be asked after each step.
        """
        if asks:
            self._stop_all()
            return
        heap, until = self._world.heap, self._world.next_other()
        runs, planned = self._runs, self._planned
        while heap and (end := heap[0][0]) < until:
            step, launched = heap[0][3], heap[0][4:]
            if launched:
                (one,) = launched
                if not (step.has(one) if one else planned.get(end) is step):
                    heappop(heap)
                    continue
            if other := planned.get(end):
                self._stop(other, end)
                continue
            if launched:
                run = runs.get(step.name)
            elif type(step) is StepDone and not step.rows:
                run = runs.get(step.instance)
            else:
                return
            if not run or any(each[0] == end for each in heap[1:3]):
                return
            if not self._take(run):
                del runs[run.name]
                return

    def _take(self, run: _Run) -> bool:
        """End the heap's first step and launch another, or plan both; False where none follows."""
        heap, totals, group = self._world.heap, self._totals, run.group
        end, _, _, step, *launched = heap[0]
        plans = (
            totals
            and step is run
            and len(run.steps) == run.in_flight
            and not run.shares
            and totals.instances[run.name].pages_in_use <= run.steps[0].pages
        )
        pages = group.ahead(run.pool, _MOST if plans else 1)
        if not pages or (plans and self._plan(run, pages)):
            return bool(pages)
        heappop(heap)
        self._world.time = end
        span = group.span() if run.instance.asks_spans else None
        name, rows, context = run.name, run.rows, group.context
        group.go_on([end], run.pool)
        if launched:
            assert totals
            (one,) = launched
            totals.add_decodes(name, one.start, [end], step.rows, one.context, one.pages)
            run.steps = run.steps[step is run :]
        else:
            self._on_event(step)
        if totals is None or span:
            spans = [span] if span else None
            self._seen.launch(Batch(name, [], 0, rows, pages[0], rows, context, spans=spans))
            return True
        start = max(run.free[run.device], end)
        run.free[run.device] = after = start + self._times(run)([context])[0]
        self._push(run, _Step(end, next(self._world.order), start, after, context, pages[0]))
        return True

    def _times(self, run: _Run) -> DecodeSeconds:
        key = run.name, run.rows
        if key not in self._seconds:
            self._seconds[key] = decode_seconds(run.cost, run.rows)
        return self._seconds[key]

    def _push(self, run: _Run, step: _Step) -> None:
        run.steps.append(step)
        heappush(self._world.heap, (step.end, step.launched_at, step.number, run, step))

    def _plan(self, run: _Run, pages: Sequence[int]) -> bool:
        """Plan the end of the heap's first step, and of those that follow it; False if of none."""
        world, planned, totals = self._world, self._planned, self._totals
        first, rows, count = run.group.context, run.rows, len(pages)
        seconds = self._times(run)(range(first, first + rows * count, rows))
        ends = [each.end for each in run.steps[:-1]]
        ends += accumulate(seconds, initial=run.steps[-1].end)
        for number in range(1, count + 1):
            if ends[number] in planned:
                count = number - 1
                break
            planned[ends[number]] = run
        if not count:
            return False
        assert totals
        heappop(world.heap)
        heappush(world.heap, (ends[count], ends[count], next(world.order), run, None))
        run.ends, run.num_planned = ends, count
        run.pages = [*(each.pages for each in run.steps), *pages]
        run.pages_ahead = run.pages[count] - totals.instances[run.name].pages_in_use
        totals.pages_ahead += run.pages_ahead
        run.instance.catch_up = partial(self._stop, run)
        return True

    def _stop(self, run: _Run, time: float | None = None) -> None:
        """Count the planned steps that end before a time, by default now; drop those after them."""
        ends, steps, totals, flight = run.ends, run.steps, self._totals, run.in_flight
        run.ends, run.steps, run.instance.catch_up = [], [], None
        for end in ends[1 : run.num_planned + 1]:
            del self._planned[end]
        count = bisect_left(ends, self._world.time if time is None else time, 1, run.num_planned)
        start, context, rows = steps[0].start, steps[0].context, run.rows
        assert totals
        totals.pages_ahead -= run.pages_ahead
        run.group.go_on(ends[:count], run.pool)
        totals.add_decodes(run.name, start, ends[:count], rows, context, run.pages[count - 1])
        for number in range(count, count + flight):
            # As if it had been launched when it is.
            order = steps[number][:2] if number < flight else ()
            order = order or (ends[number - flight], next(self._world.order))
            begin, seen = ends[number - 1], context + number * rows
            self._push(run, _Step(*order, begin, ends[number], seen, run.pages[number]))
        run.free[run.device] = ends[count + flight - 1]

    def _stop_at(self, time: float) -> None:
        if run := self._planned.get(time):
            self._stop(run, time)

    def _stop_all(self) -> None:
        for run in self._runs.values():
            if run.ends:
                self._stop(run)
