"""Seconds and bytes of a step against sums made by hand, and against the simulator's roofline."""

import pytest

from jaxinfer import JaxinferError
from jaxinfer.hardware.catalogue import Gpu, find_gpu, find_model
from jaxinfer.models.layouts import LAYOUTS, Layout, Rule
from jaxinfer.serving.batch import Work
from jaxinfer.sharding.collectives import Collective
from jaxinfer.sharding.costs import at_peaks
from jaxinfer.sharding.links import Link, ring_seconds
from jaxinfer.simulate.costs.roofline import KernelEfficiency, RooflineStage

LLAMA, MIXTURE = find_model("llama-3-70b"), find_model("qwen3-30b-a3b")
CARD = find_gpu("H100-SXM")
MESH = {"x": 4, "y": 2}


@pytest.mark.parametrize("tokens", [1, 64, 4096])
def test_megatron_costs_what_the_simulator_says(tokens: int) -> None:
    """But for where one of them has more of the layer whole on each device."""
    found = at_peaks(LLAMA, LAYOUTS["megatron"], {"x": 8}, CARD).step(tokens, 1)
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
        ("weight_stationary_2d", layers * layer / 8 + tables, 1),
        ("attention_dp", layers * (LLAMA.attention_parameters + 3 * D * 28672 / 8) + tables, 8),
        ("context_parallel", layers * layer + tables, 8),
    ):
        costs = at_peaks(LLAMA, LAYOUTS[name], MESH, CARD)
        assert costs.weight_bytes == pytest.approx(2 * weights)
        assert costs.kv_bytes == 2 * layers * 128 * kv * 2


def test_pieces_share_kv_heads() -> None:
    costs = at_peaks(MIXTURE, LAYOUTS["megatron"], {"x": 8}, CARD)
    assert (costs.flow.model.num_key_value_heads, costs.flow.model.num_attention_heads) == (8, 32)
    assert costs.kv_bytes == 48 * 2 * 128 * 2


def test_experts_that_no_token_meets_are_not_read() -> None:
    """A token meets 8 of 128 experts, and 64 tokens meet 128 (1 - (1 - 1/16)^64)."""
    slow = Gpu(bf16_tflops=1e9, memory_gb=80, memory_gb_s=1, link="NVLink4", link_gb_s=450)
    costs = at_peaks(MIXTURE, LAYOUTS["megatron"], {"x": 1}, slow)
    for tokens, met in ((1, 8), (64, 128 * (1 - (15 / 16) ** 64))):
        seconds = costs.dense(tokens).memory
        read = MIXTURE.attention_parameters + met * MIXTURE.expert_parameters + 2048 * 128
        assert seconds == pytest.approx(2 * read / 1e9, rel=0.04)


def test_a_router_reads_each_token_once() -> None:
    """A row counts as read once, where each of 128 experts reads it, and writes a result."""
    flow = at_peaks(MIXTURE, LAYOUTS["megatron"], {"x": 1}, CARD).flow
    moved = {each.what: (each.reads, each.writes) for each in flow.layer.products}
    assert moved["router_DE"] == (2048, 128)
    assert moved["gate_EDF"] == (128 * 2048, 128 * 768)
    assert moved["down_EFD"] == (128 * 768, 128 * 2048)


def test_slots_of_an_exchange_grow_more_slowly_than_tokens() -> None:
    """One of 128 experts a token: an eighth of 1, 64 and 8,192 in the mean, with what is spare."""
    model = MIXTURE.model_copy(update={"num_experts_per_tok": 1})
    links = {axis: Link(100.0) for axis in MESH}
    both = (
        at_peaks(model, LAYOUTS[name], MESH, CARD, links)
        for name in ("expert_all_to_all", "sequence_parallel")
    )
    exchanged, gathered = both
    for tokens, slots in ((8, 1), (512, 19), (65536, 1144)):
        sent = 7 * slots * 2048 * 2 + 7 / 8 * tokens * 2
        more = exchanged.dense(tokens).links - gathered.dense(tokens).links
        assert more == pytest.approx((sent - 2 * 7 / 8 * tokens * 2048) * 2 / 100e9)


def test_a_ring_is_as_slow_as_its_slowest_link() -> None:
    links = {"x": Link(100.0, 1e-5), "y": Link(50.0)}
    each = Collective("all-reduce", ("x", "y"), 8, 1.0, "out", "TD")
    sent_s, fixed_s = ring_seconds(each, links)
    assert sent_s == pytest.approx(2 * 7 / 8 / 50e9)
    assert fixed_s == pytest.approx(1e-5)


def test_slower_links_are_of_their_axis_alone() -> None:
    """The 2D layout gathers and scatters hidden states along y, heads and columns along x."""
    links = {"x": Link(100.0), "y": Link(100.0)}
    base = at_peaks(LLAMA, LAYOUTS["weight_stationary_2d"], MESH, CARD, links)
    for axis, sent in (
        ("x", 3 / 4 * (3 * 28672 + (64 + 16 + 64) * 128) / 2),
        ("y", (4 * 8192 / 4) / 2),
    ):
        slow = {**links, axis: Link(10.0)}
        costs = at_peaks(LLAMA, LAYOUTS["weight_stationary_2d"], MESH, CARD, slow)
        more = costs.dense(4096).links - base.dense(4096).links
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
        at_peaks(odd, layout, MESH, CARD)
