"""Placements that follow a load: when they change, what that costs, and beside what."""

import csv
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import yaml
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from properties import examples
from replan_cases import LONG, RUN, ByPrompts, candidate, problem

from jaxinfer import JaxinferError
from jaxinfer.commands.plan import plan
from jaxinfer.config.run_file import RunFile, as_run_file, load_run_file
from jaxinfer.lab.plan.choose import PlannerFailed
from jaxinfer.lab.plan.problem import Problem, Replan
from jaxinfer.lab.plan.replan.replan import Replanner, follow, windows_of
from jaxinfer.lab.plan.replan.schedule import PlacementPeriod, Schedule, Server
from jaxinfer.lab.plan.replan.trace_windows import cut
from jaxinfer.lab.plan.result import is_untouched
from jaxinfer.lab.plan.search import DrivenSearch
from jaxinfer.simulate.capacity import TriedRate
from jaxinfer.simulate.run import prepare, serve, simulate
from jaxinfer.simulate.targets import PercentileTargets, Verdict
from jaxinfer.workload.lengths import BenchRequest, read_workload

TARGETS = PercentileTargets([("ttft", 90, 4.0)])


def one(arrival: float, outputs: int) -> BenchRequest:
    return BenchRequest(None, 8, outputs, arrival)


def data_of(count: int = 1, **more: Any) -> dict[str, Any]:
    search_run = Problem.model_validate(
        {"planner": "none", "goal": {"maximise": "gpu", "slo": "ttft=1"}, "run": RUN | more}
    )
    return search_run.run_file(candidate(count).part)


def served(schedule: Schedule, work: Sequence[BenchRequest], **options: Any) -> Any:
    return Server(cut(work, 5.0), TARGETS, Replan(window_s=5.0, **options))(schedule)


def test_who_comes_before_the_cluster_is_there_waits() -> None:
    prepared = prepare(as_run_file(data_of()))
    work = [one(0.0, 3), one(12.0, 1)]
    times = {}
    for start in (0.0, 10.0):
        serve(
            prepared,
            work,
            None,
            lambda r, t, s=start: times.update({(s, r.id): (r.arrival, list(t))}),
            start,
        )
    assert times[0.0, "0"] == (0.0, [1.0, 2.0, 3.0])
    assert times[10.0, "0"] == (0.0, [11.0, 12.0, 13.0])
    assert times[10.0, "1"] == (12.0, [13.0]) == times[0.0, "1"]


def test_drain_and_reload_by_hand() -> None:
    """A step takes a second: who decodes 10 tokens from 0 on has ended at 10."""
    work = [one(0.0, 10), one(4.0, 1), one(6.0, 2), one(30.0, 1)]
    schedule = Schedule(
        "x",
        [
            PlacementPeriod(0.0, data_of(1)),
            PlacementPeriod(5.0, data_of(2)),
            PlacementPeriod(20.0, data_of(1)),
        ],
    )
    found = served(schedule, work, reload_s=3.0)
    first, second, third = found.courses
    assert (first.ready, first.drained, first.requests, first.gpus) == (0, 10, 2, 1)
    # It waits for 10, then loads; the request from 6 has its tokens at 14 and 15.
    assert (second.ready, second.drained, second.requests, second.gpus) == (13, 15, 1, 2)
    # All had ended at 15.
    assert (third.ready, third.drained, third.reload_s) == (23, 31, 3)
    assert (found.drain_s, found.reload_s) == (5, 6)
    assert found.gpu_hours * 3600 == pytest.approx(1 * 10 + 2 * (20 - 10) + 1 * (31 - 20))
    assert found.latencies.ttft.mean == pytest.approx((1 + 1 + 8 + 1) / 4)
    # Of windows of 5 s, two requests come in the first, and one in the second and in the last.
    assert [w and w.met for w in found.windows] == [True, False, None, None, None, None, True]


def test_what_is_free_waits_for_nothing() -> None:
    work = [one(0.0, 10), one(6.0, 2)]
    schedule = Schedule(
        "x", [PlacementPeriod(0.0, data_of(1)), PlacementPeriod(5.0, data_of(2))], free=True
    )
    found = served(schedule, work, reload_s=3.0)
    assert [(s.ready, s.drained) for s in found.courses] == [(0, 10), (5, 8)]
    assert (found.drain_s, found.reload_s) == (0, 0)
    # The first goes on while the second is there.
    assert found.gpu_hours * 3600 == pytest.approx(1 * 10 + 2 * 3)


def test_an_epoch_without_requests_only_loads() -> None:
    schedule = Schedule(
        "x",
        [
            PlacementPeriod(0.0, data_of(1)),
            PlacementPeriod(5.0, data_of(2)),
            PlacementPeriod(10.0, data_of(1)),
        ],
    )
    found = served(schedule, [one(0.0, 1), one(11.0, 1)], reload_s=3.0)
    assert [(s.ready, s.drained) for s in found.courses] == [(0, 1), (8, 8), (13, 14)]


def test_waiting_for_weights_is_not_draining() -> None:
    """A request for the third placement waits 3 s for the second's weights, then 2 s for tokens."""
    work = [one(0.0, 10), one(6.0, 2), one(11.0, 1)]
    schedule = Schedule(
        "x",
        [
            PlacementPeriod(0.0, data_of(1)),
            PlacementPeriod(5.0, data_of(2)),
            PlacementPeriod(11.0, data_of(1)),
        ],
    )
    found = served(schedule, work, reload_s=3.0)
    assert [(s.ready, s.drained) for s in found.courses] == [(0, 10), (13, 15), (18, 19)]
    assert (found.drain_s, found.reload_s) == (5 + 2, 6)


# Of 8.03 billion parameters of two bytes; the first and the last half of the layers have a table of
# 128,256 rows of 4,096 each.
@pytest.mark.parametrize(
    ("devices", "stages", "share"), [(1, "a", 1.0), (2, "a", 0.5), (1, "ab", 0.5)]
)
def test_each_gpu_loads_its_own_weights(devices: int, stages: str, share: float) -> None:
    groups = {name: {"kind": "A100-80G-SXM", "devices": devices} for name in stages}
    place = {"stages": [{"group": name} for name in stages]}
    links = [{"between": list(stages), "gb_s": 10}] if len(stages) > 1 else []
    data = RUN | {"groups": groups, "instances": {"i": place}, "links": links, "system": "single"}
    cluster = prepare(as_run_file(data))
    server = Server([], TARGETS, Replan(window_s=1.0, reload_gb_s=2.0))
    assert server.reload_s(cluster) == pytest.approx(share * 8.03, rel=1e-3)


def write(path: Path, rows: list[tuple[float, int, int]]) -> str:
    lines = "".join(f"{t},{p},{o}\n" for t, p, o in rows)
    path.write_text("arrived_at,num_prefill_tokens,num_decode_tokens\n" + lines)
    return str(path)


def phases(*prompts: int, each: int = 5, seconds: float = 10.0) -> list[tuple[float, int, int]]:
    """Return evenly spaced requests whose prompt length changes after the given seconds."""
    step = seconds / each
    return [
        (seconds * number + step * i, prompt, 2)
        for number, prompt in enumerate(prompts)
        for i in range(each)
    ]


def searches(asked: Problem) -> DrivenSearch:
    return DrivenSearch(asked)


def test_a_plan_is_made_of_the_window_that_has_shifted(tmp_path: Path) -> None:
    trace = write(tmp_path / "t.csv", phases(10, 11, 100, 100, 80, 10, 10))
    replanner = Replanner(problem(trace, {"window_s": 10.0}), searches)
    stands, looks = replanner.replanned()
    assert [c.axes["instances"] for c in stands] == [1, 1, 1, 2, 2, 2, 1]
    shifts = [0, 0.1, 9, 0, 0.2, 0.9, 0]
    assert [look.shift for look in looks] == pytest.approx(shifts)
    # A fifth is not above a fifth; the last window is over when nothing comes any more.
    assert [look.chosen is not None for look in looks] == [False, False, True, False, False, True,
                                                           False]  # fmt: skip
    schedule = replanner.schedule("replanned", stands)
    assert [period.start for period in schedule.periods] == [0, 30, 60]
    assert [c.axes["instances"] for c in replanner.oracle()] == [1, 1, 2, 2, 2, 1, 1]


def test_where_there_is_no_plan_the_placement_stays(tmp_path: Path) -> None:
    rows = [row for row in phases(100, 13, 10, 10) if row[1] != 10 or row[0] >= 30]
    trace = write(tmp_path / "t.csv", rows)
    replanner = Replanner(problem(trace, {"window_s": 10.0}), searches)
    stands, looks = replanner.replanned()
    assert [c.axes["instances"] for c in stands] == [2, 2, 2, 2]
    assert [look.refused for look in looks] == [None, "13 is none of mine", None, None]
    assert looks[2].shift is None  # Nobody came.
    assert [c.axes["instances"] for c in replanner.oracle()] == [2, 2, 2, 1]


def test_the_first_window_needs_a_plan(tmp_path: Path) -> None:
    trace = write(tmp_path / "t.csv", phases(13, 10))
    with pytest.raises(JaxinferError, match="window 0, from 0 to 10 s: 13 is none of mine"):
        Replanner(problem(trace, {"window_s": 10.0}), searches).replanned()


def test_a_planner_that_breaks_is_not_a_window_without_a_plan(tmp_path: Path) -> None:
    trace = write(tmp_path / "t.csv", phases(10, 14, 10))
    with pytest.raises(PlannerFailed, match="plan raises ZeroDivisionError: 14"):
        Replanner(problem(trace, {"window_s": 10.0}), searches).replanned()


def test_a_cheapest_cluster_is_planned_for_its_windows_rate(tmp_path: Path) -> None:
    """Twice the requests of the mean are twice the rate of the goal."""
    rows = phases(10, each=2) + [(10 + t, p, o) for t, p, o in phases(10, each=6)]
    goal = {"minimise": "gpus", "rate": 0.3, "slo": "ttft:p90=30"}
    ByPrompts.asked.clear()
    asked = problem(write(tmp_path / "t.csv", rows), {"window_s": 10.0}, goal=goal)
    replanner = Replanner(asked, searches)
    replanner.static()
    replanner.oracle()
    assert ByPrompts.asked == pytest.approx([0.3, 0.15, 0.45])


def test_where_nothing_shifts_it_is_the_static_plan(tmp_path: Path) -> None:
    trace = write(tmp_path / "t.csv", phases(10, 10, 11, 10, each=7))
    asked = problem(trace, {"window_s": 10.0})
    followed = follow(asked, searches)
    replanned, static, oracle = followed.served
    (only,) = replanned.schedule.periods
    for each in (replanned, oracle):
        assert each.latencies.figures() == static.latencies.figures()
        assert (each.verdict, each.windows) == (static.verdict, static.windows)
        assert each.courses == static.courses
        assert each.gpu_hours == static.gpu_hours
    alone = simulate(as_run_file(only.data), asked.work)
    assert alone.ttft_mean == static.latencies.figures()["ttft_mean"]
    assert alone.e2e_p99 == static.latencies.figures()["e2e_p99"]


class Rule:
    """Stand in for the simulator: so many instances carry a rate of long or of short prompts."""

    def __init__(self, carried: Sequence[tuple[float, float]]) -> None:
        self.carried = carried

    def __call__(
        self, config: RunFile, work: Sequence[BenchRequest], targets: Any, seeds: Any, rate: float
    ) -> TriedRate:
        short = work[0].prompt_len <= LONG
        met = rate <= self.carried[len(config.cluster().instances) - 1][short]
        return TriedRate(rate, 1, Verdict(met, 1, float(met), {"ttft": float(met)}), None)


@examples(20)
@given(st.lists(st.tuples(st.floats(0.1, 50), st.floats(0.1, 50)), min_size=3, max_size=3))
def test_an_oracle_is_no_worse_than_a_static_plan_by_its_own_measure(
    carried: list[tuple[float, float]],
) -> None:
    """The oracle carries at least the static plan's rate in each window."""
    with pytest.MonkeyPatch.context() as patch, TemporaryDirectory() as folder:
        for module in ("jaxinfer.simulate.capacity", "jaxinfer.lab.plan.evaluate"):
            patch.setattr(f"{module}.load", Rule(carried))
        met = Verdict(True, 1, None, {})
        patch.setattr("jaxinfer.lab.plan.evaluate.alone", lambda *given: met)
        trace = write(Path(folder) / "t.csv", phases(100, 10, 100))
        asked = problem(trace, {"window_s": 10.0}, planner="replan_cases:OneToThree")
        replanner = Replanner(asked, searches)
        static, oracle = replanner.static(), replanner.oracle()
        for window, best in zip(replanner.windows, oracle, strict=True):
            each = [candidate(1), candidate(2), candidate(3)]
            scores = DrivenSearch(asked.for_work(window.work, 1.0)).scores([best, static, *each])
            ours, fixed, *others = (score.rate for score in scores)
            assert ours >= fixed
            assert ours == max(others)


GONE = {"beside": {"flips": "gone.yaml"}}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"window_s": 0}, "replan.window_s is 0, must be greater than 0"),
        ({"reload_gb_s": 2.0}, "replan: give either reload_gb_s or reload_s"),
        ({"reload_s": None}, "replan: give either reload_gb_s or reload_s"),
        ({"beside": {"oracle": "x.yaml"}}, "replan.beside.oracle: this name is taken"),
        ({"window_s": 20.0}, r"replan.window_s is 20, and all requests come before: .* below 17 s"),
        (GONE, "replan.beside.flips: gone.yaml: No such file"),
    ],
)
def test_what_cannot_be_followed(change: dict[str, Any], says: str, tmp_path: Path) -> None:
    rows = [(t or 1.0, p, o) for t, p, o in phases(10, 10)]
    with pytest.raises(JaxinferError, match=says) as raised:
        command(tmp_path, rows, {"window_s": 10.0} | change)
    assert "\n" not in str(raised.value)
    assert not (tmp_path / "out").exists()


def test_a_choice_that_is_not_looked_at_again_takes_no_seeds_for_it() -> None:
    goal = {"maximise": "cluster", "slo": "ttft=1", "fresh_seeds": 3}
    with pytest.raises(JaxinferError, match=r"^goal\.fresh_seeds: is for one placement that stays"):
        problem("t.csv", {"window_s": 10.0}, goal=goal)


def test_requests_that_all_come_at_once_cannot_be_followed(tmp_path: Path) -> None:
    asked = problem(write(tmp_path / "t.csv", phases(10, 10)), {"window_s": 10.0, "reload_s": 1.0})
    del asked.run["workload"]["arrivals"]
    with pytest.raises(JaxinferError, match=r"run\.workload\.arrivals: all requests come at 0 s"):
        windows_of(asked)


def test_tokens_cannot_be_followed(tmp_path: Path) -> None:
    """Prompts of tokens are refused, since run files of lengths would lose what prompts share."""
    trace = tmp_path / "t.jsonl"
    line = '{"prompt_token_ids": [1, 2], "max_tokens": 2}\n'
    trace.write_text(line * 3)
    asked = problem(str(trace), {"window_s": 1.0, "reload_s": 1.0})
    asked.run["workload"]["arrivals"] = {"kind": "poisson", "rate": 1.0}
    with pytest.raises(JaxinferError, match=r"^run\.workload\.trace: has tokens"):
        windows_of(asked)


def command(
    folder: Path, rows: list[tuple[float, int, int]], replan: dict[str, Any], *more: str
) -> str:
    """``jaxinfer plan`` of a file with this section."""
    asked = problem(write(folder / "t.csv", rows), {"window_s": 1.0}).model_dump(exclude_unset=True)
    path = folder / "plan.yaml"
    path.write_text(yaml.safe_dump(asked | {"replan": {"reload_s": 3.0} | replan}))
    words = [str(path), "--out", str(folder / "out"), "--jobs", "1", *more]
    return CliRunner().invoke(plan, words, catch_exceptions=False).stdout


def test_the_command_writes_tables_run_files_and_a_picture(tmp_path: Path) -> None:
    beside = tmp_path / "two.yaml"
    beside.write_text(yaml.safe_dump({"workload": {"trace": "none"}, **candidate(2).part}))
    rows = phases(10, 100, 100)
    said = command(tmp_path, rows, {"window_s": 10.0, "beside": {"two": str(beside)}})
    out = tmp_path / "out"
    schedules, windows = (
        list(csv.DictReader((out / f"{n}.csv").open())) for n in ("replan", "windows")
    )
    assert [schedule["way"] for schedule in schedules] == ["replanned", "static", "oracle", "two"]
    assert [schedule["placements"] for schedule in schedules] == ["2", "1", "2", "1"]
    assert all(schedule["way"] in said for schedule in schedules)
    # Of both kinds of prompts the mean is long.
    same = ("gpu_hours", "ttft_p90", "windows_kept", "e2e_mean")
    assert [schedules[1][name] for name in same] == [schedules[3][name] for name in same]
    assert [row["stands"] for row in windows] == ["instances 1"] * 2 + ["instances 2"]
    assert [row["oracle"] for row in windows] == ["instances 1"] + ["instances 2"] * 2
    assert [row["planned"] for row in windows] == ["", "instances 2", ""]
    config = load_run_file(out / "replanned1.yaml")
    assert len(config.cluster().instances) == 2
    work = config.requests()
    assert [(20 + i.arrival, i.prompt_len, i.max_tokens) for i in work] == rows[10:]
    assert load_run_file(out / "static0.yaml").requests() == read_workload(tmp_path / "t.csv")
    assert (out / "replan.png").stat().st_size > 1000
    files = {path.name: path.read_bytes() for path in out.iterdir()}
    command(tmp_path, rows, {"window_s": 10.0, "beside": {"two": str(beside)}})
    assert {path.name: path.read_bytes() for path in out.iterdir()} == files


def test_plans_of_too_few_requests_are_told_with_their_window(tmp_path: Path) -> None:
    """Ten requests tell no rate of random arrivals, neither of a window nor of the whole trace."""
    trace = write(tmp_path / "t.csv", phases(10, 100, 100, each=10))
    goal = {"maximise": "cluster", "slo": "ttft:p90=1.5", "precision": 0.5}
    warnings = follow(problem(trace, {"window_s": 10.0}, goal=goal), searches).warnings
    assert [line.partition(": warning: too few requests")[0] for line in warnings] == [
        "plan of window 0",
        "plan of window 1",
        "plan of the whole trace",
        "plan of window 2",
    ]


def test_run_files_that_were_edited_stay_and_old_ones_go(tmp_path: Path) -> None:
    out, windows = tmp_path / "out", {"window_s": 10.0}
    command(tmp_path, phases(10, 100, 100), windows)
    assert sorted(path.name for path in out.glob("*.yaml")) == [
        "replanned0.yaml",
        "replanned1.yaml",
        "static0.yaml",
    ]
    with (out / "replanned0.yaml").open("a") as file:
        file.write("# mine\n")
    with pytest.raises(JaxinferError, match=r"replanned0\.yaml: was edited.*--force"):
        command(tmp_path, phases(10, 100, 100), windows)
    # Of a trace whose mix stays, nothing is left of the second placement, but for a copy of it.
    mine = out / "replanned0.mine.yaml"
    mine.write_bytes((out / "replanned1.yaml").read_bytes())
    command(tmp_path, phases(10, 10, 10), windows, "--force")
    assert is_untouched(mine)
    assert sorted(path.name for path in out.glob("*0*")) == [
        "replanned0.csv",
        "replanned0.mine.yaml",
        "replanned0.yaml",
        "static0.csv",
        "static0.yaml",
    ]
    assert not list(out.glob("*1*"))
