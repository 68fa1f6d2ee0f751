"""The command from end to end, and compiled layers of tiny models beside closed forms."""

import csv
import json
from pathlib import Path

import jax
import numpy as np
import pytest
from click.testing import CliRunner
from jax.sharding import Mesh

from jaxinfer.checkpoints.modelled import model_shape
from jaxinfer.commands.app import cli
from jaxinfer.config.run_file import load_run_file
from jaxinfer.hardware.catalogue import Catalogue, ModelShape, find_gpu
from jaxinfer.lab.sharding import targets
from jaxinfer.lab.sharding.expert_products import expert_products
from jaxinfer.lab.sharding.hlo import counts
from jaxinfer.lab.sharding.layer import Program
from jaxinfer.lab.sharding.study import alike, closed_forms, study
from jaxinfer.lab.sharding.targets import CompileTarget
from jaxinfer.models.layout_files import load_layout
from jaxinfer.models.layouts import LAYOUTS
from jaxinfer.sharding.dataflow import layer_flow
from jaxinfer.sharding.shapes import padded
from scripts.validate.sharding import question

TINY = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "hidden_size": 64,
    "moe_intermediate_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "vocab_size": 64,
    "num_experts": 8,
    "num_experts_per_tok": 2,
}


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A tiny mixture's config.json, and a home of its own for what is kept."""
    monkeypatch.setenv("HOME", str(tmp_path))
    path = tmp_path / "tiny" / "config.json"
    path.parent.mkdir()
    path.write_text(json.dumps(TINY))
    return str(path)


@pytest.mark.slow
def test_tables_pictures_and_run_files(model: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    call = ["shard", "--model", model, "--mesh", "x=2,y=2", "--card", "h100", "--search"]
    call += ["--layouts", "megatron,weight_gathered", "--tokens", "64", "--sequences", "8"]
    call += ["--context", "64", "--link", "y=20", "--out", str(out)]
    result = CliRunner().invoke(cli, call, catch_exceptions=False)
    assert result.exit_code == 0
    assert "of H100-SXM, bfloat16" in result.output
    rows = list(csv.DictReader((out / "layouts.csv").open()))
    assert {row["layout"] for row in rows} == {
        "megatron",
        "weight_gathered",
        "search_prefill",
        "search_decode",
    }
    for row in rows:
        assert row["layout"].startswith("search_") or row["equal"] == "True", row
        assert row["fits"] == "True"
    by_phase = {(row["layout"], row["phase"]): float(row["seconds"]) for row in rows}
    for phase in ("prefill", "decode"):
        fastest = min(s for (_, of), s in by_phase.items() if of == phase)
        assert by_phase[f"search_{phase}", phase] == fastest
        part = load_run_file(out / f"{phase}.yaml")
        assert part.groups[phase].mesh == {"x": 2, "y": 2}
        load_layout(part.engine.layout)
    assert (out / "seconds.png").stat().st_size > 10_000
    # What has been compiled is kept: no compiler is asked again.
    again = [*call[:-1], str(tmp_path / "again")]
    kept = CliRunner().invoke(cli, [*again, "--json"], catch_exceptions=False)
    assert "0 of 0" in kept.stderr
    found = json.loads(kept.stdout)["layouts"]
    assert [each["seconds"] for each in found] == [float(row["seconds"]) for row in rows]
    assert [each["weight_bytes"] for each in found] == [int(row["weight_bytes"]) for row in rows]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--mesh", "x=2,y"], "--mesh x=2,y: 'y': must be axes and sizes, as x=4,y=2"),
        (["--mesh", "x=0"], "--mesh x=0: axis x has 0 devices, must be 1 or more"),
        (["--mesh", "x=2,x=2"], "--mesh x=2,x=2: axis x is given twice"),
        (["--mesh", "x=\u00b2"], "--mesh x=\u00b2: 'x=\u00b2': must be axes and sizes, as x=4,y=2"),
        (["--mesh", "x=2", "--for", "cpu:4"], "--for cpu:4: 4 devices, --mesh x=2 has 2"),
        (["--mesh", "x=2", "--for", "cpu"], "--for cpu: must be such as cpu:8, h100:8 or v5e:2x4"),
        (["--mesh", "x=2", "--for", "tpu:2"], "--for tpu:2: no kind 'tpu': known: cpu, h100, "),
        (["--mesh", "x=2", "--link", "y=2"], "--link y=2: no axis 'y', --mesh has x"),
        (["--mesh", "x=2", "--link", "x=0"], "--link x=0: must be 10^9 bytes per second, as x=50"),
        (["--mesh", "x=2", "--network", "0"], "--network 0: must be 10^9 bytes per second, as 50"),
        (
            ["--mesh", "x=2", "--card", "L4", "--network", "9"],
            "--network 9: L4 has no domains: add --domain 8",
        ),
        (
            ["--mesh", "x=2", "--card", "TPU-v4", "--domain", "2"],
            "--domain, --network: TPU-v4 has a torus: --link AXIS=GB_S",
        ),
        (["--mesh", "x=2", "--layouts", "fsdp,,megatron"], "--layouts fsdp,,megatron: a name is"),
        (["--mesh", "x=2", "--layouts", "fsdp,fsdp"], "--layouts fsdp,fsdp: 'fsdp' is given twice"),
        (["--mesh", "x=2", "--card", "h1"], "--card h1: kind: no GPU 'h1'"),
        (["--mesh", "x=2", "--search"], "--search writes files to --out, which is missing"),
        (["--mesh", "x=2", "--layouts", "mega"], "layout mega: "),
    ],
)
def test_mistakes_are_told_in_a_line(model: str, options: list[str], message: str) -> None:
    result = CliRunner().invoke(cli, ["shard", "--model", model, *options])
    assert str(result.exception).startswith(message)
    assert "\n" not in str(result.exception)


@pytest.mark.parametrize(
    ("target", "found", "message"),
    [
        ("h100:2", (), "--for h100:2: needs XLA for CUDA: pip install 'jax[cuda12]'"),
        ("v5e:1x2", (), "--for v5e:1x2: needs XLA for TPUs: pip install libtpu"),
        ("v99:1x2", ("libtpu",), "--for v99:1x2: kind: no GPU 'TPU-v99'"),
    ],
)
def test_what_is_missing_is_said_before_anything_is_compiled(
    model: str,
    target: str,
    found: tuple[str, ...],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(targets, "find_spec", lambda name: name if name in found else None)
    call = ["shard", "--model", model, "--mesh", "x=2", "--for", target]
    result = CliRunner().invoke(cli, call)
    assert str(result.exception).startswith(message)
    assert "compiling" not in result.output


@pytest.mark.parametrize(
    ("text", "devices", "card"),
    [("cpu:8", 8, "H100-SXM"), ("A100:4", 4, "A100-80G-SXM"), ("v5e:2x4", 8, "TPU-v5e")],
)
def test_what_is_compiled_for_is_a_card_of_the_catalogue(
    text: str, devices: int, card: str
) -> None:
    target = CompileTarget.read(text)
    assert (target.devices, target.card, str(target)) == (devices, card, text.lower())
    assert find_gpu(card).bf16_tflops > 100


@pytest.mark.parametrize(
    ("target", "columns", "module"),
    [
        ("cpu:8", 96, "jaxinfer.pallas_kernels.numba_grouped"),
        ("h100:8", 96, "jaxinfer.pallas_kernels.grouped"),
        ("h100:8", 8, "jaxinfer.lab.sharding.expert_products"),
        ("v5e:2x4", 96, "jaxinfer.lab.sharding.expert_products"),
    ],
)
def test_experts_are_compiled_as_engines_multiply(target: str, columns: int, module: str) -> None:
    """But where engines have no kernels: on TPUs, and on GPUs for eight columns."""
    pytest.importorskip("numba")
    found = expert_products(CompileTarget.read(target), np.dtype("float32"), 2048, columns).matmul
    assert getattr(found, "func", found).__module__ == module


@pytest.mark.parametrize("layout", ["weight_stationary_2d", "weight_gathered", "expert_all_to_all"])
def test_a_compiled_mixture_is_as_closed_forms_say(model: str, layout: str) -> None:
    """Experts, gathered weights, reduced and scattered sums: on this process's devices."""
    tokens, target = 64, CompileTarget("cpu", (8,))
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(2, 4), ("x", "y"))
    table = LAYOUTS[layout]
    shape = padded(model_shape(str(Path(model).parent), Catalogue()), table, dict(mesh.shape))
    program = Program(shape, table, mesh, 16, np.dtype("float32"), target)
    with jax.set_mesh(mesh):
        lowered = jax.jit(program.layer).lower(*program.layer_arguments(tokens, False))
    compiled = lowered.compile()
    flow = layer_flow(shape, table, dict(mesh.shape), tokens)
    closed, _ = closed_forms(flow.collectives, target)
    assert alike(counts(compiled.as_text() or ""), closed)


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.slow
def test_compiled_layers_are_as_closed_forms_say(gated: bool, tmp_path: Path) -> None:
    """Layers are of dense models in all layouts; mixtures are above."""
    shape = ModelShape(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=8,
        vocab_size=64,
        gated=gated,
    )
    for mesh in ("1x8", "2x4"):
        for found in study(question(shape, mesh, 64, 16, 32), LAYOUTS, tmp_path)[0]:
            assert found.equal, (mesh, found)
