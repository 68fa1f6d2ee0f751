"""Several systems on one workload: what is read, in which order they run, what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from jaxinfer import LLM, JaxinferError
from jaxinfer.commands.check.replay import replay
from jaxinfer.commands.common import refuse, workload_settings
from jaxinfer.commands.compare import compare as command
from jaxinfer.config.run_file import RunFile, as_run_file, load_run_file
from jaxinfer.lab import compare, measure
from jaxinfer.lab.compare import compare_systems, load_systems, simulate_systems
from jaxinfer.report import comparison
from jaxinfer.report.origin import digest
from jaxinfer.runtime.stage import devices

CONFIGS = {"first": RunFile(model="m"), "second": RunFile(model="m")}


def test_two_files_of_one_name(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "x.yaml").write_text(f"model: {folder}\n")
    files = [str(tmp_path / folder / "x.yaml") for folder in ("a", "b")]
    with pytest.raises(JaxinferError, match=r"a/x\.yaml, .*/b/x\.yaml have one name"):
        load_systems(files, [])
    (one,) = load_systems(files[:1], [], ["engine.seed=3"]).items()
    assert (one[0], one[1].model, one[1].engine.seed) == ("x", "a", 3)


def test_systems_are_files_beside_the_first(tmp_path: Path) -> None:
    for name in ("cronus", "single"):
        (tmp_path / f"{name}.yaml").write_text(f"model: {name}\n")
    found = load_systems([str(tmp_path / "cronus.yaml")], ["cronus", "single"], ["engine.seed=3"])
    assert {name: config.model for name, config in found.items()} == {
        "cronus": "cronus",
        "single": "single",
    }
    assert {config.engine.seed for config in found.values()} == {3}


def test_a_system_without_a_file_is_refused_with_those_that_have_one(tmp_path: Path) -> None:
    for name in ("mine", "other"):
        (tmp_path / f"{name}.yaml").write_text("model: m\n")
    missing = rf"^--systems data_parallel: there is no run file {tmp_path}/data_parallel\.yaml, "
    with pytest.raises(JaxinferError, match=missing + "known: mine, other$"):
        load_systems([str(tmp_path / "mine.yaml")], ["other", "data_parallel"])


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("instances.cpi.num_pages=500", "has no instance 'cpi': known: high, low"),
        ("instances.hihg.num_pages=500", "instances.hihg: needs either group or stages"),
    ],
)
def test_a_setting_for_an_instance_that_a_file_lacks(setting: str, message: str) -> None:
    """The file that lacks it is named; if no file has it, the first one says what is missing."""
    with pytest.raises(JaxinferError, match=message) as raised:
        load_systems(["configs/cronus/cronus.yaml"], ["data_parallel"], [setting])
    lacking = "data_parallel" if "cpi" in setting else "cronus"
    assert f"configs/cronus/{lacking}.yaml" in str(raised.value)
    assert str(raised.value).startswith(f"--set {setting}: ") == ("cpi" in setting)


def test_settings_may_add_an_instance_that_another_file_has(tmp_path: Path) -> None:
    for name in ("a", "b"):
        own = {"groups": {"g": {}}, "instances": {name: {"group": "g"}}, "system": "least_loaded"}
        (tmp_path / f"{name}.yaml").write_text(json.dumps(own))
    group = ["groups.g.devices=2", "groups.g.tensor_parallel_size=1"]
    settings = [*group, "instances.b.group=g", "instances.b.max_num_seqs=7"]
    found = load_systems([str(tmp_path / "a.yaml")], ["b"], settings)
    assert {name: list(config.instances) for name, config in found.items()} == {
        "a": ["a", "b"],
        "b": ["b"],
    }


def test_shipped_systems_are_found_from_any_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert list(load_systems(["configs/cronus/cronus.yaml"], ["data_parallel"])) == [
        "cronus",
        "data_parallel",
    ]


def read(folder: Path, name: str) -> Any:
    return name, folder


@pytest.mark.parametrize("one_by_one", [False, True])
def test_systems_run_in_turns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, one_by_one: bool
) -> None:
    """Round by round, and each round's record is its own; or each system's rounds in a row."""
    ran: list[tuple[Any, Any, str]] = []
    counted: list[Any] = []

    def load_all(configs: Any, progress: bool) -> dict[str, str]:
        assert len(counted) == len(CONFIGS), "devices are counted before JAX is"
        assert len(configs) == (1 if one_by_one else len(CONFIGS))
        return {name: f"LLM of {name}" for name in configs}

    def count(clusters: Any) -> None:
        counted.extend(clusters)

    def measured(llm: Any, work: Any, source: str, run_dir: str) -> None:
        ran.append((llm, work, run_dir))

    monkeypatch.setattr(LLM, "load_all", load_all)
    monkeypatch.setattr(measure, "measure", measured)
    monkeypatch.setattr(devices, "count_cpu_devices", count)
    monkeypatch.setattr(compare, "read_run", read)
    runs = compare_systems(CONFIGS, [], tmp_path, 2, progress=False, one_by_one=one_by_one)
    folders = {name: str(tmp_path / "runs" / name) for name in CONFIGS}
    order = sorted([*CONFIGS, *CONFIGS]) if one_by_one else [*CONFIGS, *CONFIGS]
    assert ran == [(f"LLM of {name}", [], folders[name]) for name in order]
    assert runs == {
        name: [(name, tmp_path / "runs" / name / number) for number in ("1", "2")]
        for name in CONFIGS
    }


def test_systems_are_simulated_once_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran = []
    monkeypatch.setattr(compare, "simulate", lambda *given: ran.append(given))
    monkeypatch.setattr(compare, "read_run", read)
    runs = simulate_systems(CONFIGS, [], tmp_path)
    assert ran == [(config, [], tmp_path / "runs" / name) for name, config in CONFIGS.items()]
    assert runs == {name: [(name, tmp_path / "runs" / name / "1")] for name in CONFIGS}


def test_a_run_records_the_workload_that_it_served(tmp_path: Path) -> None:
    """The first file's; a predictor stays a file's own."""
    base = {
        "model": "llama-3-8b",
        "groups": {"g": {"kind": "A10"}},
        "instances": {"i": {"group": "g"}},
    }
    predictor = {"granularity": 100, "accuracy": 1.0}
    a, b, c = (
        as_run_file(base | {"workload": workload})
        for workload in (
            {"synthetic": "azure_code", "limit": 2},
            {"synthetic": "azure_conversation", "limit": 3, "predictor": predictor},
            {"synthetic": "azure_conversation", "limit": 1},
        )
    )
    for served in (a, c):
        work, folder = served.requests(), tmp_path / str(served.workload.limit)
        runs = simulate_systems({"first": served, "b": b}, work, folder)
        for name, own in (("first", None), ("b", predictor)):
            (run,) = runs[name]
            recorded = as_run_file(run.run["run_file"])
            assert recorded.requests() == work
            assert digest(work) == tuple(run.run["workload"][k] for k in ("requests", "sha256"))
            assert (recorded.workload.predictor is not None) == bool(own)


def settled(settings: list[str]) -> Any:
    return load_run_file(None, ["workload.synthetic=azure_code", *settings]).workload


def test_settings_of_a_workload() -> None:
    """A trace takes the place of what a run file has, and a limit may stand alone."""
    given = settled(workload_settings("a.csv", 7))
    assert (given.trace, given.synthetic, given.limit) == ("a.csv", None, 7)
    given = settled(workload_settings(None, 7))
    assert (given.trace, given.limit) == (None, 7)
    assert given.synthetic.lengths == "azure_code"
    assert settled(workload_settings(None, None)).limit is None


def test_what_is_refused_is_what_was_given() -> None:
    refuse("for others", {"--a": None, "--b": False, "--c": ()})
    with pytest.raises(JaxinferError, match=r"^--b is for others$"):
        refuse("for others", {"--a": None, "--b": 3, "--c": True})


def compared(files: list[str], out: Path, rounds: int, *more: str) -> None:
    """Run the compare command; without rounds, simulate."""
    how = ["--rounds", str(rounds)] if rounds else ["--simulate"]
    with command.make_context("compare", [*files, "--out", str(out), *how, *more]) as context:
        command.invoke(context)


@pytest.mark.parametrize("rounds", [0, 1, 2])
def test_what_is_compared_and_where_it_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rounds: int
) -> None:
    """The first file's workload, with the settings, under all; without rounds, simulated."""
    for name, lengths in (("a", "azure_code"), ("b", "azure_conversation")):
        text = f"model: {name}\nworkload: {{synthetic: {{lengths: {lengths}, count: 5}}}}\n"
        (tmp_path / f"{name}.yaml").write_text(text)
    files, out = [str(tmp_path / f"{name}.yaml") for name in "ab"], tmp_path / "out"
    calls: list[Any] = []

    def real(configs: Any, work: Any, folder: Path, count: int, one_by_one: bool = False) -> Any:
        calls.append((configs, work, folder, count))
        return {}

    def modelled(configs: Any, work: Any, folder: Path) -> Any:
        return real(configs, work, folder, 0)

    monkeypatch.setattr(compare, "compare_systems", real)
    monkeypatch.setattr(compare, "simulate_systems", modelled)
    monkeypatch.setattr("jaxinfer.report.comparison.comparison_table", str)
    monkeypatch.setattr(
        "jaxinfer.report.comparison.write_comparison",
        lambda runs, folder, command, pictures: [folder],
    )
    compared(files, out, rounds, "--limit", "3", "--set", "engine.seed=4")
    ((configs, work, folder, count),) = calls
    assert {name: config.engine.seed for name, config in configs.items()} == {"a": 4, "b": 4}
    first = load_run_file(files[0], ["workload.limit=3"])
    assert work == first.requests()
    assert [config.workload for config in configs.values()] == [first.workload] * 2
    assert len(work) == 3
    assert (folder, count) == (out, rounds)
    assert out.is_dir()


def test_a_replaced_system_gives_its_name(tmp_path: Path) -> None:
    """The label of tables, pictures and folders is not that of the file, which is another's."""
    for name in ("disaggregated", "low_high"):
        (tmp_path / f"{name}.yaml").write_text("system: single\n")
    (tmp_path / "turns.yaml").write_text("system: {name: least_loaded, choose: turns}\n")
    files = [str(tmp_path / f"{name}.yaml") for name in ("disaggregated", "low_high", "turns")]
    first = files[0]
    assert list(load_systems([first], [], ["system=least_loaded"])) == ["least_loaded"]
    assert list(load_systems([first], [], ["system.name=least_loaded"])) == ["least_loaded"]
    own = "jaxinfer.systems.least_loaded:LeastLoaded"
    assert list(load_systems([first], [], [f"system={own}"])) == ["LeastLoaded"]
    for settings in ([], ["system=single"], ["system={name: single}"], ["engine.seed=3"]):
        assert list(load_systems([first], [], settings)) == ["disaggregated"]
    # Several clusters under one new system, one of which had it before.
    found = load_systems(files, [], ["system=least_loaded"])
    assert list(found) == ["least_loaded_disaggregated", "least_loaded_low_high", "turns"]
    assert {config.system["name"] for config in found.values()} == {"least_loaded"}


FAILURES = [JaxinferError("no such GPU"), ZeroDivisionError(), KeyboardInterrupt()]


@pytest.mark.parametrize("existed", [False, True])
@pytest.mark.parametrize("failure", FAILURES, ids=lambda each: type(each).__name__)
@pytest.mark.parametrize("rounds", [0, 2])
@pytest.mark.parametrize("at", ["runs", "pictures"])
def test_what_fails_leaves_the_folder_as_it_was(
    at: str,
    rounds: int,
    failure: BaseException,
    existed: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """So that the command put right finds it new; but what has run stays."""
    out = tmp_path / "out"
    if existed:
        out.mkdir()

    def run(configs: Any, work: Any, folder: Path, *_: Any, **__: Any) -> dict[str, Any]:
        path = folder / "runs" / "a" / "1"
        path.mkdir(parents=True)
        status = "running" if at == "runs" else "finished"
        (path / "run.json").write_text(json.dumps({"status": status}, indent=2))
        if at == "runs":
            raise failure
        return {}

    def write(runs: Any, folder: Path, *_: Any) -> None:
        (folder / "throughput.png").write_bytes(b"half")
        raise failure

    (tmp_path / "a.yaml").write_text("workload: {synthetic: azure_code}\n")
    monkeypatch.setattr(compare, "compare_systems" if rounds else "simulate_systems", run)
    monkeypatch.setattr(comparison, "comparison_table", lambda runs: "")
    monkeypatch.setattr(comparison, "write_comparison", write)
    mended = at == "pictures" and isinstance(failure, Exception)
    with pytest.raises(JaxinferError if mended else type(failure)) as caught:
        compared([str(tmp_path / "a.yaml")], out, rounds)
    if mended:
        assert str(caught.value).startswith(f"{out}: all runs are there, under runs, but not all ")
    if at == "pictures":
        assert (out / "runs" / "a" / "1" / "run.json").is_file()
    else:
        assert out.exists() == existed
        assert not existed or not list(out.iterdir())


def test_all_systems_have_the_first_files_workload_wherever_it_stands(tmp_path: Path) -> None:
    for name, count in (("a", 2), ("b", 3)):
        (tmp_path / f"{name}.yaml").write_text(
            f"workload: {{synthetic: azure_code, limit: {count}}}"
        )
    found = load_systems([str(tmp_path / "b.yaml")], ["a", "b"])
    assert [(name, config.workload.limit) for name, config in found.items()] == [("a", 3), ("b", 3)]


@pytest.mark.parametrize("existed", [False, True])
def test_a_replay_that_fails_leaves_the_folder_as_it_was(
    existed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    if existed:
        out.mkdir()

    def fail(real: Path, runs: Path) -> None:
        (runs / "1").mkdir(parents=True)
        raise JaxinferError("no profile")

    monkeypatch.setattr("jaxinfer.lab.validate.replay.replay", fail)
    arguments = ["run", "--out", str(out)]
    with (
        replay.make_context("replay", arguments) as context,
        pytest.raises(JaxinferError, match="no profile"),
    ):
        replay.invoke(context)
    assert out.exists() == existed
    assert not existed or not list(out.iterdir())
