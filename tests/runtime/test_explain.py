"""Words of ``explain`` against the arrays that an engine then has; and ``compare``."""

import json
from pathlib import Path

import jax
import pytest
from checkpoint_files import plan_alone
from click.testing import CliRunner

from jaxinfer import LLM, JaxinferError
from jaxinfer.checkpoints import open_tensors
from jaxinfer.checkpoints.checkpoint import open_checkpoint
from jaxinfer.commands.app import cli
from jaxinfer.config.engine import EngineOptions
from jaxinfer.config.run_file import as_run_file
from jaxinfer.lab import measure
from jaxinfer.runtime.explain import (
    collectives,
    longest_request,
    parameter_groups,
    step_costs,
    weight_bytes_per_device,
)
from jaxinfer.runtime.stage.stage_plan import StagePlan

TINY = {"page_size": 8, "num_pages": 65, "max_num_seqs": 4, "max_num_batched_tokens": 32}


def plan_for(folder: Path, **options: object) -> StagePlan:
    return plan_alone(
        open_checkpoint(str(folder)).config, EngineOptions.model_validate(TINY | options)
    )


def test_each_stage_of_a_run_file(tiny_folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(
        json.dumps(
            {
                "model": str(tiny_folder),
                "engine": TINY,
                "groups": {"a": {}, "b": {"devices": 2}},
                "instances": {
                    "alone": {"group": "b", "num_pages": 33},
                    "piped": {"stages": [{"group": "a", "layers": 2}]},
                },
            }
            | {"system": {"name": "cronus", "partial": "alone", "chunked": "piped"}}
        )
    )
    result = CliRunner().invoke(cli, ["explain", str(file)], catch_exceptions=False)
    assert result.exit_code == 0
    first, second = result.output.split("Instance piped, layers 0 to 1")
    assert "Instance alone, layers 0 to 1" in first
    assert "32 of 8 tokens" in first
    assert "2 x cpu" in first
    assert "64 of 8 tokens" in second
    assert "1 x cpu" in second


@pytest.mark.parametrize("devices", [1, 2, 3])
def test_bytes_are_those_of_the_arrays_that_are_loaded(
    tiny_folder: Path, uncompiled: None, devices: int
) -> None:
    plan = plan_for(tiny_folder, tensor_parallel_size=devices)
    llm = LLM(str(tiny_folder), progress=False, tensor_parallel_size=devices, **TINY)  # type: ignore[arg-type]
    worker = llm.engine.worker
    leaves = jax.tree.leaves(worker.stages[0].parameters)
    first = [leaf.addressable_shards[0].data.nbytes for leaf in leaves]
    assert weight_bytes_per_device(plan) == sum(first)
    groups = parameter_groups(plan)
    assert sum(group.device_bytes for group in groups) == sum(first)
    assert sum(group.total_bytes for group in groups) == sum(leaf.nbytes for leaf in leaves)
    assert sum(group.count for group in groups) == len(leaves)
    assert plan.kv_bytes == sum(page.nbytes for page in jax.tree.leaves(worker.stages[0].kv))


def test_no_weight_is_read(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(open_tensors, "read_tensors", None)
    monkeypatch.setattr("jaxinfer.runtime.stage.load_weights.read_tensors", None)
    arguments = ["explain", "--model", str(tiny_folder)]
    for name, value in (TINY | {"tensor_parallel_size": 2}).items():
        arguments += ["--set", f"engine.{name}={value}"]
    result = CliRunner().invoke(cli, arguments, catch_exceptions=False)
    assert result.exit_code == 0
    for text in (
        "layers.*.mlp.down_FD",
        "64 of 8 tokens, 512 tokens",
        "longest request",
        "256 tok",
        "4 all-reduce",
    ):
        assert text in result.output
    (stage,) = json.loads(CliRunner().invoke(cli, [*arguments, "--json"]).stdout)["stages"]
    assert (stage["instance"], stage["layers"], stage["devices"]) == (None, [0, 1], 2)
    assert (stage["pages"], stage["page_size"], stage["longest_request"]) == (64, 8, 256)
    assert [step["shape"]["tokens"] for step in stage["steps"]] == [32, 4]
    assert stage["steps"][0]["collectives"] == {"all-reduce": [4, 4 * 32 * 32 * 4]}


def test_the_longest_request_is_the_models_or_the_pools(tiny_folder: Path) -> None:
    assert longest_request(plan_for(tiny_folder)) == 256
    # Nine pages of 8 entries; the last token has none.
    assert longest_request(plan_for(tiny_folder, num_pages=10)) == 73


def test_collectives_of_a_step(tiny_folder: Path) -> None:
    """Two all-reduces of [T, D] in float32 per layer on two devices, none on one."""
    assert all(cost.collectives == {} for cost in step_costs(plan_for(tiny_folder)))
    mixed, decodes = step_costs(plan_for(tiny_folder, tensor_parallel_size=2))
    assert (mixed.shape.tokens, decodes.shape.tokens) == (32, 4)
    assert mixed.collectives == {"all-reduce": (4, 4 * 32 * 32 * 4)}
    assert decodes.collectives == {"all-reduce": (4, 4 * 4 * 32 * 4)}
    assert mixed.temporary_bytes > 0


def test_collectives_are_counted_in_text() -> None:
    text = """
      %all-reduce.1 = f32[4,8]{1,0} all-reduce(%dot), channel_id=1
      %ag = (bf16[2,3]{1,0}, s32[5]{0}) all-gather-start(%a, %b), dimensions={0}
      %done = bf16[2,3]{1,0} all-gather-done(%ag)
      %all-reduce.2 = pred[] all-reduce(%c)
      %fusion = f32[9] fusion(%all-reduce.1), calls=%x
    """
    assert collectives(text) == {"all-reduce": (2, 4 * 8 * 4 + 1), "all-gather": (1, 12 + 20)}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_pages": 10**9}, "num_pages 1000000000 of 8 tokens takes"),
        ({"num_pages": None, "memory_fraction": 1e-12}, "memory_fraction 1e-12 leaves room for 0"),
    ],
)
def test_a_plan_that_does_not_fit(
    tiny_folder: Path, options: dict[str, object], message: str
) -> None:
    with pytest.raises(JaxinferError) as caught:
        plan_for(tiny_folder, **options)
    assert message in str(caught.value)
    assert "GiB are free" in str(caught.value)


def test_compare_puts_layouts_side_by_side(tiny_folder: Path, tmp_path: Path) -> None:
    whole = tmp_path / "whole.py"
    whole.write_text("RULES = ()")
    work = tmp_path / "work.jsonl"
    lines = ({"prompt_token_ids": [7] * n, "max_tokens": 4} for n in (5, 40))
    work.write_text("\n".join(map(json.dumps, lines)))
    out = tmp_path / "out.json"
    arguments = ["compare", "default", str(whole), "fsdp", "--model", str(tiny_folder)]
    arguments += ["--workload", str(work), "--output", str(out), "--rounds", "2"]
    for name, value in (TINY | {"tensor_parallel_size": 2}).items():
        arguments += ["--set", f"engine.{name}={value}"]
    result = CliRunner().invoke(cli, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    built_in, replicated, cut = records = json.loads(out.read_text())
    assert [record["layout"] for record in records] == ["default", str(whole), "fsdp"]
    # Seven matrices of each of two layers are gathered, beside activations.
    assert cut["largest_step"]["collectives"]["all-gather"][0] >= 2 * 7
    assert built_in["weight_bytes_per_device"] < replicated["weight_bytes_per_device"]
    assert built_in["largest_step"]["collectives"]["all-reduce"] == [4, 4 * 32 * 32 * 4]
    for number, record in enumerate(records, 1):
        assert len(record["wall_s"]) == 2
        assert 0 < record["decode_step_s"] < record["wall_s_median"]
        assert (tmp_path / "out.json.runs" / str(number) / "2" / "steps.jsonl").exists()
    assert "all-reduce" in result.output
    with pytest.raises(JaxinferError, match="exists; --force overwrites it"):
        CliRunner().invoke(cli, arguments, catch_exceptions=False)


def test_all_tables_are_read_before_a_model_is(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: list[str] = []
    monkeypatch.setattr(measure, "_load", lambda config, table: loaded.append(table))
    config = as_run_file({"model": str(tiny_folder)})
    with pytest.raises(JaxinferError, match=r"^layout none\.py: No such file"):
        measure.compare_layouts(config, ["default", "none.py"], [], "", str(tmp_path), 1)
    assert not loaded
