"""Seconds and bytes of a step against sums made by hand, and against the simulator's roofline."""

import pytest

from jaxinfer import JaxinferError
from jaxinfer.hardware.catalogue import Gpu, find_gpu, find_model
from jaxinfer.models.layouts import LAYOUTS, Layout, Rule
from jaxinfer.serving.batch import Work
from jaxinfer.sharding.collectives import Collective
from jaxinfer.sharding.costs import LayoutCosts, Link, ring_seconds, step_cost
from jaxinfer.simulate.costs.roofline import KernelEfficiency, RooflineStage

LLAMA, MIXTURE = find_model("llama-3-70b"), find_model("qwen3-30b-a3b")
CARD = find_gpu("H100-SXM")
MESH = {"x": 4, "y": 2}


@pytest.mark.parametrize("tokens", [1, 64, 4096])
def test_megatron_costs_what_the_simulator_says(tokens: int) -> None:
    """That puts queries, keys and values together, and so has fewer activations to read."""
    found = step_cost(LLAMA, LAYOUTS["megatron"], {"x": 8}, tokens, 1, 0, CARD)
    full = KernelEfficiency(flops=1.0, bandwidth=1.0)
    stage = RooflineStage(CARD, LLAMA, 80, False, 8, 2, full, *CARD.collective)
    work = Work(tokens, 0, 1, 1, 0, [(0, tokens)])
    assert 80 * found.layer.total == pytest.approx(stage.seconds(work), rel=0.03)
    assert found.step.total == pytest.approx(80 * found.layer.total + found.head.total)


def test_bytes_of_weights_and_kv() -> None:
    D, V, layers = 8192, 128256, 80
    tables = 2 * V * D
    layer = LLAMA.layer_parameters
    for name, weights, kv in (
        ("megatron", layers * layer / 8 + tables, 1),
        ("weight_stationary_2d", layers * layer / 8 + tables, 4),
        ("attention_dp", layers * (LLAMA.attention_parameters + 3 * D * 28672 / 8) + tables, 8),
        ("context_parallel", layers * layer + tables, 8),
    ):
        costs = LayoutCosts(LLAMA, LAYOUTS[name], MESH, CARD)
        assert costs.weight_bytes == pytest.approx(2 * weights)
        assert costs.kv_bytes == 2 * layers * 128 * kv * 2


def test_heads_that_do_not_divide_are_padded() -> None:
    costs = LayoutCosts(MIXTURE, LAYOUTS["megatron"], {"x": 8}, CARD)
    assert (costs.model.num_key_value_heads, costs.model.num_attention_heads) == (8, 64)
    assert costs.kv_bytes == 48 * 2 * 128 * 2


def test_experts_that_no_token_meets_are_not_read() -> None:
    """Of 128 experts, one token meets 8, and 64 tokens meet 128 (1 - (1 - 1/16)^64)."""
    slow = Gpu(bf16_tflops=1e9, memory_gb=80, memory_gb_s=1, link="NVLink4", link_gb_s=450)
    costs = LayoutCosts(MIXTURE, LAYOUTS["megatron"], {"x": 1}, slow)
    for tokens, met in ((1, 8), (64, 128 * (1 - (15 / 16) ** 64))):
        seconds = costs.layer(tokens, 0, 0).memory
        read = MIXTURE.attention_parameters + met * MIXTURE.expert_parameters + 2048 * 128
        assert seconds == pytest.approx(2 * read / 1e9, rel=0.02)


def test_a_ring_is_as_slow_as_its_slowest_link() -> None:
    links = {"x": Link(100.0, 1e-5, 1e-6), "y": Link(50.0)}
    each = Collective("all-reduce", ("x", "y"), 8, 1.0, "out", "TD")
    assert ring_seconds(each, links, 8e9) == pytest.approx(2 * 7e9 / 50e9 + 1e-5 + 14e-6)


def test_slower_links_are_of_their_axis_alone() -> None:
    """The 2D layout gathers and scatters along y and reduces along x."""
    links = {"x": Link(100.0), "y": Link(100.0)}
    base = LayoutCosts(LLAMA, LAYOUTS["weight_stationary_2d"], MESH, CARD, links)
    for axis, sent in (
        ("x", 2 * 3 / 4 * (2 * 28672 + (64 + 16) * 128) / 2),
        ("y", (4 * 8192 / 4) / 2),
    ):
        slow = {**links, axis: Link(10.0)}
        costs = LayoutCosts(LLAMA, LAYOUTS["weight_stationary_2d"], MESH, CARD, slow)
        more = costs.layer(4096, 0, 0).links - base.layer(4096, 0, 0).links
        # A mean of squares over all axes is as slow as the slowest.
        assert more == pytest.approx(4096 * sent * 2 * (1e-10 - 1e-11), rel=1e-3)


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        (Layout((Rule("*", {"F": "z"}),)), r"F of rule '\*' lies on mesh axis 'z'"),
        (Layout((Rule("*", {"N": "x", "H": "x"}),)), "N and H of layers.0.attn.* lie on mesh axis"),
        (Layout((Rule("*", {"D": ("x", "y")}),)), "D of .*q_DNH is 1001 long, 8 pieces do not"),
        (Layout((), {"heads": {"N": "x"}}), "attention reaches KV where its heads are"),
    ],
)
def test_layouts_that_cannot_be(layout: Layout, message: str) -> None:
    odd = LLAMA.model_copy(update={"hidden_size": 1001, "head_dim": 128})
    with pytest.raises(JaxinferError, match=message):
        LayoutCosts(odd, layout, MESH, CARD)
