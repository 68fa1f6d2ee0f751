"""Files that ship: found by their names from any folder, one's own first; listed and copied."""

from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from jaxinfer import JaxinferError
from jaxinfer.checkpoints.modelled import model_shape
from jaxinfer.commands.app import cli
from jaxinfer.commands.batch_job import BatchJob
from jaxinfer.config.run_file import as_run_file, load_run_file
from jaxinfer.files.contents import contents
from jaxinfer.files.shipped import SHIPPED, data_path, shipped_files
from jaxinfer.hardware.catalogue import Catalogue
from jaxinfer.lab.plan.problem import load_problem
from jaxinfer.models.layout_files import load_layout
from jaxinfer.models.layouts import LAYOUTS
from jaxinfer.workload.batch_input import BatchFile
from jaxinfer.workload.lengths import read_workload

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "configs"


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_names_and_paths_of_a_checkout(elsewhere: Path) -> None:
    for name in ("cronus/cronus.yaml", "configs/cronus/cronus.yaml"):
        assert data_path(name) == SHIPPED / "cronus" / "cronus.yaml"
        assert load_run_file(name) == load_run_file(CONFIGS / "cronus" / "cronus.yaml")
    for name in ("none.yaml", "../configs/gpus.yaml", "/configs/gpus.yaml", "x" * 5000, "a\0b"):
        assert data_path(name) == Path(name)


def test_ones_own_files_come_first(elsewhere: Path) -> None:
    own = Path("cronus/cronus.yaml")
    own.parent.mkdir()
    own.write_text("model: mine\n")
    assert load_run_file(own).model == "mine"
    assert load_run_file("configs/cronus/cronus.yaml").model == "llama-3-8b"
    own.unlink()
    own.symlink_to("gone.yaml")  # One's own, too, though it leads nowhere.
    with pytest.raises(JaxinferError, match=r"run file cronus/cronus\.yaml: No such file"):
        load_run_file(own)


def test_what_is_nowhere_is_told(elsewhere: Path) -> None:
    with pytest.raises(JaxinferError) as caught:
        load_run_file("cronus/cronos.yaml")
    assert str(caught.value) == (
        "run file cronus/cronos.yaml: No such file or directory, nor among what ships (`jaxinfer "
        "configs` lists it), did you mean 'cronus/cronus.yaml'?"
    )
    with pytest.raises(JaxinferError, match=r"nor among what ships .* lists it\)$"):
        load_run_file("nothing-like-it.yml")
    with pytest.raises(JaxinferError, match=r"cannot read cpu/burst\.csv: .* 'cpu/bursts\.csv'\?$"):
        read_workload("cpu/burst.csv")
    with pytest.raises(JaxinferError, match=r"demo/promts\.jsonl: .* 'demo/prompts\.jsonl'\?$"):
        BatchFile("demo/promts.jsonl")
    with pytest.raises(JaxinferError, match=r"x\.yaml: No such file or directory$"):
        load_run_file(elsewhere / "x.yaml")


def test_all_kinds_of_files_are_found(elsewhere: Path) -> None:
    """Relative names in what ships, too, and those that a command's options give."""
    assert len(load_run_file("modelled/flips.yaml").requests()) > 100
    assert load_problem("plan/replan.yaml").work
    assert load_run_file("splitwise/hh.yaml").cluster()
    with BatchFile("configs/demo/prompts.jsonl") as prompts:
        assert len(prompts.number_of) == 20
    assert load_layout("sharding/vocabulary.py").parameters[1:] == LAYOUTS["megatron"].parameters
    assert model_shape("gpu/smollm2-135m", Catalogue({}, {})).num_hidden_layers == 30
    listed = {"trace": "configs/cpu/bursts.csv", "system": "cronus"}
    assert list(contents(listed)) == [str(SHIPPED / "cpu" / "bursts.csv")]


def test_a_file_of_ones_home_is_found_and_one_that_is_closed_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace = tmp_path / "mine.csv"
    trace.write_text("1,2,3\n")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert list(contents({"trace": "~/mine.csv"})) == [str(trace)]
    trace.write_bytes(b"1,2,3,4\n")  # Not the one whose digest is known.
    monkeypatch.setattr(Path, "open", _closed)
    assert contents({"trace": "~/mine.csv"}) == {}


def _closed(path: Path, mode: str = "r") -> None:
    raise PermissionError(13, "Permission denied", str(path))


def test_a_batch_that_ships_goes_on(elsewhere: Path) -> None:
    """The output is there the second time, and is looked at beside its input."""
    config = load_run_file("demo/unlike.yaml")
    for _ in range(2):
        with BatchJob.open(config, "configs/demo/prompts.jsonl", "out.jsonl", False) as job:
            assert (job.num_lines, job.num_resumed) == (20, 0)


def test_modules_of_ones_own(elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Alone, or, since it may import them, with those beside it."""
    monkeypatch.syspath_prepend(str(elsewhere))
    for name in ("shipped_mine", "helper"):
        Path(f"{name}.py").write_text("")
    mine, helper = str(elsewhere / "shipped_mine.py"), str(elsewhere / "helper.py")
    assert list(contents({"system": "shipped_mine:Mine"})) == [helper, mine]
    assert list(contents({"system": "shipped_mine:Mine"}, beside=False)) == [mine]


def test_every_run_file_is_found_and_is_itself_again(elsewhere: Path) -> None:
    """A part as ``run.json`` has it: the options that were set, as JSON values."""
    found = 0
    for name in shipped_files():
        data = yaml.safe_load((SHIPPED / name).read_text()) if name.endswith(".yaml") else None
        if not isinstance(data, dict) or not {"model", "instances"} & data.keys():
            continue
        config = load_run_file(name)
        assert as_run_file(config.model_dump(mode="json", exclude_unset=True)) == config, name
        found += 1
    assert found > 50


def test_the_list_has_all_with_a_line_each() -> None:
    files = {str(p.relative_to(CONFIGS)) for p in CONFIGS.rglob("*") if p.is_file()}
    files = {name for name in files if not name.endswith(".pyc")}
    assert files == set(shipped_files())
    tables = {name for name in files if name.endswith(".npz")}
    cards = {name.rpartition("/vllm/")[0] for name in tables}
    wanted = files - tables | cards
    run = CliRunner().invoke(cli, ["configs"], env={"COLUMNS": "400"}, catch_exceptions=False)
    lines = dict(line.split(maxsplit=1) for line in run.output.splitlines() if " " in line)
    assert sorted(line.split()[0] for line in run.output.splitlines()) == sorted(wanted)
    assert lines["cronus/cronus.yaml"].startswith("Cronus as its paper runs it (section 5.1):")
    assert lines["cpu/bursts.csv"] == "arrived_at,num_prefill_tokens,num_decode_tokens"
    said = "Tables of operators of vllm 0.14.0 and vllm 0.19.0."
    assert lines["operators/h100_sxm"] == said
    silent = {name for name in wanted if name.endswith("config.json")}  # A model's.
    assert wanted - lines.keys() <= silent


def test_what_is_copied_out(elsewhere: Path) -> None:
    def copy(*given: str) -> str:
        run = CliRunner().invoke(cli, ["configs", "copy", *given], catch_exceptions=False)
        return run.output.strip()

    count = len(list((CONFIGS / "cronus").iterdir()))
    assert copy("cronus", "new/mine") == f"{count} files: new/mine"
    for path in (CONFIGS / "cronus").iterdir():
        assert (elsewhere / "new" / "mine" / path.name).read_bytes() == path.read_bytes()
    assert copy("configs/demo/demo.yaml", "new") == "1 file: new/demo.yaml"
    assert copy("demo/demo.yaml", "other.yaml") == "1 file: other.yaml"
    Path("empty").mkdir()
    assert copy("configs", "empty") == f"{len(list(shipped_files()))} files: empty"
    for given, message in (
        (("cronus", "new"), "new exists, must be a new name"),
        (("demo/demo.yaml", "new"), "new/demo.yaml exists, must be a new name"),
        (("demo/demo.yaml", "other.yaml"), "other.yaml exists, must be a new name"),
        (
            ("cronsu", "x"),
            "cronsu: is not among what ships (`jaxinfer configs` lists it), did you mean 'cronus'?",
        ),
        (
            ("../jaxinfer", "x"),
            "../jaxinfer: is not among what ships (`jaxinfer configs` lists it)",
        ),
    ):
        with pytest.raises(JaxinferError) as caught:
            copy(*given)
        assert str(caught.value) == message
    assert not Path("x").exists()
