"""KV cut by sequences and by the tokens of each: bytes, collectives, and what attention gives."""

from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from jaxinfer.errors import JaxinferError
from jaxinfer.hardware.catalogue import ModelShape, find_gpu, find_model
from jaxinfer.lab.sharding.hlo import counts
from jaxinfer.lab.sharding.layer import Program
from jaxinfer.lab.sharding.study import alike, closed_forms
from jaxinfer.lab.sharding.targets import CompileTarget
from jaxinfer.models.layouts import ALL, LAYOUTS, PRICED, Layout, Rule
from jaxinfer.sharding.collectives import Collective
from jaxinfer.sharding.costs import LayoutFlow, at_peaks
from jaxinfer.sharding.dataflow import layer_flow
from jaxinfer.sharding.shapes import padded

LLAMA, V5E = find_model("llama-3-70b"), find_gpu("TPU-v5e")
TINY = ModelShape(
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=8,
    num_key_value_heads=4,
    vocab_size=64,
)
CPU = CompileTarget("cpu", (8,))
# Layouts that mix axes.
MIXED = {
    "heads and tokens": Layout(
        LAYOUTS["megatron"].parameters,
        {
            "queries": {"N": ALL},
            "new_kv": {"K": ALL},
            "heads": {"N": "x"},
            "kv": {"K": "x"},
            "attention_outputs": {"N": ("x", "y")},
        },
        {"K": "x", "C": "y"},
    ),
    "heads and sequences": Layout(
        PRICED["attention_by_sequences"].parameters,
        {
            "queries": {"N": ALL},
            "new_kv": {"K": "x"},
            "heads": {"N": "x", "T": "y"},
            "kv": {"K": "x", "T": "y"},
            "attention_outputs": {"N": ALL},
        },
        {"K": "x", "S": "y"},
    ),
    # Sums are cut by rows over axes that they are not sums over, too: after they are sums.
    "residual on both axes": Layout(
        (Rule("*attn.*", {"N": "x", "K": "x"}), Rule("*mlp.*", {"F": "y"})),
        {
            "residual": {"D": ("x", "y")},
            "attention_inputs": {},
            "heads": {"N": "x"},
            "kv": {"K": "x"},
            "ffn_inputs": {},
            "ffn": {"F": "y"},
        },
        {"K": "x"},
    ),
    "tokens, added up": replace(
        PRICED["attention_by_tokens"],
        activations={"queries": {"N": ALL}, "heads": {}, "kv": {}, "attention_outputs": {}},
    ),
}
ALL_OF_THEM = PRICED | MIXED
# A prompt is one sequence, which is not cut by sequences.
CASES = [(name, True) for name in ALL_OF_THEM]
CASES += [(name, False) for name, layout in ALL_OF_THEM.items() if "S" not in layout.kv]


def mesh_of(x: int, y: int) -> Mesh:
    return Mesh(np.array(jax.devices()[: x * y]).reshape(x, y), ("x", "y"))


def moved(flow: LayoutFlow, what: str) -> list[tuple[str, float]]:
    found: list[Collective] = flow.layer.collectives
    return [(each.kind, each.moved) for each in found if each.what == what]


@pytest.mark.parametrize("layout", PRICED)
def test_each_device_of_64_keeps_a_64th(layout: str) -> None:
    """512 sequences of 2,048 tokens of a 70B model: 343 GB, which no cut by eight heads fits."""
    mesh = {"x": 8, "y": 8}
    costs = at_peaks(LLAMA, PRICED[layout], mesh, V5E)
    whole = 512 * 2048 * 80 * 2 * 8 * 128 * 2
    assert costs.kept_bytes(512, 512 * 2048) == whole / 64 == pytest.approx(5.37e9, rel=1e-3)
    assert costs.weight_bytes + whole / 64 < V5E.memory_gb * 1e9
    megatron = at_peaks(LLAMA, LAYOUTS["megatron"], mesh, V5E)
    assert megatron.kept_bytes(512, 512 * 2048) == whole / 8
    # A device reads what it keeps.
    read = costs.attention(0, 512 * 2048, 2048).memory * V5E.memory_gb_s * 1e9
    assert read * 80 == pytest.approx(whole / 64)


def test_what_does_not_divide_is_kept_by_some() -> None:
    mesh = {"x": 8}
    by_sequences, by_tokens = (at_peaks(LLAMA, each, mesh, V5E) for each in PRICED.values())
    assert by_sequences.kept_bytes(9, 9 * 100) == 2 * 100 * by_sequences.kv_bytes
    assert by_tokens.kept_bytes(9, 9 * 100) == 9 * 13 * by_tokens.kv_bytes
    # One sequence is read by one device, and by all.
    assert by_sequences.attention(0, 100, 100) == by_tokens.attention(0, 800, 800)


def test_numbers_that_are_sent_per_token() -> None:
    """Queries and results change places with sequences; parts of softmax are added up."""
    mesh = {"x": 4, "y": 2}
    queries = 64 * 128 / 8 * 7 / 8
    flow = LayoutFlow(LLAMA, PRICED["attention_by_sequences"], mesh)
    assert moved(flow, "q") == moved(flow, "out") == [("all-to-all", queries)]
    flow = LayoutFlow(LLAMA, PRICED["attention_by_tokens"], mesh)
    assert moved(flow, "q") == [("all-gather", 8 * queries)]
    assert moved(flow, "out") == [("reduce-scatter", 8 * queries)]
    assert moved(flow, "most") == moved(flow, "sum") == [("all-reduce", 2 * 7 / 8 * 64)]


def program(name: str, mesh: Mesh, context: int) -> Program:
    layout = ALL_OF_THEM[name]
    shape = padded(TINY, layout, dict(mesh.shape))
    assert shape.num_key_value_heads == 4 or "heads" in name
    return Program(shape, layout, mesh, context, np.dtype("float32"), CPU)


@pytest.mark.parametrize(("name", "decodes"), CASES)
def test_compiled_layers_are_as_closed_forms_say(name: str, decodes: bool) -> None:
    mesh = mesh_of(2, 4)
    made = program(name, mesh, 16)
    with jax.set_mesh(mesh):
        lowered = jax.jit(made.layer).lower(*made.layer_arguments(16, decodes))
    flow = layer_flow(made.model, made.layout, dict(mesh.shape), 16)
    closed, _ = closed_forms(flow.collectives, CPU)
    found = counts(lowered.compile().as_text() or "")
    assert alike(found, closed), (found, closed)


@pytest.mark.parametrize(("name", "decodes"), CASES)
def test_attention_gives_what_one_device_gives(name: str, decodes: bool) -> None:
    T, C, rng = 16, 24, np.random.default_rng(0)

    def attention(mesh: Mesh) -> Any:
        made = program(name, mesh, C)
        with jax.set_mesh(mesh):
            return jax.jit(made.attention)(q, k, v, kv)

    K = program(name, mesh_of(2, 4), C).model.num_key_value_heads
    q, k, v = (rng.normal(size=(T, n, 8)).astype(np.float32) for n in (8, K, K))
    old = [rng.normal(size=(T, C, K, 8)).astype(np.float32) for _ in range(2)]
    kv = tuple(old) if decodes else None
    (here, kept_here), (there, kept) = attention(mesh_of(1, 1)), attention(mesh_of(2, 4))
    np.testing.assert_allclose(there, here, rtol=2e-5, atol=2e-6)
    for one, two in zip(kept, kept_here, strict=True):
        np.testing.assert_array_equal(one, two)


@pytest.mark.parametrize(
    ("activations", "kv", "message"),
    [
        ({"heads": {"T": "x"}}, {"S": "y"}, "T of heads lies on .'x'., S of KV pages on .'y'."),
        ({"heads": {}}, {"S": "y"}, "a device attends for the sequences that it keeps"),
        ({"heads": {"T": "x"}}, {"C": "x"}, "T of heads and C of KV pages lie on mesh axis 'x'"),
        ({"heads": {}}, {"C": "x", "K": "x"}, "C and K of KV pages lie on mesh axis 'x'"),
    ],
)
def test_cuts_that_attention_cannot_have(
    activations: dict[str, Any], kv: dict[str, str], message: str
) -> None:
    with pytest.raises(JaxinferError, match=message):
        LayoutFlow(TINY, Layout((), activations, kv), {"x": 2, "y": 2})
