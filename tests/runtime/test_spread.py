"""Instances whose KV heads lie on several devices give the tokens of one device."""

import random
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import pytest
from cluster_cases import HEADS, PEAK, Loader, roomy
from cluster_checks import Done, Ran, serve

from jaxinfer.errors import JaxinferError
from jaxinfer.serving.kv_shards import Placement
from jaxinfer.serving.system import (
    Action,
    Assignment,
    ClusterView,
    InstanceView,
    MoveSlices,
    RequestView,
    StepView,
)
from jaxinfer.systems.single import Single


class Scatter(Single):
    """Slices lie anywhere with room, and every other step one request's go somewhere else."""

    def __init__(self, options: Any = None) -> None:
        super().__init__(options)
        self.rng = random.Random(5)

    def route(self, waiting: Collection[RequestView], cluster: ClusterView) -> list[Assignment]:
        return list(super().route(waiting, cluster))

    def place(self, request: RequestView, instance: InstanceView) -> Placement | None:
        pages = -(-request.num_known // instance.page_size)
        free = [shard.num_free_pages for shard in instance.shards]
        found: list[list[int]] = [[] for _ in instance.shards]
        for shard in instance.shards:
            here = [n for n, other in enumerate(instance.shards) if other.stage == shard.stage]
            for piece in shard.slices:
                if not (room := [n for n in here if free[n] >= pages]):
                    return None
                chosen = self.rng.choice(room)
                free[chosen] -= pages
                found[chosen].append(piece)
        return found

    def on_step(self, step: StepView, cluster: ClusterView) -> Sequence[Action]:
        instance = cluster.instances[step.instance]
        if self.rng.random() < 0.5 or not instance.running:
            return ()
        request = instance.running[self.rng.choice(list(instance.running))]
        moves = []
        for source, shard in enumerate(instance.shards):
            others = [
                n for n, other in enumerate(instance.shards)
                if other.stage == shard.stage and n != source
            ]  # fmt: skip
            moves += [
                (source, self.rng.choice(others), (piece,))
                for piece in request.slices[source]
                if self.rng.random() < 0.5
            ]
        gone = {(dest, piece) for _, dest, (piece,) in moves}
        there = {(n, piece) for n, pieces in enumerate(request.slices) for piece in pieces}
        return [MoveSlices(request.id, tuple(moves))] if moves and not gone & there else ()


def spread(attention: Sequence[int | None], primary: int = 1, **more: Any) -> dict[str, Any]:
    """Sections of a run file: one stage, with attention groups of so many pages."""
    names = [f"a{number}" for number in range(len(attention))]
    groups = {"p": {"devices": primary}} | {name: {} for name in names}
    pools = [
        {"group": name, "num_pages": pages} if pages else name
        for name, pages in zip(names, attention, strict=True)
    ]
    stages = [{"group": "p", "attention": pools}]
    instance = {"stages": stages, "enable_prefix_caching": False} | more
    return {"groups": groups, "instances": {"x": instance}, "system": "test_spread:Scatter"}


@pytest.fixture
def ran(loader: Loader, tmp_path: Path) -> Any:
    def run(heads: str, **sections: Any) -> tuple[list[Done], Ran]:
        llm = loader.load(heads, **sections)
        done = serve(llm, run_dir=tmp_path)
        found = Ran.last(tmp_path)
        assert found.metrics["late_compiles"] == 0
        return done, found

    return run


@pytest.mark.slow
def test_heads_stay_where_they_belong(ran: Any, expected: dict[str, list[Done]]) -> None:
    done, _ = ran(
        "three",
        **spread([None]) | {"system": "single"},
    )
    assert done == expected["three"]


@pytest.mark.parametrize(
    ("heads", "primary", "attention"),
    [
        ("two", 2, [None]),
        pytest.param("three", 1, [20, 9, 40], marks=pytest.mark.slow),
        pytest.param("three", 2, [30], marks=pytest.mark.slow),
    ],
)
def test_heads_anywhere_that_move_in_the_midst(
    ran: Any, expected: dict[str, list[Done]], heads: str, primary: int, attention: list[int | None]
) -> None:
    done, found = ran(heads, **spread(attention, primary, **roomy(16)))
    assert done == expected[heads]
    moves = found.metrics["slice_moves"]
    assert moves["begun"] > 20
    assert moves["num_bytes"] == sum(each.num_bytes for each in found.record.transfers)
    # The run tells of all groups, and counts the pages of all pools.
    (stage,) = found.record.run["instances"]["x"]["stages"]
    places = stage["attention"]
    assert [place["group"] for place in places] == [f"a{n}" for n in range(len(attention))]
    pools = [stage["num_pages"], *(place["num_pages"] for place in places)]
    assert found.metrics["num_pages"] == HEADS[heads][1] * sum(pages - 1 for pages in pools)
    assert found.metrics["peak_pages"] <= found.metrics["num_pages"]


@pytest.mark.slow
def test_pools_that_hold_hardly_more_than_the_longest_request(
    ran: Any, expected: dict[str, list[Done]]
) -> None:
    """Preempted requests are placed anew, and prompts come in chunks beside decodes."""
    pages = -(-PEAK // 8)
    tight = {"page_size": 8, "num_pages": pages + 1, "max_num_batched_tokens": 24}
    done, found = ran("three", **spread([pages // 2, pages // 2], **tight))
    assert done == expected["three"]
    assert sum(request.preemptions for request in found.requests) > 0


@pytest.mark.slow
def test_a_slower_device_finds_the_same(ran: Any, expected: dict[str, list[Done]]) -> None:
    sections = spread([None], **roomy(16))
    sections["groups"]["a0"] = {"emulate": {"slowdown": 3}}
    done, _ = ran("two", **sections)
    assert done == expected["two"]


@pytest.mark.slow
def test_two_stages_share_a_device(ran: Any, expected: dict[str, list[Done]]) -> None:
    sections = spread([None], **roomy(16))
    sections["groups"] = {"p": {}, "q": {}, "a0": {}}
    stages = [
        {"group": "p", "layers": 3, "attention": ["a0"]},
        {"group": "q", "layers": 1, "attention": [{"group": "a0", "num_pages": 12}]},
    ]
    sections["instances"]["x"]["stages"] = stages
    done, _ = ran("three", **sections)
    assert done == expected["three"]


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ({"a0": {"devices": 2}}, r"groups\.a0\.devices is 2, an attention group runs on 1"),
        ({"a0": {"emulate": {"slowdown": 2.5}}}, r"groups\.a0\.emulate\.slowdown is 2\.5, must be"),
    ],
)
def test_what_cannot_be_run_is_refused(
    loader: Loader, groups: dict[str, Any], message: str
) -> None:
    sections = spread([None])
    sections["groups"] |= groups
    with pytest.raises(JaxinferError, match=message):
        loader.load("two", **sections)


def test_hand_offs_are_refused(loader: Loader) -> None:
    """As soon as a system asks for them; one that keeps requests where they are may be there."""
    sections = spread([None])
    sections["groups"]["q"] = {}
    sections["instances"]["y"] = {"group": "q", "enable_prefix_caching": False}
    sections["system"] = "cluster_cases:AnyWay"
    message = "the system hands KV from x to y, but x has attention groups"
    with pytest.raises(JaxinferError, match=message):
        loader.load("two", **sections)
