"""Serves a whole trace with successive placements."""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, pairwise
from typing import Any

from jaxinfer.config.run_file import as_run_file
from jaxinfer.errors import JaxinferError
from jaxinfer.lab.plan.problem import Replan
from jaxinfer.lab.plan.replan.trace_windows import Window, split
from jaxinfer.report.latencies import LatencyTotals
from jaxinfer.serving.request_state import RequestState
from jaxinfer.simulate.capacity import num_gpus
from jaxinfer.simulate.cluster import ModelledCluster
from jaxinfer.simulate.run import OnRequest, prepare, serve
from jaxinfer.simulate.targets import Targets, Verdict
from jaxinfer.workload.lengths import BenchRequest


@dataclass(frozen=True)
class PlacementPeriod:
    """A placement, and the second from which it receives new requests.

    Attributes:
        data: contents of its run file.
    """

    start: float
    data: Mapping[str, Any]


@dataclass(frozen=True)
class Schedule:
    """Successive placements for a trace.

    Attributes:
        free: whether each placement is ready when its period starts, on GPUs of its own, while the
            previous one completes its requests.
    """

    name: str
    periods: Sequence[PlacementPeriod]
    free: bool = False


@dataclass(frozen=True)
class PeriodCourse:
    """A period of the schedule and its events, in seconds of the trace.

    Attributes:
        requests: number of requests that arrive in the period.
        ready: time at which the placement began to serve.
        reload_s: seconds for which the placement waited for weights.
        drained: time at which the period's last request had ended.
    """

    start: float
    requests: int
    reload_s: float
    ready: float
    drained: float
    gpus: int


@dataclass
class ScheduleResult:
    """A schedule's results over the whole trace.

    Attributes:
        windows: verdict on the requests of each window; None for a window without requests.
    """

    schedule: Schedule
    courses: list[PeriodCourse]
    verdict: Verdict
    windows: list[Verdict | None]
    latencies: LatencyTotals = field(default_factory=LatencyTotals)

    @property
    def drain_s(self) -> float:
        """Total seconds for which requests waited for others to end on the previous placement.

        If that placement was still loading, they first waited for weights, as ``reload_s`` counts.
        """
        if self.schedule.free:
            return 0.0
        return sum(max(a.drained - max(b.start, a.ready), 0.0) for a, b in self._switches)

    @property
    def reload_s(self) -> float:
        """Total seconds for which requests waited for weights."""
        return sum(course.reload_s for course in self.courses)

    @property
    def gpu_hours(self) -> float:
        """GPU-hours of all periods, each counted from the end of the previous one to its own."""
        seconds = begin = 0.0
        for here, there in self._switches:
            end = max(here.drained, there.start)
            seconds += here.gpus * (end - begin)
            begin = there.start if self.schedule.free else end
        last = self.courses[-1]
        return (seconds + last.gpus * (last.drained - begin)) / 3600

    @property
    def _switches(self) -> list[tuple[PeriodCourse, PeriodCourse]]:
        return list(pairwise(self.courses))


@dataclass(frozen=True)
class Server:
    """Serves a trace with a schedule; a server can be sent to other processes."""

    windows: Sequence[Window]
    targets: Targets
    options: Replan

    def __call__(self, schedule: Schedule) -> ScheduleResult:
        """Serve the trace, one period after another.

        The previous placement completes all requests that arrived before a period's start,
        including those in its queues, as when an instance flips. Then all GPUs load weights;
        requests that arrive meanwhile wait.

        Raises:
            JaxinferError: a placement is invalid, or a request can never fit.
        """
        work = list(chain.from_iterable(window.work for window in self.windows))
        starts = [window.start for window in self.windows]
        whole = self.targets.watch(work)
        parts = [self.targets.watch(w.work) if w.work else None for w in self.windows]
        latencies = LatencyTotals()

        def on_request(request: RequestState, times: Sequence[float]) -> None:
            whole.add(request, times)
            part = parts[bisect_right(starts, request.arrival) - 1]
            assert part
            part.add(request, times)
            latencies.add(request.arrival, request.metrics.first_scheduled, times)

        courses: list[PeriodCourse] = []
        drained = 0.0
        own = split(work, [period.start for period in schedule.periods])
        for number, (period, items) in enumerate(zip(schedule.periods, own, strict=True)):
            try:
                waits = number > 0 and not schedule.free
                found = self._serve(period, items, on_request, drained if waits else None)
            except JaxinferError as error:
                raise JaxinferError(
                    f"{schedule.name}, from {period.start:g} s on: {error}"
                ) from None
            drained = found.drained
            courses.append(found)
        verdicts = [part.verdict() if part else None for part in parts]
        return ScheduleResult(schedule, courses, whole.verdict(), verdicts, latencies)

    def _serve(
        self,
        period: PlacementPeriod,
        items: Sequence[BenchRequest],
        on_request: OnRequest,
        drained: float | None,
    ) -> PeriodCourse:
        """Serve one period; ``drained``: when the previous one ended, if this one must wait."""
        config = as_run_file(period.data)
        cluster = prepare(config)
        ready, reload_s = period.start, 0.0
        if drained is not None:
            reload_s = self.reload_s(cluster)
            ready = max(ready, drained) + reload_s
        end = serve(cluster, items, None, on_request, ready).wall_s if items else ready
        return PeriodCourse(period.start, len(items), reload_s, ready, end, num_gpus(config))

    def reload_s(self, cluster: ModelledCluster) -> float:
        """Return the seconds until all GPUs have a placement's weights, each at its own rate."""
        if self.options.reload_s is not None:
            return self.options.reload_s
        assert self.options.reload_gb_s
        assert cluster.site
        stages = chain.from_iterable(cluster.site.stages.values())
        most = max(stage.part.weight_bytes for stage in stages)
        return most / (self.options.reload_gb_s * 1e9)
