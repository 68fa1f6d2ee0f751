"""The search for layouts against all there are, and crossings against a look at each count."""

from itertools import pairwise

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from jaxinfer.errors import JaxinferError
from jaxinfer.hardware.catalogue import Gpu, ModelShape, find_gpu, find_model
from jaxinfer.lab.sharding.crossings import crossings, fastest, token_counts
from jaxinfer.lab.sharding.search import (
    AxisAssignment,
    LayoutSearch,
    PricedLayout,
    Step,
    layout_file,
)
from jaxinfer.models.layouts import LAYOUTS, PRICED, Layout, Rule, in_use
from jaxinfer.sharding.costs import at_peaks

TINY = ModelShape(
    hidden_size=256,
    intermediate_size=512,
    num_hidden_layers=2,
    num_attention_heads=8,
    num_key_value_heads=2,
    vocab_size=128,
)
MIXTURE = TINY.model_copy(update={"num_experts": 4, "num_experts_per_tok": 2})
MESH = {"x": 2, "y": 2}


def card(megabytes: float) -> Gpu:
    return Gpu(
        bf16_tflops=1,
        memory_gb=megabytes / 1e3,
        memory_gb_s=20,
        link="NVLink4",
        link_gb_s=50,
        all_reduce_s=1e-6,
    )


@pytest.mark.parametrize("model", [TINY, MIXTURE])
@pytest.mark.parametrize("step", [Step(512, 1, 0, 512), Step(8, 8, 255, 2048)])
@pytest.mark.parametrize("megabytes", [1.9, 40.0])
def test_the_best_of_all_is_found(model: ModelShape, step: Step, megabytes: float) -> None:
    search = LayoutSearch(model, MESH, card(megabytes))
    found = search.best(step)
    tried = search.tried
    every = [a for cut in search.of_weights() for a in search.with_tokens(cut)]
    priced = [one for a in every if (one := search.price(a, step))]
    priced += [one for name in PRICED if (one := search.price(PricedLayout(name), step))]
    assert found == min(priced, key=lambda one: one.cost.step.total, default=None)
    assert tried <= len(every) + len(PRICED)
    assert megabytes > 2 or len(priced) < len(every)


def test_what_reads_for_longer_than_the_best_is_not_tried() -> None:
    search = LayoutSearch(TINY, MESH, card(40.0))
    search.best(Step(1, 1, 0, 1))
    assert search.tried < 4 * len(search.of_weights())


def test_no_room_no_layout() -> None:
    assert LayoutSearch(TINY, MESH, card(0.1)).best(Step(1, 1, 0, 1)) is None


def test_known_layouts_are_among_the_assignments() -> None:
    """Megatron's and that of weights gathered cost what they do by name."""
    both = ("x", "y")
    for name, assignment in (
        ("megatron", AxisAssignment(heads=both, columns=both)),
        ("sequence_parallel", AxisAssignment(heads=both, columns=both, tokens=both)),
        ("weight_stationary_2d", AxisAssignment(rows=("x",), heads=("y",), columns=("y",))),
        ("weight_gathered", AxisAssignment(("x",), ("y",), ("y",), (), ("x",))),
        ("attention_dp", AxisAssignment(columns=both, tokens=both)),
        ("context_parallel", AxisAssignment(tokens=both)),
        ("fsdp", AxisAssignment(rows=both, tokens=both)),
    ):
        model = TINY.model_copy(update={"num_key_value_heads": 4})
        found, known = (
            at_peaks(model, layout, MESH, card(40)).step(64, 8, 100)
            for layout in (assignment.layout(both), LAYOUTS[name])
        )
        assert found == known, name


def test_a_file_of_a_layout_is_that_layout() -> None:
    assignment = AxisAssignment(("x",), ("y",), ("y",), (), ("x",))
    found: dict[str, Layout] = {}
    exec(layout_file(assignment, ("x", "y")), found)
    assert found["LAYOUT"] == in_use(assignment.layout(("x", "y")), ("x", "y"))
    assert found["LAYOUT"].parameters[0] == Rule("*norm.*", {})


def test_crossings_are_where_a_look_at_each_count_finds_them() -> None:
    seconds = {
        "flat": lambda n: 100.0,
        "steep": lambda n: float(n),
        "slow": lambda n: 30.0 + 0.5 * n,
        "alike": lambda n: 100.0,
    }
    found = {(c.tokens, c.faster, c.slower) for c in crossings(seconds, token_counts(512))}
    expected = set()
    names = list(seconds)
    for i, one in enumerate(names):
        for two in names[i + 1 :]:
            before = 0.0
            for n in range(1, 513):
                gap = seconds[one](n) - seconds[two](n)
                if gap * before < 0:
                    expected.add((n, *((one, two) if gap < 0 else (two, one))))
                before = gap or before
    assert found == expected
    best = fastest(seconds, token_counts(512))
    assert [name for _, name in best] == ["steep", "slow", "flat"]
    assert all(low < high for (low, _), (high, _) in pairwise(best))


@settings(max_examples=25, deadline=None, phases=(Phase.explicit, Phase.generate))
@given(st.data())
def test_no_layout_that_ships_is_better_than_the_best(data: st.DataObject) -> None:
    """Heads and columns that do not divide are padded or copied in both."""
    of = data.draw
    K = of(st.sampled_from([1, 2, 3, 8]), "KV heads")
    model = TINY.model_copy(
        update={
            "num_key_value_heads": K,
            "num_attention_heads": K * of(st.sampled_from([1, 2, 7]), "queries of each"),
            "head_dim": 32,
            "intermediate_size": of(st.sampled_from([512, 100]), "columns"),
            "gated": (experts := of(st.sampled_from([0, 4, 8]), "experts")) > 0
            or of(st.booleans()),
            "num_experts": experts,
            "num_experts_per_tok": min(experts, 2),
        }
    )
    # Three axes take seconds, of experts tens of them.
    three = [] if experts else [(2, 2, 2)]
    sizes = of(st.sampled_from([(8,), (6,), (2, 4), (3, 2), (8, 8), *three]), "mesh")
    mesh = dict(zip("xyz", sizes, strict=False))
    gpu = card(of(st.sampled_from([3.0, 40.0]), "megabytes")).model_copy(
        update={"domain": of(st.sampled_from([None, 4]), "domain"), "network_gb_s": 5.0}
    )
    prefill = Step(prompt := of(st.integers(1, 3000), "tokens"), 1, 0, prompt)
    sequences = of(st.integers(1, 300), "sequences")
    step = of(st.sampled_from([prefill, Step(sequences, sequences, 63, sequences * 64)]), "step")
    best = LayoutSearch(model, mesh, gpu).best(step)
    for name, layout in (LAYOUTS | PRICED).items():
        try:
            costs = at_peaks(model, layout, mesh, gpu)
        except JaxinferError:
            continue
        kept = costs.kept_bytes(step.sequences, step.entries)
        of_decodes = costs.flow.sequence_ways > 1 and step.tokens > step.sequences
        if costs.weight_bytes + kept > gpu.memory_gb * 1e9 or of_decodes:
            continue
        assert best, name
        found = costs.step(step.tokens, step.sequences, step.context).step.total
        assert best.cost.step.total <= found * (1 + 1e-9), (name, best.assignment)


@pytest.mark.parametrize("mesh", [{"x": 8, "y": 8}, {"x": 4, "y": 4, "z": 4}])
def test_heads_are_copied_where_there_are_more_devices(mesh: dict[str, int]) -> None:
    """Llama 3 70B has eight KV heads: on 64 devices of one domain, megatron is the fastest."""
    model, gpu = find_model("llama-3-70b"), find_gpu("H100-SXM").model_copy(update={"domain": 64})
    best = LayoutSearch(model, mesh, gpu).best(Step(64, 64, 2047, 64 * 2048))
    known = at_peaks(model, LAYOUTS["megatron"], mesh, gpu).step(64, 64, 2047).step.total
    assert best
    assert best.cost.step.total == pytest.approx(known)
    assert known == pytest.approx(6.46e-3, rel=1e-3)
