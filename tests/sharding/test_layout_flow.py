"""Closed forms of a layer's collectives, against those that papers print."""

import math
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxinfer.errors import JaxinferError
from jaxinfer.hardware.catalogue import Catalogue, ModelShape
from jaxinfer.models.layouts import ALL, LAYOUTS, REST, Layout, Rule
from jaxinfer.sharding.costs import LayoutFlow
from jaxinfer.sharding.dataflow import AttentionShare, layer_flow

LLAMA = Catalogue().model("llama-2-70b")
MIXTURE = ModelShape(
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=8,
    num_key_value_heads=8,
    vocab_size=128,
    num_experts=8,
    num_experts_per_tok=2,
)
DENSE = MIXTURE.model_copy(update={"num_experts": 0, "num_experts_per_tok": 0})
MESH = {"x": 2, "y": 4}


def feed_forward(flow: LayoutFlow) -> float:
    """Numbers per token that a device sends for the feed-forward layer."""
    own = ("ffn_inputs", "up_DF", "ffn")
    return sum(c.moved for c in flow.layer.collectives if c.what in own)


@pytest.mark.parametrize(
    ("devices", "rows", "one_axis", "two_axes"),
    [(8, 2, 14336, 13312), (16, 2, 15360, 10752), (64, 4, 16128, 6528), (256, 8, 16320, 3552)],
)
def test_feed_forward_of_pope_et_al(
    devices: int, rows: int, one_axis: float, two_axes: float
) -> None:
    """Sections 3.2.1 and 3.2.2: 2 E (n - 1) / n, and 2 (E/X (YZ-1)/YZ + F/YZ (X-1)/X).

    The paper's has two matrices, E = 8,192 and F = 28,672.
    """
    heads = {"num_attention_heads": 256, "num_key_value_heads": 256, "head_dim": 32}
    model = LLAMA.model_copy(update={"gated": False, **heads})
    mesh = {"x": rows, "y": devices // rows}
    assert feed_forward(LayoutFlow(model, LAYOUTS["megatron"], mesh)) == one_axis
    assert feed_forward(LayoutFlow(model, LAYOUTS["weight_stationary_2d"], mesh)) == two_axes


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        ("megatron", {"all-reduce": 2}),
        ("sequence_parallel", {"all-gather": 2, "reduce-scatter": 2}),
        ("attention_dp", {"all-gather": 3, "reduce-scatter": 1}),
        ("context_parallel", {"all-gather": 2}),
        # Of weights: seven. Queries, keys, values and results change from tokens to heads and back.
        ("fsdp", {"all-gather": 7, "all-to-all": 4}),
    ],
)
def test_collectives_by_kind(layout: str, expected: dict[str, int]) -> None:
    found = LayoutFlow(LLAMA, LAYOUTS[layout], MESH).layer.collectives
    assert Counter(each.kind for each in found) == expected


def test_a_reduce_scatter_and_a_gather_send_what_an_all_reduce_does() -> None:
    sent = [
        sum(c.moved for c in LayoutFlow(LLAMA, LAYOUTS[name], MESH).layer.collectives)
        for name in ("megatron", "sequence_parallel")
    ]
    assert sent[0] == sent[1] == 2 * 2 * 8192 * 7 / 8


def test_tokens_go_once_to_each_device_with_some_of_their_experts() -> None:
    """Each of 8 devices with an expert has a quarter of 64 tokens' choices of two.

    8 tokens a device: 2 to each other in the mean, of variance 1.5, and four deviations more.
    """
    slots, D, X = 7, 64, 2
    flow = layer_flow(MIXTURE, LAYOUTS["expert_all_to_all"], MESH, 64)
    found = {c.what: c.moved for c in flow.collectives}
    assert found["sent"] == found["come back"] == 7 / 8 * 8 * slots * D
    assert found["shares"] == 7 / 8 * 64 * 2 * X
    summed = layer_flow(MIXTURE, LAYOUTS["expert_parallel"], MESH, 64)
    assert {c.what: c.moved for c in summed.collectives}["ffn"] == 2 * 7 / 8 * 64 * D
    for one, other in zip(flow.products, summed.products, strict=True):
        if one.experts:
            assert one == replace(other, operand=one.operand)


def test_all_weights_are_gathered_but_ones_own() -> None:
    flow = LayoutFlow(LLAMA, LAYOUTS["fsdp"], MESH)
    assert flow.gathered_weights == LLAMA.layer_parameters * 7 / 8


def test_one_device_sends_nothing() -> None:
    for layout in LAYOUTS.values():
        flow = LayoutFlow(LLAMA, layout, {"x": 1, "y": 1})
        assert not flow.layer.collectives
        assert sum(each.weights for each in flow.layer.products) == LLAMA.layer_parameters


@given(
    name=st.sampled_from([name for name in LAYOUTS if name != "context_parallel"]),
    x=st.sampled_from([1, 2, 4]),
    y=st.sampled_from([1, 2]),
    mixture=st.booleans(),
)
def test_the_work_of_all_devices_is_the_layer_s(name: str, x: int, y: int, mixture: bool) -> None:
    """Multiplications of a token, over all devices, are those of one device without a mesh."""
    model = MIXTURE if mixture else DENSE
    flow = LayoutFlow(model, LAYOUTS[name], {"x": x, "y": y})
    alone = LayoutFlow(model, LAYOUTS[name], {"x": 1, "y": 1})
    router = 2 * 64 * 8
    for here, whole in zip(flow.layer.products, alone.layer.products, strict=True):
        # Routers are small: each device may have all of it.
        if whole.flops != router:
            assert math.isclose(here.flops * x * y, whole.flops)
    part = flow.layer.attention
    assert part
    assert math.isclose(part.tokens * part.heads * x * y, 8)
    assert flow.kv_ways in (1, x * y)


def test_parameters_on_a_device() -> None:
    tables = 2 * LLAMA.vocab_size * LLAMA.hidden_size
    layers = LLAMA.num_hidden_layers * LLAMA.layer_parameters
    for name, cut in (("megatron", 8), ("fsdp", 8), ("context_parallel", 1)):
        flow = LayoutFlow(LLAMA, LAYOUTS[name], MESH)
        assert flow.parameters(80, True, True) == layers / cut + tables
    flow = LayoutFlow(LLAMA, LAYOUTS["attention_dp"], MESH)
    ffn = 80 * LLAMA.expert_parameters
    assert flow.parameters(80, True, True) == layers - ffn * 7 / 8 + tables
    assert flow.parameters(1, False, True) == LLAMA.layer_parameters - ffn / 80 * 7 / 8 + tables / 2


def test_a_device_has_one_kv_head_at_least() -> None:
    """Eight KV heads on sixteen devices: two have the same, and half of its queries each."""
    flow = LayoutFlow(LLAMA, LAYOUTS["megatron"], {"x": 4, "y": 4})
    assert flow.layer.attention == AttentionShare(1, 4, 1)
    assert sum(each.weights for each in flow.layer.products[:3]) == 8192 * (4 + 2) * 128
    assert flow.kv_bytes(80, 2) == 80 * 2 * 128 * 2


def test_heads_that_do_not_divide_are_padded() -> None:
    model = LLAMA.model_copy(update={"num_key_value_heads": 6, "num_attention_heads": 12})
    model = model.model_copy(update={"head_dim": 64})
    flow = LayoutFlow(model, LAYOUTS["megatron"], {"x": 4})
    assert flow.layer.attention == AttentionShare(1, 4, 2)


@pytest.mark.parametrize(
    ("layout", "mesh", "message"),
    [
        (
            replace(LAYOUTS["megatron"], kv={"K": "z"}),
            MESH,
            r"K of KV pages lies on mesh axis 'z', there is \['x', 'y'\]",
        ),
        (LAYOUTS["fsdp"], {"x": 3, "y": 1}, "axis D of .*q_DNH is 8192 long, 3 pieces"),
        (
            replace(LAYOUTS["megatron"], activations={"residual": {"T": ALL, "D": REST}}),
            MESH,
            "T and D of residual lie on mesh axis 'y', it has room for one",
        ),
        (
            replace(LAYOUTS["sequence_parallel"], kv={"K": "x"}),
            MESH,
            "attention reaches KV where its heads are",
        ),
    ],
)
def test_layouts_that_do_not_fit(layout: Layout, mesh: dict[str, int], message: str) -> None:
    with pytest.raises(JaxinferError, match=message):
        LayoutFlow(LLAMA, layout, mesh)


def test_rules_of_ones_own() -> None:
    """Columns over y alone are on x twice: the all-reduces go over four devices."""
    layout = Layout((Rule("*", {"N": "y", "K": "y", "F": "y"}),), kv={"K": "y"})
    flow = LayoutFlow(LLAMA, layout, MESH)
    assert [(c.axes, c.moved) for c in flow.layer.collectives] == 2 * [(("y",), 2 * 8192 * 3 / 4)]
