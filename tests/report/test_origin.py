"""Origin of a run, as ``run.json`` records it."""

import hashlib
import json
import os
import subprocess
import sys
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

import jaxinfer
from jaxinfer.config.run_file import as_run_file, load_run_file
from jaxinfer.files.shipped import SHIPPED
from jaxinfer.report import origin
from jaxinfer.report.run_folder import RunFolder
from jaxinfer.workload.lengths import BenchRequest

ROOT = Path(__file__).parents[2]


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_the_inputs_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run file as it was resolved, all of its workload's options, and each file's digest."""
    monkeypatch.chdir(tmp_path)
    Path("mine.csv").write_text("num_prefill_tokens,num_decode_tokens\n7,3\n9,2\n")
    settings = ["workload.trace=mine.csv", "workload.arrivals={kind: poisson, rate: 2.0}"]
    config = load_run_file("modelled/least_loaded.yaml", [*settings, "workload.synthetic="])
    work = config.requests()
    found = origin.asked_for(config, work, origin.FACTS)
    assert as_run_file(found["run_file"]) == config
    workload = found["workload"]
    assert workload["arrivals"].items() >= {"kind": "poisson", "rate": 2.0, "seed": 0}.items()
    assert (workload["trace"], workload["requests"]) == ("mine.csv", 2)
    assert found["files"] == {
        "mine.csv": sha256(Path("mine.csv")),
        "configs/gpus.yaml": sha256(ROOT / "configs" / "gpus.yaml"),
        "configs/models.yaml": sha256(ROOT / "configs" / "models.yaml"),
    }
    assert json.loads(json.dumps(found)) == found
    # Draws have a seed, and the percentiles that they are from.
    drawn = load_run_file("cronus/cronus.yaml", ["workload.synthetic=azure_code"])
    found = origin.asked_for(drawn)
    assert found["workload"]["synthetic"] == {"lengths": "azure_code", "count": 1000, "seed": 0}
    assert list(found["files"]) == ["configs/lengths.yaml"]


def test_facts_are_those_that_ship(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the files that ship are facts; a user's file of the same name is not."""
    monkeypatch.chdir(tmp_path)
    Path("configs").mkdir()
    names = ("gpus", "models", "lengths")
    for name in names:
        Path(f"configs/{name}.yaml").write_text("{}")
    config = as_run_file({"workload": {"synthetic": "azure_code"}})
    found = origin.asked_for(config, facts=origin.FACTS)["files"]
    shipped = {f"configs/{name}.yaml": SHIPPED / f"{name}.yaml" for name in names}
    assert found == {name: sha256(path) for name, path in shipped.items()}
    assert {name: origin.recorded_path(name) for name in found} == shipped
    Path("configs/mine.csv").write_text("1")
    assert origin.recorded_path("configs/mine.csv") == Path("configs/mine.csv")


def test_any_other_request_has_another_digest() -> None:
    work = [BenchRequest(None, 7, 3, 0.0), BenchRequest([1, 2], 2, 3, 0.5)]
    others = [
        [BenchRequest(None, 7, 3, 0.0)],
        [work[1], work[0]],
        [work[0], BenchRequest([1, 3], 2, 3, 0.5)],
        [work[0], BenchRequest([1, 2], 2, 3, 0.5000001)],
        [work[0], BenchRequest([1, 2], 2, 4, 0.5)],
    ]
    assert origin.digest(work) == origin.digest(list(work))
    assert len({origin.digest(each)[1] for each in [work, *others]}) == 6
    assert origin.digest(work)[0] == 2


def test_of_a_batch_and_of_weights_there_is_no_digest(tmp_path: Path) -> None:
    """The one is digested as it is read, the other may take minutes."""
    for name in ("in.jsonl", "w.gguf"):
        (tmp_path / name).write_text("x")
    data = {
        "model": str(tmp_path / "w.gguf"),
        "workload": {"input": str(tmp_path / "in.jsonl"), "output": str(tmp_path / "in.jsonl")},
    }
    assert origin.files_of(data) == {}
    assert data["workload"]["input"], "what is given stays as it is"  # type: ignore[index]


def test_code_machine_and_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/usr/bin/jaxinfer", "simulate", "a b.yaml", "--limit", "3"])
    before = datetime.now(UTC).replace(microsecond=0)
    with RunFolder(tmp_path, {"model": "m"}) as made:
        run = json.loads((made.path / "run.json").read_text())
    assert run["command"] == "jaxinfer simulate 'a b.yaml' --limit 3"
    assert before <= datetime.fromisoformat(run["started"]) <= datetime.now(UTC)
    assert run["folder"] == os.getcwd()
    assert run["versions"]["jaxinfer"] == jaxinfer.__version__
    assert run["versions"]["numpy"] == version("numpy")
    assert set(run["versions"]) == {"jaxinfer", *origin.PACKAGES}
    assert run["python"] == sys.version.split()[0]
    assert (run["machine"]["cores"], run["model"]) == (os.cpu_count(), "m")
    assert run["machine"]["cpu"]


def test_a_package_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(origin, "PACKAGES", ("numpy", "no-such-package"))
    origin.versions.cache_clear()
    try:
        assert origin.versions()["no-such-package"] is None
    finally:
        origin.versions.cache_clear()


@pytest.mark.parametrize(
    ("argv", "command"),
    [
        (["/x/jaxinfer/__main__.py", "run", "a.yaml"], "jaxinfer run a.yaml"),
        (["scripts/mine.py"], "mine.py"),
        ([""], "python"),
        ([], "python"),
    ],
)
def test_the_command(argv: list[str], command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", argv)
    assert origin.command_line() == command


def test_the_commit_is_the_checkouts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The commit is that of the code's own folder, changed or not; None outside a checkout."""

    def git(*words: str) -> str:
        identity = ("-c", "user.name=a", "-c", "user.email=a@b")
        run = ["git", "-C", str(tmp_path), *identity, *words]
        return subprocess.run(run, capture_output=True, text=True, check=True).stdout.strip()

    def found() -> Any:
        origin.checkout.cache_clear()
        return origin.checkout()

    module = tmp_path / "jaxinfer" / "__init__.py"
    module.parent.mkdir()
    module.write_text("")
    monkeypatch.setattr(origin.jaxinfer, "__file__", str(module))
    try:
        assert found() == (None, None)
        git("init", "-q")
        assert found() == (None, None)  # Nothing was committed.
        git("add", ".")
        git("commit", "-qm", "one")
        git("tag", "v9")
        head = git("rev-parse", "HEAD")
        assert found() == (head, False)
        (tmp_path / "new.txt").write_text("not the code's")
        assert found() == (head, False)
        module.write_text("changed = 1\n")
        assert found() == (head, True)
        monkeypatch.setenv("PATH", "")
        assert found() == (None, None)
    finally:
        origin.checkout.cache_clear()


def test_the_version_has_one_source() -> None:
    assert version("jaxinfer") == jaxinfer.__version__
    citation = (ROOT / "CITATION.cff").read_text()
    assert f"\nversion: {jaxinfer.__version__}\n" in citation
    assert f"\n## [{jaxinfer.__version__}]" in (ROOT / "CHANGELOG.md").read_text()
    code = "import sys, jaxinfer; jaxinfer.__version__; print(len(sys.modules))"
    plain = "import sys, importlib, typing; print(len(sys.modules))"
    counts = [
        int(subprocess.check_output([sys.executable, "-c", each], cwd=ROOT))
        for each in (code, plain)
    ]
    assert counts[0] - counts[1] <= 3, "importing jaxinfer stays light"
