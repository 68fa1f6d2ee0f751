"""Steps under layouts: the roofline's, where a layout cuts everything alike."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxinfer.config.run_file import RunFile
from jaxinfer.errors import JaxinferError
from jaxinfer.hardware.catalogue import Catalogue, ModelShape
from jaxinfer.models.layer_flow import LayerFlow
from jaxinfer.models.layouts import ALL, LAYOUTS, Rule
from jaxinfer.serving.batch import Work
from jaxinfer.simulate.costs.layout_roofline import LayoutStage, Rates
from jaxinfer.simulate.costs.roofline import KernelEfficiency, RooflineStage
from jaxinfer.simulate.run import simulate

EFFICIENCY = KernelEfficiency(0.6, 0.7, 1e-3, 1e-5)
H100 = Catalogue().gpu("H100-SXM")
LLAMA = Catalogue().model("llama-2-70b")
MIXTURE = LLAMA.model_copy(update={"num_experts": 8, "num_experts_per_tok": 2})
# The roofline cuts the vocabulary, too.
EVEN = replace(
    LAYOUTS["megatron"],
    parameters=(Rule("*_VD", {"V": ALL}), *LAYOUTS["megatron"].parameters),
)
MESH = {"x": 2, "y": 4}


def stage(name: str, mesh: dict[str, int], model: ModelShape = LLAMA) -> LayoutStage:
    flow = LayerFlow(model, LAYOUTS[name], mesh)
    return LayoutStage(flow, 80, True, EFFICIENCY, Rates.of(H100, EFFICIENCY))


def prefill(tokens: int) -> Work:
    return Work(tokens, 0, 1, 1, 0, [(0, tokens)])


def decodes(rows: int, context: int) -> Work:
    return Work(rows, rows, rows, rows, rows * context, [], rows)


@given(
    singles=st.integers(0, 300),
    context=st.integers(1, 4000),
    chunks=st.lists(st.tuples(st.integers(0, 4000), st.integers(2, 2048)), max_size=3),
    devices=st.sampled_from([1, 2, 4, 8]),
    mixture=st.booleans(),
)
def test_even_layouts_take_what_the_roofline_says(
    singles: int, context: int, chunks: list[tuple[int, int]], devices: int, mixture: bool
) -> None:
    model = MIXTURE if mixture else LLAMA
    rows = singles + len(chunks)
    tokens = singles + sum(count for _, count in chunks)
    if not tokens:
        return
    work = Work(tokens, singles, rows, rows, singles * context, chunks, singles)
    flow = LayerFlow(model, EVEN, {"tp": devices})
    ours = LayoutStage(flow, 80, True, EFFICIENCY, Rates.of(H100, EFFICIENCY)).seconds(work)
    plain = RooflineStage(
        H100, model, 80, True, devices, 2, EFFICIENCY, *H100.stated_collective
    ).seconds(work)
    if mixture or devices == 1:
        # A device reads whole inputs of its columns, the roofline shares them, too.
        assert math.isclose(ours, plain, rel_tol=0.02)
    else:
        assert plain <= ours * (1 + 1e-9)
        assert ours <= 1.1 * plain + 1e-5


def test_weights_gathered_pay_off_with_tokens_alone() -> None:
    """Pope et al., section 3.2.3: weights move less than activations do, once there are many."""
    gathered, columns = stage("fsdp", {"tp": 8}), stage("megatron", {"tp": 8})
    assert gathered.seconds(prefill(64)) > columns.seconds(prefill(64))
    assert gathered.seconds(prefill(65536)) < columns.seconds(prefill(65536))


def test_links_by_axis() -> None:
    """fsdp's numbers by hand: seven eighths of a layer's weights, and of heads."""
    step = stage("fsdp", {"tp": 8}).step(prefill(1000))
    weights = LLAMA.layer_parameters * 7 / 8 * 2
    heads = 1000 * 2 * (64 + 2 * 8 + 64) * 128 / 8 * 7 / 8
    assert step.links == {("tp",): pytest.approx(80 * (weights + heads) / 450e9)}
    assert step.host == pytest.approx(1.01e-3)
    assert step.total == step.compute + step.memory + step.links["tp",] + step.host


def test_all_reduces_take_seconds_besides_and_others_half() -> None:
    rates = replace(Rates.of(H100, EFFICIENCY), all_reduce_s=1e-5)
    for name, more in (("megatron", 2.0), ("sequence_parallel", 2.0), ("context_parallel", 1.0)):
        flow = LayerFlow(LLAMA, LAYOUTS[name], MESH)
        made = LayoutStage(flow, 80, False, EFFICIENCY, rates).step(prefill(8))
        plain = replace(rates, all_reduce_s=0.0)
        without = LayoutStage(flow, 80, False, EFFICIENCY, plain).step(prefill(8))
        spent = sum(made.links.values()) - sum(without.links.values())
        assert spent == pytest.approx(80 * more * 1e-5)


def test_axes_of_a_torus_have_links_of_their_own() -> None:
    flow = LayerFlow(LLAMA, LAYOUTS["weight_stationary_2d"], MESH)
    made = {}
    for apart in (False, True):
        rates = replace(Rates.of(H100, EFFICIENCY), axes_apart=apart)
        made[apart] = LayoutStage(flow, 1, False, EFFICIENCY, rates).step(prefill(8)).links
    assert made[True]["x",] == made[False]["x",]
    assert made[True]["y",] == made[False]["y",]
    assert made[True]["x", "y"] == made[False]["x", "y"] / 2


def test_rows_that_are_cut_read_their_own_kv() -> None:
    """A device has the KV of an eighth of the heads, or that of all heads of an eighth's rows."""
    near, far = decodes(64, 1000), decodes(64, 5000)
    by = {}
    for name in ("megatron", "attention_dp", "context_parallel"):
        model = stage(name, MESH)
        by[name] = model.step(far).memory - model.step(near).memory
    entries = 80 * 64 * 4000 * 2 * 8 * 128 * 2 / 8
    assert by["megatron"] == pytest.approx(entries / (3350e9 * 0.7))
    assert by["attention_dp"] == pytest.approx(by["megatron"])
    assert by["context_parallel"] == pytest.approx(by["megatron"])


RUN = {
    "model": "llama-2-70b",
    "groups": {"g": {"kind": "H100-SXM", "devices": 8, "mesh": MESH}},
    "engine": {"max_num_seqs": 32, "max_model_len": 8192, "enable_prefix_caching": False},
    "workload": {"synthetic": "azure_conversation", "limit": 20},
}


def simulated(layout: str | None, **more: object) -> float:
    given = {"instances": {"a": {"group": "g", "layout": layout}}}
    config = RunFile.model_validate({**RUN, **given, **more})
    return simulate(config, config.requests()).wall_s


def test_runs_go_by_their_layouts() -> None:
    took = {name: simulated(name) for name in ("megatron", "weight_stationary_2d", "fsdp")}
    assert took["weight_stationary_2d"] < took["megatron"] < took["fsdp"]


def test_a_layout_that_does_not_fit_the_memory() -> None:
    with pytest.raises(JaxinferError, match=r"instances\.a: groups\.g: .* 137.95 GB of weights"):
        simulated("context_parallel")


def test_layouts_and_measured_costs() -> None:
    with pytest.raises(JaxinferError, match="leave out layout and mesh"):
        simulated("megatron", simulate={"linear": {"step_s": 0.01}})


def test_unknown_layouts() -> None:
    with pytest.raises(JaxinferError, match=r"instances\.a.*megatorn.*did you mean 'megatron'"):
        simulated("megatorn")
