"""Instances whose KV heads lie on several devices give the tokens of one device."""

import json
import shutil
from collections.abc import Sequence
from itertools import count, permutations
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from cluster_cases import HEADS, PEAK, Loader, Request, load, roomy
from cluster_checks import REQUESTS, Done, Ran, serve
from scatter import Scatter, of_two_devices, spread

from jaxinfer.errors import JaxinferError
from jaxinfer.report.records import read_lines
from jaxinfer.runtime.spread.spread_stage import SpreadStage
from jaxinfer.serving.system import Action
from jaxinfer.serving.views import ClusterView, ShardView, StepView

DATA = Path(__file__).parents[2] / "data" / "architectures"


class Profiled(Scatter):
    """Keeps what it has been shown."""

    shards: Sequence[ShardView] = ()

    def on_step(self, step: StepView, cluster: ClusterView) -> Sequence[Action]:
        Profiled.shards = list(cluster.instances["x"].shards)
        return super().on_step(step, cluster)


def halves_of(folder: Path) -> list[list[int]]:
    """Rows of the halves of each step of a run that had some."""
    lines = (folder / "1" / "steps.jsonl").read_text(encoding="utf-8").splitlines()
    return [step["halves"] for step in map(json.loads, lines) if "halves" in step]


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
        pytest.param("three", 1, [20, 9, 40], marks=pytest.mark.long),
        pytest.param("three", 2, [30], marks=pytest.mark.long),
        pytest.param("two", 2, [30, 12], marks=pytest.mark.long),
        pytest.param("three", 2, [20, 9, 40], marks=pytest.mark.slow),
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
@pytest.mark.parametrize("halves", ["never", pytest.param("always", marks=pytest.mark.long)])
def test_heads_on_each_device_of_a_group(
    ran: Any, expected: dict[str, list[Done]], tmp_path: Path, halves: str
) -> None:
    """They move from one of its devices to the other, too; the group is told of as one."""
    sections = of_two_devices(spread([20, 9], **roomy(16), half_batches=halves))
    done, found = ran("three", **sections)
    assert done == expected["three"]
    transfers = read_lines(tmp_path / "1").transfers
    ways = {(source, dest) for each in transfers for source, dest, _ in each["moves"]}
    assert ways == {*permutations(range(4), 2)}
    (stage,) = found.record.run["instances"]["x"]["stages"]
    places = [(place["group"], len(place["devices"])) for place in stage["attention"]]
    assert places == [("a0", 2), ("a1", 1)]
    pools = 3 * (stage["num_pages"] - 1), 2 * (3 * 19 // 2), 3 * 8
    assert found.metrics["num_pages"] == sum(pools)


@pytest.mark.slow
@pytest.mark.parametrize("primary", [pytest.param(1, marks=pytest.mark.long), 2])
def test_pools_that_hold_hardly_more_than_the_longest_request(
    ran: Any, expected: dict[str, list[Done]], primary: int
) -> None:
    """Preempted requests are placed anew, and prompts come in chunks beside decodes."""
    pages = -(-PEAK // 8)
    tight = {"page_size": 8, "num_pages": pages + 1, "max_num_batched_tokens": 24}
    done, found = ran("three", **spread([pages // 2, pages // 2], primary, **tight))
    assert done == expected["three"]
    assert sum(request.preemptions for request in found.requests) > 0


@pytest.mark.slow
def test_a_slower_device_finds_the_same(ran: Any, expected: dict[str, list[Done]]) -> None:
    sections = spread([None], **roomy(16))
    sections["groups"]["a0"] = {"emulate": {"slowdown": 3}}
    done, _ = ran("two", **sections)
    assert done == expected["two"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("heads", "primary", "attention"),
    [pytest.param("two", 1, [None], marks=pytest.mark.long), ("three", 2, [20, 9, 40])],
)
def test_halves_in_turn_find_the_same(
    ran: Any,
    expected: dict[str, list[Done]],
    tmp_path: Path,
    heads: str,
    primary: int,
    attention: list[int | None],
) -> None:
    """Prompts in chunks beside decodes, while heads move."""
    options = roomy(16) | {"max_num_batched_tokens": 24, "half_batches": "always"}
    done, found = ran(heads, **spread(attention, primary, **options))
    assert done == expected[heads]
    assert found.metrics["slice_moves"]["begun"] > 20
    cut = halves_of(tmp_path)
    assert len(cut) > 20
    assert all(all(halves) for halves in cut)


@pytest.mark.slow
def test_halves_are_taken_by_profile(ran: Any, expected: dict[str, list[Done]]) -> None:
    """Whichever are shorter; every shard is measured for it."""
    sections = spread([None], **roomy(16), half_batches="by_time")
    sections["system"] = {"name": "test_spread:Profiled"}
    done, _ = ran("two", **sections)
    assert done == expected["two"]
    own, other = Profiled.shards
    assert own.fit
    assert own.dense
    assert other.fit
    assert 0 < own.dense(1) <= own.dense(10**6)


# Of a small Gemma, whose windows are of 10 tokens.
SHORT = [
    Request(tuple(7 * i % 120 + 1 for i in range(length)), request.params)
    for length, request in zip(range(5, 61, 4), REQUESTS, strict=True)
]


@pytest.fixture
def windowed(tiny_folder: Path, tmp_path: Path) -> Path:
    """Return a folder of the windowed model, with the tokenizer of another model."""
    folder = tmp_path / "gemma"
    shutil.copytree(tiny_folder, folder)
    for name in ("config.json", "model.safetensors"):
        shutil.copy(DATA / "gemma3" / name, folder / name)
    return folder


def check_windows(
    model: Path, folder: Path, groups: dict[str, Any], attention: list[int], halves: str = "never"
) -> None:
    """Prompts in chunks beside decodes, while heads move."""
    options = {"dtype": "float32"} | roomy(16)
    alone = {"groups": {"p": {"platform": "cpu"}}, "instances": {"x": {"group": "p"} | options}}
    expected = serve(load(model, folder, **alone, system="single"), SHORT)
    sections = spread(attention, **options, half_batches=halves)
    llm = load(model, folder, **sections | {"groups": sections["groups"] | groups})
    assert serve(llm, SHORT, folder / "run") == expected
    assert Ran.last(folder / "run").metrics["slice_moves"]["begun"] > 20


@pytest.mark.slow
@pytest.mark.parametrize("halves", [pytest.param("never", marks=pytest.mark.long), "always"])
def test_windows(windowed: Path, tmp_path: Path, halves: str) -> None:
    check_windows(windowed, tmp_path, {}, [40], halves)


@pytest.mark.gpu
@pytest.mark.skipif(jax.default_backend() != "gpu", reason="without one: the tests above")
def test_attention_of_a_gpu_on_cpus(windowed: Path, tmp_path: Path) -> None:
    """Heads go from kernels of one kind to those of another, and back."""
    groups = {"p": {"platform": "gpu"}} | {name: {"platform": "cpu"} for name in ("a0", "a1")}
    check_windows(windowed, tmp_path, groups, [20, 40])


@pytest.mark.slow
def test_a_device_that_fails_takes_its_instance_along(
    loader: Loader, expected: dict[str, list[Done]], tmp_path: Path
) -> None:
    """Requests are all recomputed by another instance."""
    sections = spread([None], **roomy(16))
    sections["groups"]["q"] = {}
    sections["instances"]["y"] = {"group": "q", "enable_prefix_caching": False} | roomy(16)
    shares = {name: {"weight": 1, "max_waiting": 2} for name in "xy"}
    sections["system"] = {"name": "data_parallel", "shares": shares}
    llm = loader.load("two", **sections)
    (stage,) = llm.cluster.engines["x"].worker.stages
    assert isinstance(stage, SpreadStage)
    attend, calls = stage.attend, count()

    def fail(out: np.ndarray) -> np.ndarray:
        raise RuntimeError("injected")

    def failing(*args: Any) -> jax.Array:
        out = attend(*args)
        if next(calls) < 100:
            return out
        found: jax.Array = jax.jit(lambda x: jax.pure_callback(fail, x, x))(out)
        return found

    stage.attend = failing  # type: ignore[method-assign]
    assert serve(llm, run_dir=tmp_path) == expected["two"]
    found = Ran.last(tmp_path)
    assert "injected" in found.record.run["lost"]["x"]
    assert found.instances == {"x", "y"}


@pytest.mark.slow
@pytest.mark.parametrize("halves", [pytest.param("never", marks=pytest.mark.long), "always"])
def test_two_stages_share_a_device(ran: Any, expected: dict[str, list[Done]], halves: str) -> None:
    sections = spread([None], **roomy(16), half_batches=halves)
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
        (
            {"a0": {"devices": 2, "tensor_parallel_size": 2}},
            r"groups\.a0\.tensor_parallel_size: leave it out, each device of an attention group",
        ),
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
    """A hand-off is refused once a system asks for it; a system that asks for none may run."""
    sections = spread([None])
    sections["groups"]["q"] = {}
    sections["instances"]["y"] = {"group": "q", "enable_prefix_caching": False}
    sections["system"] = "cluster_cases:AnyWay"
    message = "the system hands KV from x to y, but x has attention groups"
    with pytest.raises(JaxinferError, match=message):
        loader.load("two", **sections)
