"""Closed forms against the papers' own figures, and sums made by hand."""

import pytest

from jaxinfer.hardware.catalogue import ModelShape
from jaxinfer.models.layouts import LAYOUTS
from jaxinfer.sharding.collectives import Collective, moved, without_reduce_scatter
from jaxinfer.sharding.dataflow import head_flow, layer_flow

DENSE = ModelShape(
    hidden_size=8192,
    intermediate_size=28672,
    num_hidden_layers=1,
    num_attention_heads=64,
    num_key_value_heads=64,
    vocab_size=1024,
    gated=False,
)
FFN = {"ffn_inputs", "up_DF", "ffn"}


def moved_per_token(layout: str, mesh: dict[str, int], what: set[str]) -> float:
    found = layer_flow(DENSE, LAYOUTS[layout], mesh, 1024).collectives
    return sum(each.moved for each in found if each.what in what) / 1024


# Pope et al. (2022), sections 3.2.1 and 3.2.2, for E = 8,192 and F = 28,672.
@pytest.mark.parametrize(
    ("x", "y", "one", "two"),
    [
        (2, 4, 14_336, 13_312),
        (2, 8, 15_360, 10_752),
        (4, 16, 16_128, 6_528),
        (8, 32, 16_320, 3_552),
    ],
)
def test_weight_stationary_layers_move_what_the_paper_says(
    x: int, y: int, one: float, two: float
) -> None:
    mesh = {"x": x, "y": y}
    for layout in ("megatron", "sequence_parallel"):
        assert moved_per_token(layout, mesh, FFN) == one
    assert moved_per_token("weight_stationary_2d", mesh, FFN) == two


def test_gathered_weights_move_alike_for_any_tokens() -> None:
    """Section 3.2.3: the layer's weights over the first axis."""
    mesh = {"x": 4, "y": 2}
    for tokens in (8, 8192):
        found = layer_flow(DENSE, LAYOUTS["weight_gathered"], mesh, tokens).collectives
        weights = sum(each.moved for each in found if "T" not in each.letters)
        assert weights == DENSE.layer_parameters / 2 * 3 / 4


def test_a_ring_sends_what_the_shares_say() -> None:
    """An array of 12 numbers in four pieces, gathered step by step: each passes on what is new."""
    devices, numbers = 4, 12
    have = [[rank] for rank in range(devices)]
    sent = 0.0
    while len(have[0]) < devices:
        new = [pieces[-1] for pieces in have]
        for rank, piece in enumerate(new):
            have[(rank + 1) % devices].append(piece)
        sent += numbers / devices
    assert all(sorted(pieces) == list(range(devices)) for pieces in have)
    assert sent == moved("all-gather", devices) * numbers
    # The same backwards adds the pieces up; an all-reduce is both.
    assert moved("all-reduce", devices) == 2 * moved("reduce-scatter", devices) == 2 * sent / 12


def test_a_compiler_without_reduce_scatters_reduces_everywhere() -> None:
    kept = Collective("all-gather", ("x",), 8, 80.0, "y", "TD")
    scattered = Collective("reduce-scatter", ("x",), 8, 80.0, "ffn", "TD")
    first, second = without_reduce_scatter([kept, scattered])
    assert first == kept
    assert (second.kind, second.moved) == ("all-reduce", 2 * scattered.moved)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_device_moves_nothing_and_computes_all(layout: str) -> None:
    flow = layer_flow(DENSE, LAYOUTS[layout], {"x": 1, "y": 1}, 16)
    assert flow.collectives == []
    assert sum(each.flops for each in flow.products) == 2 * 16 * DENSE.layer_parameters
    assert sum(each.weights for each in flow.products) == DENSE.layer_parameters
    assert head_flow(DENSE, LAYOUTS[layout], {"x": 1, "y": 1}, 16).collectives == []


@pytest.mark.parametrize("layout", LAYOUTS)
def test_devices_share_flops(layout: str) -> None:
    """Devices compute nothing twice, but for keys and values that attention needs whole."""
    flow = layer_flow(DENSE, LAYOUTS[layout], {"x": 4, "y": 2}, 64)
    twice = {"attention_dp": {"k_DKH", "v_DKH"}, "context_parallel": {"k_DKH", "v_DKH"}}
    twice["weight_gathered"] = {"k_DKH", "v_DKH"}
    flops = sum(p.flops for p in flow.products if p.what not in twice.get(layout, ()))
    alone = layer_flow(DENSE, LAYOUTS[layout], {"x": 1}, 64)
    once = sum(p.flops for p in alone.products if p.what not in twice.get(layout, ()))
    assert flops == once / 8
