"""FLOPs, peaks, prices and power of modelled clusters, by hand."""

from pathlib import Path

import pytest
import yaml

from jaxinfer.config.run_file import as_run_file
from jaxinfer.hardware.catalogue import find_gpu, find_model
from jaxinfer.hardware.efficiency import model_flops
from jaxinfer.simulate.run import simulate
from jaxinfer.workload.lengths import BenchRequest

CLUSTERS = Path(__file__).parents[2] / "configs" / "clusters"


def test_flops_of_llama_3_8b() -> None:
    found = model_flops(find_model("llama-3-8b"))
    # Queries and output, keys and values, and the three of the feed-forward layer.
    layer = 2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336
    assert found.token == 2 * 32 * layer
    # Scores and values: 32 heads of 128, in 32 layers.
    assert found.pair == 2 * 2 * 32 * 128 * 32
    assert found.sampled == 2 * 4096 * 128256


def test_a_token_meets_the_experts_that_are_asked() -> None:
    shape = find_model("llama-3-8b")
    two = shape.model_copy(update={"num_experts": 8, "num_experts_per_tok": 2})
    more = 2 * 32 * 3 * 4096 * 14336
    assert model_flops(two).token == model_flops(shape).token + more


def run_file(**more: object) -> dict[str, object]:
    return {
        "model": "llama-3-8b",
        "engine": {"enable_prefix_caching": False, "max_num_batched_tokens": 512},
        "groups": {"g": {"kind": "A10", "devices": 2}},
        "instances": {"i": {"group": "g"}},
    } | more


def test_mfu_and_energy_of_two_cards() -> None:
    """1,000 tokens in and 21 out, in two chunks: 1,020 tokens, which see all before them."""
    found = simulate(as_run_file(run_file()), [BenchRequest(None, 1000, 21, 0.0)])
    flops = model_flops(find_model("llama-3-8b"))
    done = 1020 * flops.token + 1020 * 1021 / 2 * flops.pair + 21 * flops.sampled
    assert found.mfu == pytest.approx(done / (2 * 125e12 * found.wall_s))
    # A roofline at 60 % of the peak FLOPs does no better.
    assert 0 < found.mfu < 0.6
    watts = 2 * find_gpu("A10").watts
    assert found.wh_per_request == pytest.approx(watts * found.wall_s / 3600)
    assert (found.usd_per_request, found.usd_per_million_output_tokens) == (None, None)
    (use,) = found.instances.values()
    assert (use.first_step, use.last_step) == (0.0, found.wall_s)
    assert use.busy_s == pytest.approx(found.wall_s)


def test_whole_nodes_are_paid_and_powered() -> None:
    """Two of a machine's eight GPUs count for the peak; price and watts are of the machine."""
    hardware = CLUSTERS / "splitwise_aa.yaml"
    node = yaml.safe_load(hardware.read_text())["nodes"]["prompt"]
    simulated = {"hardware": str(hardware), "groups": {"g": {"node": "prompt"}}}
    config = as_run_file(run_file(groups={"g": {"devices": 2}}, simulate=simulated))
    found = simulate(config, [BenchRequest(None, 1000, 21, 0.0)] * 5)
    hours = found.wall_s / 3600
    assert found.usd_per_request == pytest.approx(node["usd_per_hour"] * hours / 5)
    per_million = 1e6 * node["usd_per_hour"] * hours / 105
    assert found.usd_per_million_output_tokens == pytest.approx(per_million)
    assert found.wh_per_million_output_tokens == pytest.approx(1e6 * 8 * 400 * hours / 105)
    flops = model_flops(find_model("llama-3-8b"))
    done = 5 * (1020 * flops.token + 1020 * 1021 / 2 * flops.pair + 21 * flops.sampled)
    assert found.mfu == pytest.approx(done / (2 * 312e12 * found.wall_s))
