"""Run files of ``configs/gpu/``: what ``explain`` says of each where no GPU is."""

import json
from pathlib import Path
from typing import Any

import jax
import pytest
import yaml
from click.testing import CliRunner

from jaxinfer.commands.app import cli
from jaxinfer.config.resolve import resolve
from jaxinfer.config.run_file import load_run_file
from jaxinfer.runtime import explain
from jaxinfer.runtime.stage import cluster_plan, devices, stage_plan
from jaxinfer.runtime.stage.cluster_plan import divided_layers
from jaxinfer.runtime.stage.stage_plan import StagePlan
from jaxinfer.systems.registry import SYSTEMS

GPU = Path(__file__).parents[2] / "configs/gpu"
FILES = {path.stem: path for path in sorted(GPU.glob("*.yaml"))}
# All on one GPU; those with a process for each group see the same one.
ONE_CARD = {f"one_card/{path.stem}": path for path in sorted(GPU.glob("one_card/*.yaml"))}
# Of every so many layers of Llama 3.1 8B one is planned, which takes a second as against many.
FEWER = 8
LLAMA = json.loads((GPU / "smollm2-135m/config.json").read_text()) | {
    "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32 // FEWER, "num_attention_heads": 32, "num_key_value_heads": 8,
    "tie_word_embeddings": False,
}  # fmt: skip
EMBEDDING = 2 * 128256 * 4096
# The least memory that a GPU of a kind has, and what anything else is to be let off with.
GB = {"A100": 40, "A10": 24, None: 1000}


def with_fewer_layers(path: Path, folder: Path) -> Path:
    """Write a run file anew for the smaller model."""
    data: Any = yaml.safe_load(path.read_text())
    for instance in data["instances"].values():
        for stage in instance.get("stages", ()):
            if layers := stage.get("layers"):
                assert layers % FEWER == 0
                stage["layers"] = layers // FEWER
    folder.joinpath("config.json").write_text(json.dumps(LLAMA))
    data["model"] = str(folder)
    data["engine"] |= {"load_format": "dummy", "dtype": "bfloat16"}
    written = folder / path.name
    written.write_text(yaml.safe_dump(data))
    return written


@pytest.mark.parametrize("name", [*FILES, *ONE_CARD])
def test_each_can_be_explained_without_a_gpu(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CPU devices stand for GPUs of all kinds; nothing is compiled, and weights fit each kind."""
    plans: list[StagePlan] = []
    there = jax.devices("cpu")[: 1 if name in ONE_CARD else None]
    monkeypatch.setattr(devices, "_devices", lambda name, group: there)
    monkeypatch.setattr(stage_plan, "available_memory", lambda: 2**40)
    monkeypatch.setattr(cluster_plan, "measure_speed", lambda *args: 1.0)
    monkeypatch.setattr(explain, "step_costs", lambda plan: plans.append(plan) or [])
    path = with_fewer_layers((FILES | ONE_CARD)[name], tmp_path)
    resolved = resolve(load_run_file(path))
    cluster = resolved.cluster
    assert all({*pair} <= cluster.instances.keys() for pair in resolved.pairs)
    told = CliRunner().invoke(cli, ["explain", str(path)], catch_exceptions=False)
    assert told.exit_code == 0, told.output
    see_one = (
        sum(bool(group.process) for group in cluster.groups.values()) == 2 and name in ONE_CARD
    )
    assert ("the memory of GPUs that several processes see" in told.output) == see_one
    divided = divided_layers(cluster, LLAMA["num_hidden_layers"])
    planned = iter(plans)
    for instance, options in cluster.instances.items():
        places = [place for place in options.places for _ in range(options.segments)]
        here = [next(planned) for _ in places]
        assert told.output.count(f"Instance {instance}, layers ") == len(places)
        assert [plan.layers for plan in here] == divided.get(instance, [p.layers for p in here])
        assert (here[0].layers.first, here[-1].layers.last) == (True, True)
        for place in options.places:
            of = [plan for plan, at in zip(here, places, strict=True) if at == place]
            ends = EMBEDDING * sum(plan.layers.first + plan.layers.last for plan in of)
            weights = FEWER * (sum(plan.weight_bytes for plan in of) - ends) + ends
            assert weights < 0.8e9 * GB[cluster.groups[place.group].kind]
    assert next(planned, None) is None


def test_all_systems_have_one() -> None:
    assert {load_run_file(path).system["name"] for path in FILES.values()} == set(SYSTEMS)
