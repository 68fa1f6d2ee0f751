"""Runs of decodes in virtual time: successive steps of an instance, launched without the loop.

Calls of the loop, the policies and the system that would change nothing are skipped. If other
events may concern an instance, its run stops before each of them. If its own steps are all that
changes an instance until the next request arrives, its run goes on until then. The instance is then
ahead of the loop's time, but the loop does not look at it before that arrival.
"""

from collections.abc import Callable, Sequence
from heapq import heappop, heapreplace
from typing import Any

from jaxinfer.serving.batch import Batch
from jaxinfer.serving.features.decode_group import DecodeGroup
from jaxinfer.serving.instance import Instance
from jaxinfer.serving.world import Event, StepDone, World
from jaxinfer.simulate.costs.model import CostModel, decode_seconds
from jaxinfer.simulate.world import SimulatedWorld

# As ``RunTotals.add_run``.
CountRun = Callable[[str, float, Sequence[float], int, int, int, Sequence[tuple[float, int]]], None]


class _Run:
    """Decodes of an instance whose steps follow each other."""

    def __init__(
        self, instance: Instance, group: DecodeGroup, cost: CostModel, free: dict[int, float]
    ) -> None:
        self.group, self.cost, self.free = group, cost, free
        (self.device,) = free
        self.asks_spans, self.single = instance.asks_spans, instance.options.max_in_flight == 1
        self.name, self.rows = instance.name, len(group.active)
        self.pool = instance.kv.shards[0].pool

    def __call__(self, start: float, end: float, context: int, pages: int) -> StepDone:
        """The end of a step that was only counted so far."""
        rows = self.rows
        batch = Batch(self.name, [], 0, rows, pages, rows, context)
        return StepDone(batch, [0] * rows, start, end, stages=[(start, end)])


class DecodeRuns:
    """Implements ``jaxinfer.serving.loop.Runs``; ``seen`` is the world as the loop sees it.

    Steps that have ended are passed to ``count`` or, if someone observes each step, to
    ``on_event``.

    Args:
        alone: whether no request arrives because another one has ended.
    """

    def __init__(
        self,
        world: SimulatedWorld,
        seen: World,
        on_event: Callable[[Event], None],
        count: CountRun | None,
        alone: bool,
    ) -> None:
        self._world, self._seen, self._on_event, self._count = world, seen, on_event, count
        self._alone = alone
        self._runs: dict[str, _Run] = {}
        # By instance and number of decodes.
        self._seconds: dict[tuple[str, int], Callable[[int], float]] = {}

    def give(self, instance: Instance) -> None:
        """Give a changed instance a new run of steps if it only decodes, otherwise none."""
        name = instance.name
        group, device = instance.steady_group(), self._world.single_device(name)
        if group and device:
            self._runs[name] = _Run(instance, group, *device)
        else:
            self._runs.pop(name, None)

    def go_on(self, apart: bool) -> None:
        """Continue all runs until another event is due, possibly at the same time.

        Args:
            apart: whether only its own steps change an instance until the next request arrives.
        """
        heap, until = self._world.heap, self._world.next_other()
        apart = apart and self._alone and self._count is not None
        while heap:
            entry, limit = heap[0], until
            for other in () if apart else heap[1:3]:
                limit = min(limit, other[0])
            if entry[0] >= limit:
                return
            step = entry[4]
            run = self._runs.get(step.name) if type(step) is _Run else self._run_of(step)
            if run is None:
                return
            one_by_one = self._count is None or run.asks_spans
            if not (self._take_step(run, entry) if one_by_one else self._take(run, entry, limit)):
                del self._runs[run.name]
                return

    def _take(self, run: _Run, entry: tuple[Any, ...], until: float) -> bool:
        """Take steps of a run, and count them; return False if there is none."""
        end, _, number, _, step, *then = entry
        name, rows = key = run.name, run.rows
        seconds = self._seconds.get(key)
        if seconds is None:
            seconds = self._seconds[key] = decode_seconds(run.cost, rows)
        free = run.free[run.device]
        ends, start, after, context, taken = run.group.go_on(
            end, free, until if run.single else end, seconds
        )
        if not ends:
            return False
        run.free[run.device] = after
        last, count = ends[-1], len(ends)
        pages: Sequence[tuple[float, int]] = ()
        if count > 1 and taken:
            pages = [(ends[ended], used) for ended, used in taken if ended < count]
        assert self._count
        if step is run:
            began, _, seen, used = then
            self._count(name, began, ends, rows, seen, used, pages)
        else:
            # The first step is of the decodes before this run.
            if type(step) is _Run:
                began, _, seen, used = then
                self._count(name, began, ends[:1], step.rows, seen, used, ())
            else:
                self._on_event(step)
                used = step.batch.pages_in_use
            if count > 1:
                seen = context - rows * (count - 1)
                self._count(name, end, ends[1:], rows, seen, used, pages)
        used = run.pool.num_usable - run.pool.num_free
        order = next(self._world.order)
        heapreplace(
            self._world.heap, (after, last, number, order, run, start, after, context, used)
        )
        return True

    def _take_step(self, run: _Run, entry: tuple[Any, ...]) -> bool:
        """Take one step of a run, and let it be looked at; return False if there is none."""
        end, step = entry[0], entry[4]
        spans = [run.group.span()] if run.asks_spans else None
        ends, _, _, context, _ = run.group.go_on(end, end, end, lambda context: 0.0)
        if not ends:
            return False
        self._on_event(step)
        heappop(self._world.heap)
        self._world.time, name, rows = end, run.name, run.rows
        pages = run.pool.num_usable - run.pool.num_free
        self._seen.launch(Batch(name, [], 0, rows, pages, rows, context, spans=spans))
        return True

    def _run_of(self, step: object) -> _Run | None:
        """Return the run of the instance whose first step this is, if it has one."""
        if type(step) is StepDone and not step.rows:
            return self._runs.get(step.instance)
        return None
