"""Times of steps whose KV heads lie on several modelled groups: by hand, and closed forms."""

from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from spread_cases import CARD, PEAK, ROWS, modelled, run_file, served, work_with

from jaxinfer import JaxinferError
from jaxinfer.config.costs import SimulateOptions
from jaxinfer.config.resolve import resolve
from jaxinfer.config.run_file import as_run_file
from jaxinfer.config.site import model_site
from jaxinfer.hardware.catalogue import find_gpu, find_model
from jaxinfer.serving.batch import ShardWork
from jaxinfer.serving.step_fit import AttentionFit
from jaxinfer.simulate.costs.model import Pipeline
from jaxinfer.simulate.costs.roofline import RooflineStage
from jaxinfer.simulate.spread import ModelledSpreadStage, ShardCost


@given(
    ROWS,
    st.sampled_from(["llama-2-70b", "llama-2-13b", "opt-30b"]),
    st.sampled_from(["A100-80G-PCIe", "RTX-3090", "P100-PCIe-12G"]),
    st.sampled_from([1, 2, 4]),
    st.floats(0.05, 1.0),
    st.floats(0.05, 1.0),
)
def test_all_heads_on_the_own_group_take_what_a_plain_stage_does_to_the_last_bit(
    rows: list[tuple[int, int]], model: str, gpu: str, devices: int, flops: float, bandwidth: float
) -> None:
    file = as_run_file(
        {
            "model": model,
            "groups": {"g": {"kind": "A100-80G-SXM", "devices": 8}},
            "instances": {"x": {"group": "g"}},
        }
    )
    (stage,) = model_site(resolve(file)).stages["x"]
    part = replace(stage.part, gpu=find_gpu(gpu), devices=devices)
    costs = SimulateOptions(flops=flops, bandwidth=bandwidth, step_s=1e-4, sequence_s=1e-6)
    spread, plain = ModelledSpreadStage.of(part, costs), RooflineStage.of(part, costs)
    spread.shards += (replace(spread.shards[0], round_trip=1.0, per_query=1.0),)
    work = work_with(rows, part.model.num_key_value_heads, 0)
    assert spread.seconds(work) == plain.seconds(work)
    assert spread.seconds(replace(work, shards=())) == plain.seconds(work)


# A decode that sees 100 entries, and three tokens of a chunk after 10 entries: of each head 1,600
# and 208 bytes at 10^6 per second; 36 pairs of 32 FLOPs at 10^9 are less than the latter.
STEP = work_with([(99, 1), (10, 3)], 1, 1)
OWN_S = 1.6e-3 + 0.208e-3


def test_a_step_takes_what_the_slowest_shard_does() -> None:
    """A head here and one there, where the memory is half as fast, and queries go to and fro."""
    file = run_file()
    file["gpus"]["slow"] = CARD | {"memory_gb_s": 0.5e-3}
    file["groups"]["w"] = {"kind": "slow"}
    cost = modelled(file).cost
    dense = cost.stages(replace(STEP, single_context=0, chunks=[], shards=[ShardWork()] * 2))
    there = 2 * OWN_S + 4 * 48e-6 + 2 * 0.5
    assert cost.stages(STEP) == pytest.approx([dense[0] + 6 * there], rel=1e-12)
    # Without that round trip, the own group is the slower one where it has twice the heads.
    at_once = run_file(links=[{"between": ["a", "w"], "gb_s": 1e3}])
    own = work_with([(99, 1), (10, 3)], 2, 1)
    assert modelled(at_once).cost.stages(own) == pytest.approx([dense[0] + 6 * 2 * OWN_S])


def test_each_device_of_an_attention_group_has_heads_of_its_own() -> None:
    file = run_file()
    file["groups"]["w"] |= {"devices": 4}
    file["simulate"] = PEAK | {"groups": {"w": {"bandwidth": 0.5}}}
    instance = modelled(file)
    own, *shards = instance.new_instance("x", None, True, False, len).shards
    assert [(shard.group, shard.device) for shard in shards] == [("w", n) for n in range(4)]
    # A quarter of what the group has for the stage, and of the link.
    (place,) = {shard.num_pages for shard in instance.shards if shard.group == "w"}
    assert [shard.num_pages for shard in shards] == [(place - 1) * 2 // 4] * 4
    for shard in shards:
        assert shard.fit
        assert shard.fit.per_entry == pytest.approx(16 / 0.5e6)
        assert shard.fit.exchange_per_pair == pytest.approx(4 * 48e-6)
        assert shard.fit.exchange == 1.0
    assert own.fit == AttentionFit(0.0, pytest.approx(16e-6), 0.0)


def test_heads_dealt_evenly_take_what_one_device_as_fast_as_all_would() -> None:
    """Their link is one, and the slowest decides where one has more."""
    links = [{"between": [*pair], "gb_s": 1e-3} for pair in ("ab", "aw", "bw")]
    stages = [{"group": name, "attention": ["w"]} for name in "ab"]
    several, one = (run_file(stages, links=links) for _ in range(2))
    several["groups"]["w"] |= {"devices": 2}
    one["gpus"]["twice"] = CARD | {"bf16_tflops": 2e-3, "memory_gb_s": 2e-3}
    one["groups"]["w"] |= {"kind": "twice"}
    rows = [(99, 1), (10, 3), (40, 1)]
    as_one = modelled(one).cost.stages(work_with(rows, 0, 2, 2, 0))
    several_cost = modelled(several).cost
    even = several_cost.stages(work_with(rows, 0, 1, 1, 2, 0, 0))
    assert even == pytest.approx(as_one, rel=1e-12)
    uneven = several_cost.stages(work_with(rows, 0, 2, 0, 2, 0, 0))
    assert uneven[0] > 1.2 * as_one[0]
    assert uneven[1] == even[1]


@given(st.integers(0, 300), st.integers(0, 10**6))
def test_a_shards_fit_has_its_decodes_times(pairs: int, entries: int) -> None:
    """A pair sees an entry at least."""
    cost = ShardCost(32, 16, 1e-9, 1e-6, 48e-6, 1.0)
    entries = pairs and entries + pairs
    expected = cost.seconds(ShardWork(pairs, entries))
    assert cost.fit.seconds(pairs, entries) == pytest.approx(expected)


@given(
    ROWS,
    st.lists(st.integers(0, 8), min_size=3, max_size=3),
    st.sampled_from([field.name for field in fields(ShardCost)]),
    st.integers(0, 2),
    st.floats(1.0, 10.0),
)
def test_no_coefficient_that_grows_makes_a_step_shorter(
    rows: list[tuple[int, int]], heads: list[int], name: str, shard: int, factor: float
) -> None:
    (place,) = model_site(resolve(as_run_file(run_file()))).stages["x"]
    stage = ModelledSpreadStage.of(place.part, SimulateOptions())
    (own,) = stage.shards
    costs = [own, replace(own, per_query=1e-6, round_trip=1e-3), replace(own, round_trip=1e-4)]
    stage.shards = tuple(costs)
    work = work_with(rows, *heads)
    before = stage.seconds(work)
    costs[shard] = replace(costs[shard], **{name: getattr(costs[shard], name) * factor})
    stage.shards = tuple(costs)
    assert stage.seconds(work) >= before
    more = work_with([*rows, (7, 1)], *heads)
    assert stage.seconds(more) >= stage.seconds(work)


@pytest.mark.parametrize(
    ("tokens", "share"), [(5_000, 1.0), (10_000, 0.83), (20_000, 0.67), (40_000, 0.59)]
)
def test_the_best_split_is_that_of_the_closed_form(tokens: int, share: float) -> None:
    """Llama 2 13B on an A100 and two RTX 3090, a round trip of 100 us, without what is exchanged.

    With G bytes of KV in a layer, it is T = (G + beta B_r) / (B_l + B_r), if G / B_l > beta.
    """
    model, size = find_model("llama-2-13b"), 20_480
    local, remote = (0.7e9 * find_gpu(name).memory_gb_s for name in ("A100-80G-PCIe", "RTX-3090"))
    assert model.kv_bytes(1, 2) == size
    beta, heads = 1e-4, 40
    here = ShardCost(1, size // heads, 1.0, 1 / local)
    there = ShardCost(1, size // heads, 1.0, 1 / remote, 0.0, beta)

    def seconds(offloaded: int) -> float:
        """Return the seconds of 40 heads of 250 requests."""
        each = tokens // 250
        own = 250 * heads - 2 * offloaded
        shards = [(here, own), (there, offloaded), (there, offloaded)]
        return max(cost.seconds(ShardWork(n, n * each)) for cost, n in shards)

    best = min(range(250 * heads // 2), key=seconds)
    gigas = tokens * size
    closed = min(gigas / local, (gigas + beta * 2 * remote) / (local + 2 * remote))
    assert seconds(best) == pytest.approx(closed, rel=1e-3)
    assert 1 - 2 * best / (250 * heads) == pytest.approx(share, abs=0.006)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (
            {"links": []},
            r"instances\.x: links: none between a and w, where KV must go: add \{between: \[a, w\]",
        ),
        (
            {"simulate": {"linear": {"step_s": 1.0}}},
            r"instances\.x: simulate\.linear: the attention of a cannot be told from linear: ",
        ),
        (
            {"simulate": {"groups": {"w": {"linear": {"step_s": 1.0}}}}},
            r"instances\.x: simulate\.groups\.w\.linear: the attention of w cannot be told ",
        ),
        (
            {"simulate": {"groups": {"w": {"step_s": 1.0}}}},
            r"^instances\.x: simulate\.groups\.w\.step_s: leave it out, steps are those of",
        ),
    ],
)
def test_what_cannot_be_modelled_is_refused(change: dict[str, Any], error: str) -> None:
    with pytest.raises(JaxinferError, match=error):
        modelled(run_file() | change)


def test_measured_stages_may_stand_beside_spread_ones() -> None:
    stages = [{"group": "a", "attention": ["w"]}, {"group": "b"}]
    file = run_file(stages)
    file["simulate"] = PEAK | {"groups": {"b": {"linear": {"step_s": 1.0}}}}
    cost = modelled(file).cost
    assert isinstance(cost, Pipeline)
    assert [type(part).__name__ for part in cost.parts] == ["ModelledSpreadStage", "LinearStage"]
    found, _ = served(file, (5, 3))
    assert found.steps == 3
