"""Tables that ship: their names, what they are of, and times that a card can have."""

import numpy as np
import pytest

from jaxinfer import JaxinferError
from jaxinfer.config.costs import SimulateOptions
from jaxinfer.config.published import PublishedTables, shipped_tables
from jaxinfer.config.stage_part import StagePart
from jaxinfer.files.shipped import SHIPPED
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
        folder="operators", backend="vllm", version="0.19.0", card="h100_sxm"
    )
    assert SimulateOptions(tables="elsewhere").tables == "elsewhere"


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


def test_files_are_small_and_in_order() -> None:
    for folder in (SHIPPED / "operators").iterdir():
        if folder.is_dir():
            files = list(folder.rglob("*.npz"))
            assert sum(path.stat().st_size for path in files) < 300_000
            for path in files:
                with np.load(path) as arrays:
                    assert (arrays["latency"] > 0).all()
                    assert (arrays["latency"] < 1_000).all()
