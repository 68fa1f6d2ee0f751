"""Runs of decodes in virtual time: successive steps of an instance, launched without the loop.

The end of each step stays an event in the world's heap, so the order of events is unchanged. Only
calls of the loop, the policies and the system that would change nothing are skipped.
"""

from collections.abc import Callable
from heapq import heappop, heapreplace

from jaxinfer.serving.batch import Batch
from jaxinfer.serving.features.decode_group import DecodeGroup
from jaxinfer.serving.instance import Instance
from jaxinfer.serving.world import Event, StepDone, World
from jaxinfer.simulate.costs.model import CostModel, decode_seconds
from jaxinfer.simulate.world import SimulatedWorld

# As ``RunTotals.add_decodes``.
CountDecodes = Callable[[str, float, float, int, int, int], None]


class _Run:
    """Decodes of an instance whose steps follow each other."""

    def __init__(
        self, instance: Instance, group: DecodeGroup, cost: CostModel, free: dict[int, float]
    ) -> None:
        self.group, self.cost, self.free = group, cost, free
        (self.device,) = free
        self.asks_spans = instance.asks_spans
        self.name, self.rows = instance.name, len(group.active)
        self.pool = instance.kv.shards[0].pool
        self.seconds: Callable[[int], float] | None = None

    def __call__(self, start: float, end: float, context: int, pages: int) -> StepDone:
        """The end of a step that was only counted so far."""
        rows = self.rows
        batch = Batch(self.name, [], 0, rows, pages, rows, context)
        return StepDone(batch, [0] * rows, start, end, stages=[(start, end)])


class DecodeRuns:
    """Implements ``jaxinfer.serving.loop.Runs``; ``seen`` is the world as the loop sees it.

    Steps that have ended are passed to ``count`` or, if someone observes each step, to
    ``on_event``.
    """

    def __init__(
        self,
        world: SimulatedWorld,
        seen: World,
        on_event: Callable[[Event], None],
        count: CountDecodes | None,
    ) -> None:
        self._world, self._seen, self._on_event, self._count = world, seen, on_event, count
        self._runs: dict[str, _Run] = {}

    def give(self, instance: Instance) -> None:
        """Replace an instance's run of steps after the instance has changed."""
        name = instance.name
        group, device = instance.steady_group(), self._world.single_device(name)
        if group and device:
            self._runs[name] = _Run(instance, group, *device)
        else:
            self._runs.pop(name, None)

    def go_on(self) -> None:
        """Run such steps until another event is due, possibly at the same time."""
        # Most of a simulation's time is here: what is looked up twice has a name.
        heap, order, until = self._world.heap, self._world.order, self._world.next_other()
        runs, count, several, many = self._runs, self._count, len(heap) > 1, len(heap) > 2
        together = 0
        while heap:
            first = heap[0]
            end, _, step = first[:3]
            if end >= until:
                return
            if together:
                together -= 1
            elif (several and heap[1][0] == end) or (many and heap[2][0] == end):
                together = self._together(end) - 1
                if together < 0:
                    return
            run = self._run_of(step)
            if run is None:
                return
            span = run.group.span() if run.asks_spans else None
            context = run.group.go_on(end)
            if context is None:
                del runs[run.name]
                return
            if type(step) is _Run:
                assert count
                count(step.name, first[3], end, step.rows, first[5], first[6])
            else:
                self._on_event(step)
            pages = run.pool.num_usable - run.pool.num_free
            if count is None or span:
                heappop(heap)
                self._world.time, name, rows = end, run.name, run.rows
                spans = [span] if span else None
                self._seen.launch(Batch(name, [], 0, rows, pages, rows, context, spans=spans))
                continue
            if run.seconds is None:
                run.seconds = decode_seconds(run.cost, run.rows)
            if (start := run.free[run.device]) < end:
                start = end
            run.free[run.device] = after = start + run.seconds(context)
            heapreplace(heap, (after, next(order), run, start, after, context, pages))

    def _run_of(self, step: object) -> _Run | None:
        """Return the run of the instance whose step this is, if it has one."""
        if type(step) is _Run:
            return self._runs.get(step.name)
        if type(step) is StepDone and not step.rows:
            return self._runs.get(step.instance)
        return None

    def _together(self, end: float) -> int:
        """Return the number of steps that end now, if each is followed by such a step, else 0.

        The loop ends all of them before it launches any, which only observers can tell apart from
        one after the other.
        """
        found = [self._run_of(entry[2]) for entry in self._world.heap if entry[0] == end]
        distinct = len({id(run) for run in found}) == len(found)
        if self._count and distinct and all(run and run.group.goes_on() for run in found):
            return len(found)
        return 0
