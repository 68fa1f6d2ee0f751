"""Steps under layouts: the roofline's, where a layout cuts everything alike."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxinfer.config.run_file import RunFile
from jaxinfer.errors import JaxinferError
from jaxinfer.hardware.catalogue import Catalogue, ModelShape
from jaxinfer.lab.validate.calibrate import calibrate_group
from jaxinfer.models.layouts import ALL, LAYOUTS, Layout, Rule
from jaxinfer.serving.batch import Work
from jaxinfer.sharding.costs import LayoutCosts, LayoutFlow
from jaxinfer.sharding.links import Link, links_of, stated_links
from jaxinfer.simulate.costs.layout_roofline import LayoutStage
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


def costs(layout: Layout, mesh: dict[str, int], model: ModelShape = LLAMA) -> LayoutCosts:
    links = stated_links(H100, mesh)
    return LayoutCosts(LayoutFlow(model, layout, mesh), H100, links, 0.6, 0.7)


def stage(layout: Layout, mesh: dict[str, int], model: ModelShape = LLAMA) -> LayoutStage:
    return LayoutStage(costs(layout, mesh, model), 80, True, 1e-3, 1e-5)


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
    ours = stage(EVEN, {"tp": devices}, model).seconds(work)
    plain = RooflineStage(
        H100, model, 80, True, devices, 2, EFFICIENCY, *H100.stated_collective
    ).seconds(work)
    # Small differences: routers, inputs that devices have whole, and where these bind.
    assert plain <= ours * (1 + 1e-9)
    assert ours <= 1.1 * plain + 1e-5


def test_weights_gathered_pay_off_with_tokens_alone() -> None:
    """Pope et al., section 3.2.3: weights move less than activations do, once there are many."""
    gathered, columns = (stage(LAYOUTS[name], {"tp": 8}) for name in ("fsdp", "megatron"))
    assert gathered.seconds(prefill(64)) > columns.seconds(prefill(64))
    assert gathered.seconds(prefill(65536)) < columns.seconds(prefill(65536))


def test_links_by_hand() -> None:
    """fsdp: seven eighths of a layer's weights, and of heads, over one link."""
    weights = LLAMA.layer_parameters * 7 / 8 * 2
    heads = 1000 * 2 * (64 + 2 * 8 + 64) * 128 / 8 * 7 / 8
    found = costs(LAYOUTS["fsdp"], {"tp": 8}).dense(1000)
    assert found.links == pytest.approx((weights + heads) / 450e9)


def test_collectives_take_seconds_besides() -> None:
    for name, collectives in (("megatron", 2), ("sequence_parallel", 4), ("context_parallel", 2)):
        flow = LayoutFlow(LLAMA, LAYOUTS[name], MESH)
        fast, slow = (
            LayoutCosts(flow, H100, {axis: Link(450, each_s) for axis in MESH}).dense(8).links
            for each_s in (0.0, 1e-5)
        )
        assert slow - fast == pytest.approx(collectives * 1e-5)


def test_axes_of_a_torus_have_links_of_their_own() -> None:
    flow = LayoutFlow(LLAMA, LAYOUTS["megatron"], MESH)
    shared, apart = (
        LayoutCosts(flow, H100, {axis: Link(450, is_apart=own) for axis in MESH}).dense(8).links
        for own in (False, True)
    )
    assert apart == pytest.approx(shared / 2)


def test_the_slowest_of_two_links() -> None:
    flow = LayoutFlow(LLAMA, LAYOUTS["megatron"], MESH)
    slow, both = (
        LayoutCosts(flow, H100, {"x": Link(50), "y": Link(rate)}).dense(8).links
        for rate in (50, 450)
    )
    assert slow == both


def test_rows_that_are_cut_read_their_own_kv() -> None:
    """A device has the KV of an eighth of the heads, or that of all heads of an eighth's rows."""
    entries = 80 * 64 * 4000 * 2 * 8 * 128 * 2 / 8
    for name in ("megatron", "attention_dp", "context_parallel"):
        modelled = stage(LAYOUTS[name], MESH)
        more = modelled.seconds(decodes(64, 5000)) - modelled.seconds(decodes(64, 1000))
        assert more == pytest.approx(entries / (3350e9 * 0.7))


def test_a_long_prompt_is_read_whole_where_its_tokens_are_cut() -> None:
    """Eight prompts at once are read an eighth by each device, one prompt whole."""
    part = costs(LAYOUTS["context_parallel"], MESH)
    one = part.attention(0, 8000, 8000).memory
    assert one == pytest.approx(8 * part.attention(0, 8000, 1000).memory)


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


def test_layouts_and_attention_groups() -> None:
    """Costs of such groups know no layouts, so that one would have no effect."""
    groups = {"g": {"kind": "H100-SXM", "devices": 8}, "h": {"kind": "A100-80G-SXM"}}
    stages = {"stages": [{"group": "g", "attention": ["h"]}], "layout": "megatron"}
    links = [{"between": ["g", "h"], "gb_s": 50}]
    config = RunFile.model_validate(
        {**RUN, "groups": groups, "instances": {"a": stages}, "links": links}
    )
    with pytest.raises(JaxinferError, match=r"groups\.g: a stage with attention groups"):
        simulate(config, config.requests())


def test_a_mesh_of_one_stage_leaves_the_others_checked() -> None:
    groups = {
        "g": {"kind": "H100-SXM", "devices": 4, "mesh": {"x": 2, "y": 2}},
        "h": {"kind": "A100-80G-SXM", "devices": 3},
    }
    stages = {"stages": [{"group": "g"}, {"group": "h"}]}
    links = [{"between": ["g", "h"], "gb_s": 50}]
    config = RunFile.model_validate(
        {**RUN, "groups": groups, "instances": {"a": stages}, "links": links}
    )
    with pytest.raises(JaxinferError, match=r"groups\.h: 3 devices do not divide the model's 64"):
        simulate(config, config.requests())


def test_efficiencies_are_not_fitted_under_a_layout() -> None:
    config = RunFile.model_validate({**RUN, "instances": {"a": {"group": "g"}}})
    with pytest.raises(JaxinferError, match=r"groups\.g: efficiencies are .* leave out layout"):
        calibrate_group(config, "g", "points.csv")


def test_a_torus_has_its_own_latency() -> None:
    v5e = Catalogue().gpu("TPU-v5e")
    assert v5e.all_reduce_s == 1e-6
    assert links_of(v5e, MESH) == dict.fromkeys(MESH, Link(45, 1e-6, is_apart=True))
