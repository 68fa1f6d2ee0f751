"""Results that a search goes on with, and those that it does not."""

import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner
from plan_cases import RUN, Carries, problem

from jaxinfer import JaxinferError
from jaxinfer.commands.plan import plan
from jaxinfer.commands.sweep import sweep
from jaxinfer.files import made_from
from jaxinfer.files.contents import contents
from jaxinfer.files.kept import KeptResults, key_of
from jaxinfer.files.made_from import PACKAGE, code_version, digest_of, real_version
from jaxinfer.files.shipped import SHIPPED
from jaxinfer.lab.plan.candidate import Candidate
from jaxinfer.lab.plan.choose import choose
from jaxinfer.lab.plan.planners.any_system import grid
from jaxinfer.lab.plan.problem import merge
from jaxinfer.lab.plan.search import DrivenSearch
from jaxinfer.lab.plan.sweep.sweep import sweep_rows
from jaxinfer.lab.plan.sweep.sweep_file import Sweep
from jaxinfer.simulate.targets import Verdict

CLUSTER = {"groups": {"g": {"kind": "A10", "devices": 1}}, "instances": {"i": {"group": "g"}}}
LONE = Candidate({"a": 1}, CLUSTER)


def write(path: Path, data: Any) -> str:
    path.parent.mkdir(exist_ok=True)
    path.write_text(yaml.safe_dump(data))
    return str(path)


def test_a_trace_that_has_changed_is_simulated_again(tmp_path: Path) -> None:
    trace = tmp_path / "work.csv"
    asked = Sweep.model_validate(
        {
            "files": {write(tmp_path / "one.yaml", CLUSTER): {}},
            "run": RUN | {"workload": {"trace": str(trace)}},
        }
    )
    kept = KeptResults(tmp_path / "points.jsonl")
    found = []
    for outputs in (None, 5, 5, 7):
        if outputs:
            trace.write_text(f"num_prefill_tokens,num_decode_tokens\n9,{outputs}\n")
        found += sweep_rows(asked, kept)
    # A file that was missing counts as soon as it is there.
    assert "cannot read" in found[0]["refused"]
    assert [row["output_tokens"] for row in found[1:]] == [5, 5, 7]
    assert len((tmp_path / "points.jsonl").read_text().splitlines()) == 2


def test_files_of_one_name_are_two_clusters(tmp_path: Path) -> None:
    other = merge(CLUSTER, {"groups": {"g": {"kind": "L4"}}})
    files = [write(tmp_path / "a/x.yaml", CLUSTER), write(tmp_path / "b/x.yaml", other)]
    found = list(grid({file: {} for file in files}, {"engine.seed": [0, False]}))
    assert [c.axes["file"] for c in found] == [files[0]] * 2 + [files[1]] * 2
    assert len({candidate.key for candidate in found}) == 4


def test_values_of_axes_arrive_as_they_are(tmp_path: Path) -> None:
    file = write(tmp_path / "one.yaml", CLUSTER)
    (small,) = grid({file: {}}, {"simulate.sequence_s": [1e-5]})
    assert small.part["simulate"] == {"sequence_s": 1e-5}


def test_a_name_that_stands_for_options_goes_with_others() -> None:
    base = {"workload": {"arrivals": "poisson", "synthetic": "azure_code"}}
    more = {"workload": {"arrivals": {"rate": 2.0}, "synthetic": {"count": 3}}}
    assert merge(base, more)["workload"] == {
        "arrivals": {"kind": "poisson", "rate": 2.0},
        "synthetic": {"lengths": "azure_code", "count": 3},
    }


def test_keys_may_be_numbers_beside_names() -> None:
    assert key_of({1: "a", "b": 2}) == key_of({"b": 2, "1": "a"}) != key_of({"b": 2, "1": "b"})


@pytest.mark.parametrize("line", ["garbage", '{"key": "a"}', '{"key": "a", "value": 5}', "\xff"])
def test_lines_of_something_else_are_refused(tmp_path: Path, line: str) -> None:
    path = tmp_path / "kept.jsonl"
    path.write_bytes(b'{"key": "b", "value": {}}\n' + line.encode("latin-1") + b"\n")
    with pytest.raises(JaxinferError, match=r"kept\.jsonl, line 2: is not a valid entry"):
        KeptResults(path)


@pytest.mark.parametrize(
    ("old", "new"), [("2.5", "-2.5"), ("2.5", "NaN"), ("rate", "rating"), ("k1", "k2")]
)
def test_a_line_that_was_changed_is_not_believed(tmp_path: Path, old: str, new: str) -> None:
    path = tmp_path / "kept.jsonl"
    kept = KeptResults(path)
    kept.add("k0", {"rate": math.inf})
    kept.add("k1", {"rate": 2.5})
    kept.close()
    first, second = path.read_text().splitlines()
    path.write_text(f"{first}\n{second.replace(old, new)}\n")
    with pytest.raises(JaxinferError, match=r"kept\.jsonl, line 2: is not a valid entry: delete"):
        KeptResults(path)
    path.write_text(f"{first}\n")
    assert KeptResults(path).get("k0") == {"rate": math.inf}


@pytest.mark.parametrize("lost", [1, 20])
def test_half_a_line_ends_with_whoever_was_killed_in_it(tmp_path: Path, lost: int) -> None:
    """A result found next has a line of its own."""
    path = tmp_path / "kept.jsonl"
    for cut, known in ((lost, []), (0, ["a"]), (0, ["a", "b", "c"])):
        kept = KeptResults(path, "1")
        assert [key for key in "abc" if kept.get(key) == {"rate": 1}] == known
        for key in "abc" if known else "ab":
            kept.add(key, {"rate": 1})
        kept.close()
        path.write_bytes(path.read_bytes()[: -cut or None])


def test_what_another_version_has_found_does_not_count(tmp_path: Path) -> None:
    path = tmp_path / "kept.jsonl"
    path.write_text('{"key": "a", "value": {"rate": 1}}\n')  # Of before there were versions.
    for version, others in (("1", 1), ("2", 2), ("1", 2)):
        kept = KeptResults(path, version)
        assert kept.of_others == others
        assert kept.get("a") == ({"rate": "1"} if others == 2 and version == "1" else None)
        kept.add("a", {"rate": version})
        kept.close()


def test_all_code_and_tables_make_the_version(tmp_path: Path) -> None:
    """Code that changes, is new or called otherwise makes another version; compiled code not."""
    (tmp_path / "simulate").mkdir()
    (tmp_path / "models").mkdir()
    gpus = tmp_path / "simulate" / "gpus.yaml"
    gpus.write_text("A100: {bf16_tflops: 312}\n")
    found = [digest_of(tmp_path, ("models",))]
    gpus.write_text("A100: {bf16_tflops: 31}\n")
    found.append(digest_of(tmp_path, ("models",)))
    (tmp_path / "loop.py").write_text("")
    found.append(digest_of(tmp_path, ("models",)))
    (tmp_path / "loop.py").rename(tmp_path / "pool.py")
    found.append(digest_of(tmp_path, ("models",)))
    assert len(set(found)) == 4
    (tmp_path / "models" / "llama.py").write_text("")
    (tmp_path / "pool.pyc").write_text("")
    assert digest_of(tmp_path, ("models",)) == found[-1] != digest_of(tmp_path)


def test_of_the_package_its_code_and_facts_count_and_its_run_files_do_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files are changed in a copy; folders below ``configs`` hold run files."""
    assert code_version() == digest_of(PACKAGE, ("pallas_kernels",)) != digest_of(PACKAGE)
    copy, left_out = tmp_path / "jaxinfer", ("pallas_kernels",)
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(made_from, "SHIPPED", copy / "configs")
    found = [digest_of(copy, left_out)]
    assert found[0] == code_version()
    for name in (
        "configs/gpus.yaml",
        "configs/models.yaml",
        "configs/lengths.yaml",
        "simulate/costs/roofline.py",
        "serving/loop.py",
        "lab/plan/planners/colocated.py",
        "models/layouts.py",
    ):
        with (copy / name).open("a") as file:
            file.write("# mine\n")
        found.append(digest_of(copy, left_out))
    assert len(set(found)) == 8
    below = [path for path in (copy / "configs").glob("*/**/*.yaml") if path.is_file()]
    assert below
    for path in below:
        path.write_text("mine")
    assert digest_of(copy, left_out) == found[-1]


def test_real_runs_depend_on_the_processor_and_not_on_the_hosts_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Containers have names of their own."""
    first = real_version()
    monkeypatch.setattr("platform.node", lambda: "another")
    assert real_version() == first
    monkeypatch.setattr("jaxinfer.files.made_from.cpu_name", lambda: "another")
    assert real_version() != first


def test_a_changed_simulator_is_asked_again(
    carries: Carries, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same plan in the same folder: at once with the same code, anew with other."""
    found = []
    for version, rate in (("1", 2.0), ("1", 4.0), ("2", 4.0)):
        monkeypatch.setattr("jaxinfer.files.kept.code_version", lambda version=version: version)
        carries.rate = lambda config, rate=rate: rate
        kept = KeptResults(tmp_path / "evaluations.jsonl")
        search = DrivenSearch(problem({"maximise": "gpu"}), kept=kept)
        best = search.best([LONE])
        kept.close()
        found.append(search.tried[best.key][1].rate)
    assert found == [2.0, 2.0, 4.0]


def test_a_search_that_is_killed_again_and_again_gets_on(carries: Carries, tmp_path: Path) -> None:
    """A new simulation in each life: as many lives as an undisturbed search has simulations."""

    class KilledError(BaseException):
        pass

    carries.rate = lambda config: 3.3
    undisturbed = DrivenSearch(problem({"maximise": "gpu"}))
    best = undisturbed.best([LONE])
    needed, lives = len(carries.tried), 0

    def one_only(call: Any, asked: Any) -> Any:
        def each(simulation: Any) -> Any:
            if left.pop() == "killed":
                raise KilledError
            return call(simulation)

        return map(each, asked)

    while lives < 3 * needed:
        lives += 1
        left = ["killed", "alive"]
        kept = KeptResults(tmp_path / "evaluations.jsonl")
        try:
            search = DrivenSearch(problem({"maximise": "gpu"}), one_only, kept)
            assert search.best([LONE]) == best
            break
        except KilledError:
            continue
        finally:
            kept.close()
    assert search.tried == undisturbed.tried
    assert lives == needed + 1  # With the sample of requests that are alone.


def test_two_processes_do_not_write_to_one_file(tmp_path: Path) -> None:
    first = KeptResults(tmp_path / "kept.jsonl")
    with pytest.raises(JaxinferError, match="is in use by another process"):
        KeptResults(tmp_path / "kept.jsonl")
    first.close()
    KeptResults(tmp_path / "kept.jsonl").close()


@pytest.mark.parametrize("slo", ["ttft", "none.yaml"])
def test_a_plan_that_is_wrong_leaves_no_folder(tmp_path: Path, slo: str) -> None:
    goal = {"maximise": "gpu", "slo": slo}
    file = {"planner": {"name": "colocated", "gpus": {"A10": 1}}, "goal": goal, "run": RUN}
    path = write(tmp_path / "plan.yaml", file)
    with pytest.raises(JaxinferError, match=rf"plan file {path}: slo"):
        CliRunner().invoke(plan, [path, "--out", str(tmp_path / "out")], catch_exceptions=False)
    assert not (tmp_path / "out").exists()


def test_a_search_that_finds_nothing_to_simulate_leaves_no_folder(tmp_path: Path) -> None:
    file = {
        "planner": {"name": "colocated", "gpus": {"B1": 1}},
        "goal": {"maximise": "gpu", "slo": "ttft=1"},
        "run": RUN,
    }
    path = write(tmp_path / "plan.yaml", file)
    asked = [path, "--jobs", "1", "--out"]
    with pytest.raises(JaxinferError, match=r"none of 1 candidates is valid.*B1"):
        CliRunner().invoke(plan, [*asked, str(tmp_path / "out")], catch_exceptions=False)
    assert not (tmp_path / "out").exists()
    (tmp_path / "mine").mkdir()
    with pytest.raises(JaxinferError, match="B1"):
        CliRunner().invoke(plan, [*asked, str(tmp_path / "mine")], catch_exceptions=False)
    assert list((tmp_path / "mine").iterdir()) == []


def test_pictures_without_an_axis_of_numbers_are_refused(tmp_path: Path) -> None:
    file = {"files": {write(tmp_path / "one.yaml", CLUSTER): {}}, "axes": {"model": ["llama-3-8b"]}}
    asked = [write(tmp_path / "s.yaml", file), "--out", str(tmp_path / "out"), "--pictures", "pdf"]
    with pytest.raises(JaxinferError, match="--pictures is for an axis of numbers"):
        CliRunner().invoke(sweep, asked, catch_exceptions=False)


@pytest.mark.parametrize("goal", [{"maximise": "gpu"}, {"minimise": "gpus", "rate": 5.0}])
def test_a_choice_that_misses_the_targets_is_refused(
    carries: Carries, goal: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    missed = Verdict(False, 0, None, {"ttft": 0.0})
    monkeypatch.setattr("jaxinfer.lab.plan.evaluate.alone", lambda *given: missed)
    carries.rate = lambda config: 0.0

    class Stubborn:
        def plan(self, problem: Any, search: Any) -> Any:
            return LONE

    with pytest.raises(JaxinferError, match=r"the chosen .* misses the targets"):
        choose(Stubborn(), DrivenSearch(problem(goal)))  # type: ignore[arg-type]


@pytest.mark.parametrize("fresh", [False, True])
def test_a_rate_without_end_is_no_rate(carries: Carries, fresh: bool) -> None:
    """A chosen rate without end is refused; fresh seeds that find none are left out."""
    carries.rate = lambda config: 2.0 if fresh and not carries.served[-1][1][0] else math.inf

    class Stubborn:
        def plan(self, problem: Any, search: Any) -> Any:
            return LONE

    search = DrivenSearch(problem({"maximise": "gpu"}))
    if fresh:
        assert choose(Stubborn(), search).fresh == []  # type: ignore[arg-type]
        return
    with pytest.raises(JaxinferError, match=r"^the targets hold at any rate of the chosen"):
        choose(Stubborn(), search)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "name",
    [
        "attention.csv",
        "attention.csv.gz",
        "meta.yaml",
        "config.json",
        "tokenizer.json",
        "tokenizer_config.json",
    ],
)
def test_what_a_folder_has_counts(tmp_path: Path, name: str) -> None:
    (tmp_path / "tp1").mkdir()
    file = tmp_path / "tp1" / name if ".csv" in name else tmp_path / name
    data = {"simulate": {"tables": str(tmp_path)}}
    before = contents(data)
    file.write_bytes(b"1")
    with_it = contents(data)
    file.write_bytes(b"22")
    assert before != with_it != contents(data)


def test_words_that_name_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Options of folders alone: a folder of results has a system's name, a group's, a planner's."""
    monkeypatch.chdir(tmp_path)
    Path("single").mkdir()
    Path("single/sweep.csv").write_text("1")
    Path("all.csv").write_text("1")
    data: dict[str, Any] = {
        "system": {"name": "single", "prefill": "single"},
        "planner": "single",
        "groups": {"single": {}},
        "instances": {"a": {"group": "single"}},
    }
    assert contents(data | {"system": "single"}) == contents(data) == {}
    for named in (
        {"model": "single"},
        {"workload": {"tokenizer": "single"}},
        {"simulate": {"groups": {"g": {"tables": "single"}}}},
        ["single"],
    ):
        assert list(contents(named)) == ["single/sweep.csv"]
    assert contents(["", {"model": ""}]) == {}, "not all of the working directory"
    # A file that ships is found by its name alone.
    costs = {"file": "cronus_calibration.yaml"}
    assert list(contents(costs)) == [str(SHIPPED / "cronus_calibration.yaml")]


def test_a_price_that_is_missing_counts_where_dollars_do(carries: Carries) -> None:
    prices = {"L4": 0.5}
    search = DrivenSearch(problem({"maximise": "cluster"}, prices=prices))
    assert search.best([LONE]).axes == {"a": 1}
    ((_, score),) = search.tried.values()
    assert score.costs
    assert score.costs.usd is None


def test_a_candidate_has_no_requests_of_its_own() -> None:
    with pytest.raises(JaxinferError, match=r"workload\.limit: all candidates serve the same"):
        problem({"maximise": "gpu"}).run_file({"workload": {"limit": 1}})
