"""Steps whose ends are planned come to the figures and times of the same steps one by one."""

from itertools import accumulate
from random import Random
from typing import Any

import pytest
from same_runs import outcome

from jaxinfer.config.run_file import as_run_file
from jaxinfer.serving.batch import Work
from jaxinfer.simulate.costs.model import CostModel, decode_seconds
from jaxinfer.simulate.run import prepare
from jaxinfer.simulate.runs import DecodeRuns
from jaxinfer.workload.bench_request import BenchRequest

# Those of one length make instances end steps at the same time, again and again.
FIXED = {
    "phases": {
        "prefill": {"step_s": 0.0625, "token_s": 0.0, "pair_s": 0.0},
        "decode": [{"step_s": 0.03125, "context_s": 0.0, "sequence_s": 0.0}],
    }
}
SYSTEMS = [
    {"name": "least_loaded", "choose": "round_robin"},
    {"name": "least_loaded", "load": "tokens"},
    {"name": "least_loaded", "choose": "power_of_two"},
]


def random_run(seed: int) -> tuple[dict[str, Any], list[BenchRequest]]:
    """Long answers on one to six alike instances, with few pages or many."""
    rng = Random(seed)
    page_size, answer = rng.choice((1, 4, 16)), rng.choice((20, 150, 600))
    caching = rng.random() < 0.5
    data = {
        "model": "llama-3-8b",
        "engine": {
            "page_size": page_size,
            "num_pages": rng.choice((3, 8, 50)) * (answer + 60) // page_size + 3,
            "max_num_seqs": rng.choice((2, 8, 64)),
            "max_num_batched_tokens": 128,
            "max_model_len": answer + 80,
            "enable_prefix_caching": caching,
            "launch_ahead": rng.random() < 0.5,
        },
        "groups": {"g": {"kind": "L4", "replicas": rng.randint(1, 6)}},
        "system": rng.choice(SYSTEMS),
        "simulate": rng.choice((FIXED, {})),
    }
    data["instances"] = {"e": {"group": "g", "replicas": data["groups"]["g"]["replicas"]}}
    apart = rng.choice((0.03125, 0.5, 4.0))
    work = []
    for number in range(40):
        begin = [rng.randint(0, 2)] * rng.randint(0, 30) if caching else []
        prompt = begin + [number] * rng.randint(1, 20)
        at = rng.randint(0, 40) * apart
        work.append(BenchRequest(prompt, len(prompt), rng.randint(1, answer), at))
    return data, work


def check(seed: int, monkeypatch: pytest.MonkeyPatch) -> int:
    """Compare one run; return how many steps ended as planned."""
    planned, plan = 0, DecodeRuns._plan

    def counted(runs: DecodeRuns, *given: Any) -> bool:
        nonlocal planned
        done = plan(runs, *given)
        planned += done
        return done

    data, work = random_run(seed)
    config = as_run_file(data)
    monkeypatch.setattr(DecodeRuns, "_plan", counted)
    assert outcome(config, work, False) == outcome(config, work, True), f"seed {seed}"
    return planned


def test_some_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    assert sum(check(seed, monkeypatch) for seed in range(8)) > 100


@pytest.mark.slow
def test_300_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    assert sum(check(seed, monkeypatch) for seed in range(8, 308)) > 10_000


def one_by_one(cost: CostModel, end: float, rows: int, seen: int, count: int) -> list[float]:
    ends = [end]
    for _ in range(count):
        ends.append(ends[-1] + cost.stages(Work(rows, rows, rows, rows, seen, [], rows))[0])
        seen += rows
    return ends


@pytest.mark.parametrize("costs", [FIXED, {}], ids=["phases", "roofline"])
@pytest.mark.parametrize("model", ["llama-3-8b", "mixtral-8x7b"])
def test_times_of_many_steps_are_those_of_each(model: str, costs: dict[str, Any]) -> None:
    data, _ = random_run(0)
    data["groups"]["g"] |= {"kind": "H100-SXM", "replicas": 1, "devices": 2}
    data["instances"]["e"]["replicas"] = 1
    instances = prepare(as_run_file(data | {"model": model, "simulate": costs})).instances
    cost, rng = next(iter(instances.values())).cost, Random(0)
    for _ in range(300):
        rows, seen, count = rng.randint(1, 256), rng.randint(300, 300_000), rng.randint(1, 200)
        end = rng.random() * 1e4
        times = decode_seconds(cost, rows)(range(seen, seen + rows * count, rows))
        assert list(accumulate(times, initial=end)) == one_by_one(cost, end, rows, seen, count)
