"""Tables that ship: their names, what they are of, and times that a card can have."""

from pathlib import Path

import numpy as np
import pytest

from jaxinfer import JaxinferError
from jaxinfer.config.costs import SimulateOptions
from jaxinfer.config.published import PublishedTables, shipped_tables
from jaxinfer.config.stage_part import StagePart
from jaxinfer.files.contents import contents
from jaxinfer.files.shipped import OPERATORS, data_path
from jaxinfer.hardware.catalogue import find_gpu, find_model
from jaxinfer.serving.batch import Work
from jaxinfer.simulate.costs import kept_operators
from jaxinfer.simulate.costs.model import make_stage

KINDS = {"a100": "A100-80G-SXM", "h100": "H100-SXM", "h200": "H200", "l40s": "L40S"}


@pytest.fixture(autouse=True)
def kept(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    monkeypatch.setattr(kept_operators, "FOLDER", tmp_path_factory.mktemp("kept"))


def part(kind: str, devices: int = 1) -> StagePart:
    model = find_model("llama-3.1-8b")
    layers = model.num_hidden_layers
    return StagePart(find_gpu(kind), kind, model, layers, 1.0, True, True, devices, 2, 2)


@pytest.mark.parametrize("name", KINDS)
def test_steps_are_no_quicker_than_the_card(name: str) -> None:
    """A decode reads all weights, a prompt computes with them; both below four times as long."""
    stage, gpu = make_stage(part(KINDS[name]), SimulateOptions(tables=name)), find_gpu(KINDS[name])
    weights = 2 * (part(KINDS[name]).model.parameters(32, False, True))
    read_s = weights / (gpu.memory_gb_s * 1e9)
    decode = stage.seconds(Work(1, 1, 1, 1, 500, [], 1))
    assert read_s < decode < 2 * read_s
    compute_s = 2048 * 2 * part(KINDS[name]).model.parameters(32, False, False)
    compute_s /= gpu.bf16_tflops * 1e12
    prompt = stage.seconds(Work(2048, 0, 1, 1, 0, [(0, 2048)]))
    assert compute_s < prompt < 4 * compute_s


def test_a_name_stands_for_a_card_and_an_engine() -> None:
    assert shipped_tables().keys() == KINDS.keys()
    found = SimulateOptions(tables="h100").tables
    assert found == PublishedTables(
        folder="configs/operators", backend="vllm", version="0.19.0", card="h100_sxm"
    )
    assert SimulateOptions(tables="elsewhere").tables == "elsewhere"


def test_a_folder_of_that_name_is_not_taken_for_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "operators").mkdir()
    monkeypatch.chdir(tmp_path)
    found = SimulateOptions(tables="h100").tables
    assert isinstance(found, PublishedTables)
    assert data_path(found.folder) == OPERATORS


def test_what_ships_by_a_name_counts_in_digests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    files = {str(path) for path in OPERATORS.rglob("*") if path.suffix in (".npz", ".yaml")}
    assert len(files) == 21
    assert contents({"simulate": {"tables": "h100"}}).keys() == files


@pytest.mark.parametrize(
    ("tables", "kind", "message"),
    [
        ("h200", "H100-SXM", "h200_sxm is of H200, the group has H100-SXM"),
        ("h20", "H100-SXM", "h20: no such folder, and none that ships: a100, h100, h200, l40s"),
    ],
)
def test_tables_of_others_are_refused(tables: str, kind: str, message: str) -> None:
    with pytest.raises(JaxinferError) as error:
        make_stage(part(kind), SimulateOptions(tables=tables))
    assert message in str(error.value)


def test_files_are_small_and_have_milliseconds() -> None:
    for folder in OPERATORS.iterdir():
        if folder.is_dir():
            files = list(folder.rglob("*.npz"))
            assert sum(path.stat().st_size for path in files) < 300_000
            for path in files:
                with np.load(path) as arrays:
                    assert (arrays["latency"] > 0).all()
                    assert (arrays["latency"] < 1_000).all()
