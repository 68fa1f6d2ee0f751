"""The search for layouts against all there are, and crossings against a look at each count."""

from itertools import pairwise

import pytest

from jaxinfer.hardware.catalogue import Gpu, ModelShape
from jaxinfer.models.layouts import Layout, Rule, in_use
from jaxinfer.sharding.costs import at_peaks
from jaxinfer.sharding.crossings import crossings, fastest, token_counts
from jaxinfer.sharding.search import AxisAssignment, LayoutSearch, Step, layout_file

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
    assert found == min(priced, key=lambda one: one.cost.step.total, default=None)
    assert tried <= len(every)
    assert megabytes > 2 or len(priced) < len(every)


def test_what_reads_for_longer_than_the_best_is_not_tried() -> None:
    search = LayoutSearch(TINY, MESH, card(40.0))
    search.best(Step(1, 1, 0, 1))
    assert search.tried < 4 * len(search.of_weights())


def test_no_room_no_layout() -> None:
    assert LayoutSearch(TINY, MESH, card(0.1)).best(Step(1, 1, 0, 1)) is None


def test_known_layouts_are_among_the_assignments() -> None:
    """Megatron's and that of weights gathered cost what they do by name."""
    from jaxinfer.models.layouts import LAYOUTS

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
