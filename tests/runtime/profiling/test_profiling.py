"""Measurements, kept and given to runs, with instances that take a stated time."""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from jaxinfer.config.cluster import LinkConfig
from jaxinfer.runtime.kv.outcome import Failed
from jaxinfer.runtime.profiling import measure_steps as measure_module
from jaxinfer.runtime.profiling import profile as profiles
from jaxinfer.runtime.profiling.measure_steps import measure_in_a_row, measure_steps
from jaxinfer.runtime.profiling.profile import Grid, Needs, prepare_times, profile_engines
from jaxinfer.serving.kv_shards import KVShards
from jaxinfer.serving.page_pool import PagePool, Shard
from jaxinfer.serving.world import StepDone
from jaxinfer.steps import profile as stored
from jaxinfer.steps.profile import load_profile
from jaxinfer.steps.shapes import StepLimits
from jaxinfer.steps.times import Part, StepPoint, features, shape_of, work_of_parts

LIMITS = StepLimits(8, 64, max_pages=16, page_size=8, given_buckets=(16, 64))


class Engine:
    """Two stages: of one second for each token of the step's bucket, and of two a step."""

    def __init__(self, name: str, max_model_len: int = 121, num_pages: int = 65) -> None:
        self.name = name
        self.stages = [SimpleNamespace(link=None, emulate=None) for _ in range(2)]
        self.worker = SimpleNamespace(stages=self.stages, name=name)
        self.plan = SimpleNamespace(limits=LIMITS, max_model_len=max_model_len)
        self.plans = [self.plan] * 2
        self.num_pages = num_pages

    def new_kv(self) -> KVShards:
        return KVShards([Shard(PagePool(self.num_pages, 8))])


def seconds(parts: Sequence[Part]) -> float:
    return float(shape_of(LIMITS, parts).tokens)


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The instances in turn; after a step of each shape, the second pass alone is undisturbed."""
    names: list[str] = []

    def measure(
        worker: Any, kv: KVShards, limits: Any, steps: Sequence[Any]
    ) -> Iterator[StepPoint]:
        assert kv.num_pages == 64
        names.append(worker.name)
        disturbed = 0.0 if names.count(worker.name) == 3 else 5.0
        for parts in steps:
            yield StepPoint(parts, (seconds(parts) + disturbed, 2.0))

    monkeypatch.setattr(profiles, "measure_steps", measure)
    monkeypatch.setattr(profiles, "profile_key", lambda engine, model: {"of": [engine.name, model]})
    return names


def engine(name: str, **more: Any) -> Any:
    return Engine(name, **more)


def test_what_is_measured() -> None:
    """Prompts of up to 120 tokens, in chunks of 64; a pool of 64 pages of 8."""
    grid = Grid.of(engine("x"))
    assert grid.limits.max_num_batched_tokens == 64
    assert grid.lengths == [16, 31, 46, 61, 75, 90, 105, 120]
    assert grid.prefill(120) == [(0, 64), (64, 56)]
    assert grid.prefill(64) == [(0, 64)]
    # A full chunk after 0, 19, 37 and 56 entries, alone and with the decodes of half the rows,
    # which share the pages that it leaves: 56 of them, or 53, 51 and 49.
    alone = [(p, d, parts) for p, d, parts in grid.mixed if len(parts) == 1]
    assert alone == [(p, 0, ((p, 64),)) for p in (0, 19, 37, 56)]
    mixed = [(p, d) for p, d, parts in grid.mixed if len(parts) > 1]
    most = {0: 111, 19: 103, 37: 95, 56: 95}
    assert mixed == [
        (p, 4 * d)
        for p, last in most.items()
        for d in (0, *(round(last * k / 3) for k in (1, 2, 3)))
    ]
    for p, d, parts in grid.mixed:
        if len(parts) > 1:
            assert parts == (*[(d // 4, 1)] * 4, (p, 60))
    decodes = {parts for parts in grid.others if all(count == 1 for _, count in parts)}
    assert decodes == {((context, 1),) * 8 for context in (0, 32, 63)}
    chunks = [parts for parts in grid.others if len(parts) == 1]
    assert chunks == [((c, 16),) for c in (0, 52, 104)] + [((c, 64),) for c in (0, 28, 56)]
    assert len(set(grid.steps)) == len(grid.steps)


def test_a_small_pool_limits_what_is_measured() -> None:
    """Nine pages of 8, as many as 72 entries: the last token has none."""
    grid = Grid.of(engine("x", num_pages=10))
    assert grid.lengths[-1] == 71
    assert max(start + count for parts in grid.steps for start, count in parts) == 71
    # Where the largest bucket is longer than any prompt, several prompts fill it.
    grid = Grid.of(engine("x", max_model_len=41))
    assert ((0, 40), (0, 24)) in grid.others
    assert ((0, 20), (0, 20), (0, 20), (0, 4)) in grid.others
    # Not more of them than a step has: a quarter of 16 tokens each, in a bucket of 64.
    grid = Grid.of(engine("x", max_model_len=17))
    assert ((0, 4),) * LIMITS.max_chunks in grid.others
    assert max(map(len, grid.steps)) == LIMITS.max_num_seqs


def test_instances_take_turns_and_the_quickest_pass_counts(measured: list[str]) -> None:
    told: list[tuple[str, int]] = []
    given = {name: (engine(name), "model") for name in "xy"}
    found = profile_engines(given, lambda what, left: told.append((what, left)))
    assert measured == ["x", "y"] * 4
    grid = Grid.of(engine("x"))
    steps = len(grid.steps)
    # As long as said: the first step of each shape is run twice in each pass.
    each = [seconds(same[0]) + 5 + 2 for same in grid.by_shape]
    about = 3 * sum(s * (len(same) + 1) for s, same in zip(each, grid.by_shape, strict=True))
    for name, profile in found.items():
        assert profile.key == {"of": [name, "model"]}
        part = f"profiling {name}, about {about:.0f} s"
        left = [number for what, number in told if what == part]
        assert left == list(range(3 * steps, -1, -1))
        assert {point.parts: point.stages for point in profile.points} == {
            parts: (seconds(parts), 2.0) for parts in Grid.of(engine("x")).steps
        }
        # 120 tokens in two chunks: as long as both.
        assert dict(profile.prefills)[120] == (128.0, 4.0)
        assert dict(profile.prefills)[61] == (64.0, 2.0)
        assert all(stages == (64.0, 2.0) for *_, stages in profile.mixed)


class Cluster:
    """Instances by how many times slower their stages are emulated to be."""

    def __init__(self, **slowdowns: list[float]) -> None:
        self.engines = {name: engine(name) for name in slowdowns}
        self._slowdowns = slowdowns
        # An instance named tier only keeps pages.
        instances = {name: SimpleNamespace(computes=name != "tier") for name in slowdowns}
        self.config = SimpleNamespace(instances=instances)

    def slowdowns(self, name: str) -> list[float]:
        return self._slowdowns[name]

    def is_emulated(self, name: str) -> bool:
        return max(self._slowdowns[name]) > 1


def needs(cluster: Cluster, fits: bool) -> Needs:
    given: Any = cluster
    return Needs(given, "model", fits, attention=False)


def test_what_is_emulated_or_fitted_is_profiled() -> None:
    cluster = Cluster(plain=[1.0, 1.0], slow=[1.0, 2.0], linked=[1.0, 1.0], tier=[1.0, 2.0])
    cluster.engines["linked"].worker.stages[1].link = LinkConfig(between=("a", "b"), gb_s=1)
    assert list(needs(cluster, fits=False).engines) == ["slow", "linked"]
    assert list(needs(cluster, fits=True).engines) == ["plain", "slow", "linked"]


def test_times_are_measured_once_and_slowed_down(
    measured: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored, "FOLDER", tmp_path)
    monkeypatch.setattr(profiles, "BUDGET_S", math.inf)
    told: set[str] = set()
    clusters = {"one": Cluster(x=[1.0, 3.0], y=[1.0, 1.0]), "two": Cluster(x=[2.0, 1.0])}
    for cluster in clusters.values():
        cluster.engines["x"].worker.stages[1].link = LinkConfig(between=("a", "b"), gb_s=1)
    given = {name: needs(cluster, fits=True) for name, cluster in clusters.items()}
    fits = prepare_times(given, lambda what, left: told.add(what))
    # What both clusters have is measured for one of them.
    assert {what.split(",")[0] for what in told} == {
        f"{doing} one: {name}"
        for doing in ("timing a step of each shape of", "profiling")
        for name in "xy"
    }
    assert measured == ["x", "y"] * 4
    assert load_profile({"of": ["x", "model"]}) is not None
    # Eq. 3: a full chunk takes as many seconds as tokens in the one stage, two in the other.
    assert fits["one"]["x"].mixed.seconds(0, 0) == pytest.approx(64 + 3 * 2)
    assert fits["two"]["x"].mixed.seconds(0, 0) == pytest.approx(2 * 64 + 2)
    assert fits["one"]["y"].mixed.seconds(0, 0) == pytest.approx(64 + 2)
    # Of a chunk of 16 tokens, a bucket of its own.
    work: Any = SimpleNamespace(work=work_of_parts([(0, 16)]))
    stages = {name: cluster.engines["x"].worker.stages for name, cluster in clusters.items()}
    times = {name: [s.emulate and s.emulate(work) for s in own] for name, own in stages.items()}
    # The first stage of one is as fast as the machine, and nothing comes late to it.
    assert times["one"] == [None, pytest.approx(3 * 2)]
    assert times["two"] == [pytest.approx(2 * 16), pytest.approx(2)]
    assert [s.emulate for s in clusters["one"].engines["y"].worker.stages] == [None, None]
    prepare_times(given, lambda what, left: told.add("again"))
    assert "again" not in told


@pytest.mark.parametrize(("budget_s", "passes"), [(0.0, 1), (1.9, 1), (2.0, 2), (2.9, 2), (3.0, 3)])
def test_as_many_passes_as_there_is_time_for(
    budget_s: float, passes: int, measured: list[str]
) -> None:
    """The budget is counted in passes over all instances, as foretold by a step of each shape."""
    given = {name: (engine(name), "model") for name in "xy"}
    grid = Grid.of(engine("x"))
    pass_s = 2 * sum((seconds(same[0]) + 7) * (len(same) + 1) for same in grid.by_shape)
    profile_engines(given, lambda what, left: None, budget_s=budget_s * pass_s + 1e-6)
    assert measured == ["x", "y"] * (1 + passes)


def test_times_of_steps_alone_need_fewer(
    measured: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half as many or less, of every shape; a system that wants fits has the rest measured."""
    monkeypatch.setattr(stored, "FOLDER", tmp_path)
    full, short = Grid.of(engine("x")), Grid.of(engine("x"), fits=False)
    assert len(short.steps) <= len(full.steps) / 2
    assert set(short.steps) <= set(full.steps)
    assert len(short.by_shape) == len(full.by_shape)
    for steps in short.by_shape:  # Three coefficients, or two of decodes alone.
        features_of = [features(parts) for parts in steps]
        rank = np.linalg.matrix_rank(np.array(features_of))
        assert rank == (2 if steps[0][0][1] == 1 and len(set(steps[0])) == 1 else 3)

    def points(fits: bool) -> int:
        prepare_times({"a": needs(Cluster(x=[1.0, 3.0]), fits)}, lambda what, left: None)
        found = load_profile({"of": ["x", "model"]})
        assert found
        assert found.has_fits == (len(found.points) == len(full.steps))
        return len(found.points)

    assert [points(fits) for fits in (False, True, False)] == [
        len(short.steps),
        len(full.steps),
        len(full.steps),
    ]


@pytest.mark.parametrize("first", [True, False])
def test_fits_that_one_cluster_wants_are_made_whatever_another_needs(
    first: bool, measured: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fit of an instance that both clusters have is made, whichever comes first."""
    monkeypatch.setattr(stored, "FOLDER", tmp_path)
    given = {str(fits): needs(Cluster(x=[1.0, 3.0]), fits) for fits in (first, not first)}
    found = prepare_times(given, lambda what, left: None)
    assert {name: list(fits) for name, fits in found.items()} == {"True": ["x"], "False": []}


def test_the_first_step_of_a_shape_is_run_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first run pays for memory; a neighbour's of the same shape does not."""
    ran: list[tuple[int, ...]] = []

    def run(worker: Any, batch: Any) -> tuple[float, ...]:
        ran.append(tuple(row.count for row in batch.rows))
        return (float(len(ran)),)

    monkeypatch.setattr(measure_module, "_run", run)
    kv = engine("x").new_kv()
    todo = [((0, 16),), ((8, 16),), ((0, 64),), ((0, 1),) * 3, ((8, 1),) * 3]
    nothing: Any = None
    points = list(measure_steps(nothing, kv, LIMITS, todo))
    assert ran == [(16,), (16,), (16,), (64,), (64,), (1, 1, 1), (1, 1, 1), (1, 1, 1)]
    assert [point.stages for point in points] == [(2.0,), (3.0,), (5.0,), (7.0,), (8.0,)]
    assert kv.num_free == kv.num_pages


def test_each_stage_s_own_seconds_are_noted() -> None:
    """The second stage begins a quarter of a second after the first one's end."""
    launched: list[Any] = []

    def launch(batch: Any, origin: float, post: Any) -> None:
        launched.append([(row.start, row.count) for row in batch.rows])
        start = float(len(launched))
        times = [(start, start + 0.5), (start + 0.75, start + 0.875)]
        post(StepDone(batch, [], start, start + 0.875, stages=times))

    worker: Any = SimpleNamespace(launch=launch)
    kv = engine("x").new_kv()
    (point,) = measure_steps(worker, kv, LIMITS, [((8, 1), (0, 16))])
    assert (point.parts, point.stages) == (((8, 1), (0, 16)), (0.5, 0.125))
    assert measure_in_a_row(worker, kv, ((3, 1),), 3) == [0.625] * 3
    assert launched == [[(8, 1), (0, 16)]] * 2 + [[(3, 1)]] * 3
    assert kv.num_free == kv.num_pages
    worker.launch = lambda batch, origin, post: post(Failed("x", ZeroDivisionError("step")))
    with pytest.raises(ZeroDivisionError, match="step"):
        measure_in_a_row(worker, kv, ((3, 1),), 3)
