"""Random clusters, systems and workloads keep the invariants of the modelled world."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
from random_clusters import SYSTEMS, random_run

from jaxinfer import JaxinferError
from jaxinfer.config.run_file import as_run_file
from jaxinfer.report.metrics import RunMetrics
from jaxinfer.serving.loop import ServingLoop
from jaxinfer.serving.request_state import RequestState
from jaxinfer.serving.world import StepDone
from jaxinfer.simulate import run
from jaxinfer.simulate.cluster import ModelledCluster
from jaxinfer.workload.bench_request import BenchRequest


class Served:
    """A run, and all that was heard of it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seed: int, rows: bool = False) -> None:
        data, self.work = random_run(seed)
        self.cluster = run.prepare(as_run_file(data))
        self.site = self.cluster.resolved
        self.steps: list[StepDone] = []
        self.times: dict[str, tuple[float, list[float]]] = {}
        loops: list[ServingLoop] = []

        class Loop(ServingLoop):
            def __init__(self, *given: Any) -> None:
                super().__init__(*given)
                loops.append(self)

        def ended(request: RequestState, times: Sequence[float]) -> None:
            assert request.id not in self.times, "a request ends once"
            self.times[request.id] = request.arrival, list(times)

        with monkeypatch.context() as patch:
            patch.setattr(run, "ServingLoop", Loop)
            if rows:
                patch.setattr(type(self.site.new_system()), "needs_decode_rows", True)
            given = self.cluster, self.work, None, ended
            self.metrics: RunMetrics = run.serve(*given, on_step=self.steps.append)
        (self.loop,) = loops


def check_requests(work: Sequence[BenchRequest], served: Served) -> None:
    """Each is served once and in whole, not before it is there."""
    assert len(served.times) == len(work)
    for name, (arrival, times) in served.times.items():
        assert len(times) == work[int(name)].max_tokens
        assert arrival <= times[0]
        assert times == sorted(times)
    if most := sum(not item.after_ends for item in work) * any(i.after_ends for i in work):
        ends = [(times[-1], -1) for _, times in served.times.values()]
        level = 0
        for _, change in sorted([*ends, *((arrival, 1) for arrival, _ in served.times.values())]):
            level += change
            assert level <= most


def check_steps(cluster: ModelledCluster, served: Served) -> None:
    """Steps of a stage follow each other, and keep budget, seats and pool."""
    last: dict[tuple[str, int], float] = {}
    assert all(a.end <= b.end for a, b in pairwise(served.steps))
    for done in served.steps:
        batch, work = done.batch, done.batch.work
        instance = cluster.instances[batch.instance]
        for stage, (start, end) in enumerate(done.stages or [(done.start, done.end)]):
            assert last.get((batch.instance, stage), 0.0) <= start + 1e-9
            assert start <= end
            last[batch.instance, stage] = end
        assert done.start < done.end
        assert 0 < work.tokens <= instance.config.max_num_batched_tokens
        assert work.sequences <= instance.config.max_num_seqs
        assert batch.pages_in_use <= instance.pool_pages


def check_end(served: Served) -> None:
    """All is computed once where nothing was preempted, and nothing is left behind."""
    prompts = sum(item.prompt_len for item in served.work)
    outputs = sum(item.max_tokens for item in served.work)
    decodes = sum(done.batch.work.decodes for done in served.steps)
    prefill = sum(done.batch.work.tokens for done in served.steps) - decodes
    if not served.metrics.preemptions:
        assert prefill + served.metrics.cached_tokens == prompts
        assert decodes == outputs - len(served.work)
    assert served.metrics.output_tokens == outputs
    for instance in served.loop.assignments.instances.values():
        for shard in instance.kv.shards:
            assert shard.pool.num_free == shard.pool.num_usable
            assert not shard.pool.num_pinned
        assert not instance.num_requests
        assert not instance.num_exported
        assert not any(instance.counts)


def check(monkeypatch: pytest.MonkeyPatch, seed: int) -> str:
    """The system of a run that was checked, by groups of decodes and by rows; else the refusal."""
    try:
        served = Served(monkeypatch, seed)
    except JaxinferError as error:
        return str(error)
    check_requests(served.work, served)
    check_steps(served.cluster, served)
    check_end(served)
    assert Served(monkeypatch, seed, rows=True).times == served.times
    return SYSTEMS[seed % len(SYSTEMS)]


@pytest.mark.parametrize("first", range(len(SYSTEMS)), ids=SYSTEMS)
def test_invariants_of_the_modelled_world(first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    found = [check(monkeypatch, first + len(SYSTEMS) * n) for n in range(3)]
    assert SYSTEMS[first] in found, found


@pytest.mark.slow
@pytest.mark.parametrize("first", range(len(SYSTEMS)), ids=SYSTEMS)
def test_invariants_of_300_random_runs(first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    found = [check(monkeypatch, first + len(SYSTEMS) * n) for n in range(3, 27)]
    assert found.count(SYSTEMS[first]) >= 12, found
