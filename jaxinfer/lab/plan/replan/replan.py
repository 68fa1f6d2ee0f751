"""Placements that follow a load: plans again whenever a window's mix has shifted.

DistServe, section 4.3, names what is monitored (lengths and rate), but not when it has shifted.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from jaxinfer.config.resolve import resolve
from jaxinfer.config.run_file import as_run_file
from jaxinfer.errors import JaxinferError
from jaxinfer.lab.plan.candidate import Candidate
from jaxinfer.lab.plan.choose import PlannerFailed, find
from jaxinfer.lab.plan.file_parts import read_file, without_requests
from jaxinfer.lab.plan.problem import Problem
from jaxinfer.lab.plan.registry import make_planner
from jaxinfer.lab.plan.replan.schedule import PlacementPeriod, Schedule, ScheduleResult, Server
from jaxinfer.lab.plan.replan.trace_windows import LoadMix, Window, cut
from jaxinfer.lab.plan.search import DrivenSearch
from jaxinfer.options.validation import OptionError, within
from jaxinfer.simulate.capacity import too_few


@dataclass(frozen=True)
class Look:
    """The plan made at the end of a window, if any.

    Attributes:
        shift: distance between this window's load and the load planned for; None for an empty
            window.
        chosen: the plan, if one was made.
        refused: reason why there is no better plan.
    """

    shift: float | None
    chosen: Candidate | None = None
    refused: str | None = None


@dataclass(frozen=True)
class Followed:
    """The results of placements that follow a load, and of fixed placements for comparison.

    Attributes:
        stands: placement used in each window, planned before its start.
        looks: plan made at the end of each window.
        oracle: plan for each window's own requests.
        served: results of the trace with the following, the static and the oracle's placements, and
            with further run files.
        warnings: a line for each plan that was made from too few requests.
    """

    windows: Sequence[Window]
    stands: Sequence[Candidate]
    looks: Sequence[Look]
    oracle: Sequence[Candidate]
    served: Sequence[ScheduleResult]
    warnings: Sequence[str]


class MapSchedules(Protocol):
    """``map``, or the ``map`` of a pool of processes."""

    def __call__(self, call: Server, schedules: Iterable[Schedule], /) -> Iterable[ScheduleResult]:
        """Serve each schedule, and return their results in the same order."""


def follow(
    problem: Problem,
    new_search: Callable[[Problem], DrivenSearch],
    map_schedules: MapSchedules = map,
) -> Followed:
    """Plan for the windows of a problem that has a section ``replan``, and serve the whole trace.

    Args:
        new_search: begins a search for the best candidate for a problem.

    Raises:
        JaxinferError: there are fewer than two windows, there is no plan for the first window or
            for the whole trace, or a request can never fit.
    """
    replanner = Replanner(problem, new_search)
    windows = replanner.windows
    stands, looks = replanner.replanned()
    static, oracle = replanner.static(), replanner.oracle()
    schedules = [
        replanner.schedule("replanned", stands),
        replanner.schedule("static", [static] * len(windows)),
        replanner.schedule("oracle", oracle, free=True),
        *beside(problem),
    ]
    server = Server(windows, problem.targets, replanner.options)
    served = list(map_schedules(server, schedules))
    return Followed(windows, stands, looks, oracle, served, replanner.warnings)


class Replanner:
    """Makes plans for windows of a problem's requests.

    Args:
        problem: problem with a section ``replan``.
        new_search: begins a search for the best candidate for a problem.

    Attributes:
        windows: all windows.
        warnings: a line for each plan so far that was made from too few requests.

    Raises:
        OptionError: see ``windows_of``.
    """

    def __init__(self, problem: Problem, new_search: Callable[[Problem], DrivenSearch]) -> None:
        assert problem.replan
        self._problem, self._new_search = problem, new_search
        self.options = problem.replan
        self.windows = windows_of(problem)
        self.warnings: list[str] = []
        self._plans: dict[int, Candidate | str] = {}

    def replanned(self) -> tuple[list[Candidate], list[Look]]:
        """Return the placement in each window, and the plan made at the end of each window.

        A plan is made from a window that has ended, and used from then on. The first plan is made
        from the first window, and is used from the start.

        Raises:
            JaxinferError: there is no plan for the first window.
        """
        placements, looks = [self._first()], []
        made_for = _mix(self.windows[0])
        for number, window in enumerate(self.windows[:-1]):
            mix = window.mix
            look = Look(mix.shift(made_for) if mix else None)
            placement = placements[-1]
            if mix and look.shift and look.shift > self.options.shift:
                found = self._plan(number)
                if isinstance(found, str):
                    look = Look(look.shift, refused=found)
                else:
                    look, placement, made_for = Look(look.shift, found), found, mix
            placements.append(placement)
            looks.append(look)
        last = self.windows[-1].mix
        looks.append(Look(last.shift(made_for) if last else None))
        return placements, looks

    def oracle(self) -> list[Candidate]:
        """Return the plan for each window's own requests.

        Raises:
            JaxinferError: there is no plan for the first window.
        """
        placements = [self._first()]
        for number in range(1, len(self.windows)):
            found = self._plan(number) if self.windows[number].work else placements[-1]
            placements.append(placements[-1] if isinstance(found, str) else found)
        return placements

    def static(self) -> Candidate:
        """Return the plan for the whole trace.

        Raises:
            JaxinferError: there is no such plan.
        """
        return self._find(self._problem, "the whole trace")

    def schedule(self, name: str, placements: Sequence[Candidate], free: bool = False) -> Schedule:
        """Return the schedule of a placement for each window, with a period for each change."""
        periods: list[PlacementPeriod] = []
        for window, candidate in zip(self.windows, placements, strict=True):
            data = self._problem.run_file(candidate.part)
            if not periods or data != periods[-1].data:
                periods.append(PlacementPeriod(window.start, data))
        return Schedule(name, periods, free)

    def _first(self) -> Candidate:
        found = self._plan(0)
        if isinstance(found, str):
            stop = self.windows[0].stop
            raise JaxinferError(f"window 0, from 0 to {stop:g} s: {found}")
        return found

    def _plan(self, number: int) -> Candidate | str:
        """Plan for a window's requests, or return why there is no plan."""
        if number not in self._plans:
            work = self.windows[number].work
            seconds = len(self.windows) * self.options.window_s
            share = _mix(self.windows[number]).rate / LoadMix.of(self._problem.work, seconds).rate
            try:
                self._plans[number] = self._find(
                    self._problem.for_work(work, share), f"window {number}"
                )
            except PlannerFailed:
                raise
            except JaxinferError as error:
                self._plans[number] = str(error)
        return self._plans[number]

    def _find(self, problem: Problem, requests: str) -> Candidate:
        candidate, score = find(make_planner(problem.planner), self._new_search(problem))
        if score.enough:
            self.warnings.append(f"plan of {requests}: {too_few(score.rate, score.enough)}")
        return candidate


def windows_of(problem: Problem) -> list[Window]:
    """Cut the problem's requests into windows.

    Raises:
        OptionError: there is only one window, the first is empty, all requests arrive at 0 s, or
            prompts have known tokens.
    """
    assert problem.replan
    seconds = problem.replan.window_s
    windows = cut(problem.work, seconds)
    if any(item.has_tokens for item in problem.work):
        raise OptionError(
            "run.workload.trace: has tokens, which the run files of replan cannot keep: give a CSV "
            "of lengths"
        )
    if not max(item.arrival for item in problem.work):
        raise OptionError("run.workload.arrivals: all requests come at 0 s: give trace, or a rate")
    if len(windows) < 2:
        raise OptionError(
            f"replan.window_s is {seconds:g}, and all requests come before: must be below "
            f"{max(item.arrival for item in problem.work):g} s, when the last one comes"
        )
    if not windows[0].work:
        raise OptionError(
            f"replan.window_s is {seconds:g}, and no request comes before: must be "
            f"above {min(item.arrival for item in problem.work):g} s"
        )
    return windows


def beside(problem: Problem) -> list[Schedule]:
    """Return a schedule for each run file that is used from start to end.

    Raises:
        JaxinferError: a file cannot be read, or is not a run file.
    """
    assert problem.replan
    found = []
    for name, file in problem.replan.beside.items():
        try:
            data = problem.run_file(without_requests(read_file(file), problem.run))
            resolve(as_run_file(data))
        except JaxinferError as error:
            raise within(f"replan.beside.{name}", error) from None
        found.append(Schedule(name, [PlacementPeriod(0.0, data)]))
    return found


def _mix(window: Window) -> LoadMix:
    mix = window.mix
    assert mix
    return mix
