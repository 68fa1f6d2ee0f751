"""Pools of groups that have KV heads only: how stages share them, and Hetis' capacities."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxinfer import JaxinferError
from jaxinfer.config.resolve import resolve
from jaxinfer.config.run_file import as_run_file
from jaxinfer.config.site import model_site
from jaxinfer.serving.step_fit import AttentionFit
from jaxinfer.simulate.cluster import ModelledInstance, model_cluster
from jaxinfer.simulate.kv_capacity import level

HARDWARE = Path(__file__).parents[2] / "configs" / "clusters" / "hetis.yaml"
# By group: its node, and how many GPUs.
GROUPS = {
    "a": ("a100", 4),
    "b": ("rtx3090_1", 2),
    "c": ("rtx3090_2", 2),
    "p": ("p100", 4),
    "one": ("a100", 1),
    "half": ("rtx3090_1", 2),
}


def modelled(
    model: str,
    *stages: Mapping[str, Any],
    engine: Mapping[str, Any] = {},
    reserve_gb: float | None = None,
) -> ModelledInstance:
    """An instance on Hetis' cluster; of the P100s, so much is kept."""
    attention = [
        each if isinstance(each, str) else each["group"]
        for stage in stages
        for each in stage.get("attention", ())
    ]
    names = dict.fromkeys([*(stage["group"] for stage in stages), *attention])
    one = {"launch_ahead": False, "enable_prefix_caching": False, "stages": list(stages)}
    file = {
        "model": model,
        "groups": {name: {"devices": GROUPS[name][1]} for name in names},
        "instances": {"x": one | dict(engine)},
        "simulate": {
            "hardware": str(HARDWARE),
            "groups": {
                name: {"node": GROUPS[name][0], "reserve_gb": reserve_gb if name == "p" else None}
                for name in names
            },
        },
        "system": {"name": "pipeline_parallel" if len(stages) > 1 else "single"},
    }
    return model_cluster(model_site(resolve(as_run_file(file)))).instances["x"]


PRIMARIES = [
    {"group": "a", "layers": 58},
    {"group": "b", "layers": 11},
    {"group": "c", "layers": 11},
]
ON_P100 = [stage | {"attention": ["p"]} for stage in PRIMARIES]


# Cards of each kind (A100, 3090, P100 of 12 GB), and 10^9 parameters as the models' cards say.
WHOLE, THREE, ALONE = (4, 4, 4), (1, 2, 0), (1, 0, 0)


@pytest.mark.parametrize(
    ("model", "stages", "cards", "billions", "kv_bytes"),
    [
        ("llama-2-70b", ON_P100, WHOLE, 68.98, 327680),
        ("llama-2-13b", [{"group": "a", "attention": ["b", "c", "p"]}], WHOLE, 13.016, 819200),
        ("opt-30b", [{"group": "a", "attention": ["b", "c", "p"]}], WHOLE, 29.975, 1376256),
        ("llama-2-13b", [{"group": "one", "attention": ["half"]}], THREE, 13.016, 819200),
        ("llama-2-13b", [{"group": "one"}], ALONE, 13.016, 819200),
    ],
)
def test_capacities_of_hetis_clusters(
    model: str,
    stages: Sequence[Mapping[str, Any]],
    cards: tuple[int, int, int],
    billions: float,
    kv_bytes: int,
) -> None:
    """0.9 of all memory, as nvidia-smi shows it, less the weights, by what a token's KV takes."""
    memory = sum(n * mib * 2**20 for n, mib in zip(cards, (81920, 24576, 12288), strict=True))
    tokens = (0.9 * memory - 2e9 * billions) / kv_bytes
    assert modelled(model, *stages).num_tokens == pytest.approx(tokens, rel=0.05)


def test_what_the_scheduler_sees_is_what_fits() -> None:
    """A request as long as all groups together hold, by whole pages of each KV head."""
    instance = modelled("llama-2-70b", *ON_P100)
    kv = instance.new_instance("x", None, False, False, len).kv
    assert [(shard.stage, shard.group, shard.device) for shard in kv.shards] == [
        (stage, group, device)
        for stage, own in enumerate("abc")
        for group, device in [(own, 0), *(("p", number) for number in range(4))]
    ]
    assert [shard.slices for shard in kv.shards[5:10]] == [tuple(range(8, 16)), (), (), (), ()]
    assert [s.num_pages for s in kv.shards] == [s.num_head_pages - 1 for s in instance.shards]
    assert kv.is_spread
    sums = [sum(s.num_pages for s in kv.shards[i : i + 5]) // 8 for i in (0, 5, 10)]
    assert min(sums) * instance.config.page_size == instance.num_tokens
    # One request has each KV head whole in one shard: at most two of eight heads lie apart.
    assert 0.5 * min(sums) < kv.num_pages <= min(sums)


def test_a_stage_without_attention_groups_has_its_heads_together() -> None:
    """Such a stage has, as a real one, one slice, and pages of all its KV heads."""
    plain = {name: value for name, value in PRIMARIES[2].items() if name != "attention"}
    engine = {"page_size": 16, "num_pages": 1001}
    instance = modelled("llama-2-70b", *ON_P100[:2], plain, engine=engine)
    *_, last = instance.new_instance("x", None, False, False, len).kv.shards
    assert (last.stage, last.slices, last.num_pages) == (2, (0,), 1000)
    assert last.fit == AttentionFit(0.0, 0.0, 0.0)


def test_given_pages_are_taken_and_the_rest_is_levelled() -> None:
    """The P100s' memory goes to the fewest pages: 80 layers of 4,096 bytes, by hand."""
    given = [*ON_P100[:2], PRIMARIES[2] | {"attention": [{"group": "p", "num_pages": 101}]}]
    engine = {"page_size": 16, "num_pages": 1001}
    instance = modelled("llama-2-70b", *given, engine=engine)
    by_stage = {(s.stage, s.group): s.num_pages for s in instance.shards}
    assert {s.num_head_pages for s in instance.shards if (s.stage, s.group) == (2, "p")} == {201}
    assert by_stage[2, "p"] == 101
    assert by_stage[0, "p"] == by_stage[1, "p"]
    # Of one KV head each, 512 bytes for each of 16 tokens and of a stage's layers.
    pools = [(s.num_head_pages, s.layers) for s in instance.shards if s.group == "p"]
    held = sum(pages * layers for pages, layers in pools) * 16 * 512
    room = 4 * 0.9 * 12288 * 2**20 - 512 * 2 * (64 + 8) * 128 * 2
    assert room - 69 * 16 * 4096 * 2 < held <= room


@given(
    st.lists(st.tuples(st.integers(0, 30), st.integers(1, 9)), min_size=1, max_size=5),
    st.integers(0, 300),
)
def test_levels_are_as_high_as_there_is_room(stages: list[tuple[int, int]], room: int) -> None:
    counts, each = [count for count, _ in stages], [size for _, size in stages]
    more = level(counts, each, room)
    if more is None:
        assert sum(each) > room
        return
    assert min(more) >= 1
    assert sum(n * size for n, size in zip(more, each, strict=True)) <= room
    fewest = min(count + n for count, n in zip(counts, more, strict=True))
    higher = [max(fewest + 1 - count, 1) for count in counts]
    assert sum(n * size for n, size in zip(higher, each, strict=True)) > room


@pytest.mark.parametrize(
    ("pages", "reserve_gb", "wanted"), [(None, 12.0, "2"), (10**6, None, "1000000")]
)
def test_a_group_too_small_is_refused(
    pages: int | None, reserve_gb: float | None, wanted: str
) -> None:
    stage = {"group": "a", "attention": [{"group": "p", "num_pages": pages}]}
    error = (
        rf"^instances\.x: groups\.p: 4 x 12\.9 GB are too little for the KV pages {wanted} for "
        r"stages\[0\] of 10\.49 MB$"
    )
    with pytest.raises(JaxinferError, match=error):
        modelled("llama-2-70b", stage, engine={"page_size": 32}, reserve_gb=reserve_gb)
