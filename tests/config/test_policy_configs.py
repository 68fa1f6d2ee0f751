"""The run files of policies: one cluster and workload, and steps as their policies form them."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from jaxinfer.config.run_file import load_run_file
from jaxinfer.report.records import RunRecord, read_run
from jaxinfer.simulate.run import simulate

FOLDER = Path(__file__).parents[2] / "configs" / "policies"
NAMES = sorted(path.stem for path in FOLDER.glob("*.yaml"))
COUNT = 100


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, RunRecord]:
    """So many requests, which come so fast that they wait for seats and pages."""
    settings = [
        f"workload.limit={COUNT}",
        "workload.arrivals={kind: poisson, rate: 20}",
        "engine.num_pages=2600",
    ]
    found = {}
    for name in NAMES:
        config = load_run_file(FOLDER / f"{name}.yaml", settings)
        folder = tmp_path_factory.mktemp(name)
        simulate(config, config.requests(), folder)
        found[name] = read_run(folder / "1", name)
    return found


def test_they_differ_in_policies_and_budget_alone() -> None:
    def common(name: str) -> dict[str, Any]:
        found = load_run_file(FOLDER / f"{name}.yaml").model_dump()
        for engine in (found["engine"], *found["instances"].values()):
            del engine["policies"], engine["max_num_batched_tokens"]
        return found

    assert all(common(name) == common(NAMES[0]) for name in NAMES)


def test_all_requests_are_served(runs: dict[str, RunRecord]) -> None:
    for run in runs.values():
        assert len(run.requests) == COUNT
        assert not any(request.error for request in run.requests)


def test_steps_are_what_policies_say(runs: dict[str, RunRecord]) -> None:
    def mixed(name: str) -> int:
        return sum(bool(s.prefill_tokens and s.decode_tokens) for s in runs[name].steps)

    assert mixed("mixed") > 0
    assert mixed("whole_prompts") > 0
    assert mixed("prefill_first") == 0
    for step in runs["mixed"].steps:
        assert step.prefill_tokens + step.decode_tokens <= 512


def test_whole_prompts_are_not_cut(runs: dict[str, RunRecord]) -> None:
    lengths = sorted(request.prompt_len for request in runs["prefill_first"].requests)
    for name in ("prefill_first", "whole_prompts"):
        # A prompt alone may be longer than the limit, so no step has more than the longest.
        most = {"prefill_first": 4096, "whole_prompts": 2048}[name]
        tokens = [s.prefill_tokens for s in runs[name].steps if s.prefill_tokens]
        assert max(tokens) <= max(most, lengths[-1])
        assert len(tokens) <= COUNT + sum(r.preemptions for r in runs[name].requests)


def test_admissions_preempt_nobody(runs: dict[str, RunRecord]) -> None:
    for name in ("mixed_peak", "whole_prompts", "one_batch"):
        assert not any(request.preemptions for request in runs[name].requests)
    assert any(request.preemptions for request in runs["mixed"].requests)


def test_a_batch_stays_together(runs: dict[str, RunRecord]) -> None:
    requests = sorted(runs["one_batch"].requests, key=lambda r: r.token_times[0])
    batches = [[requests[0]]]
    for request in requests[1:]:
        if request.token_times[0] < max(r.token_times[-1] for r in batches[-1]):
            batches[-1].append(request)
        else:
            batches.append([request])
    assert len(batches) > 1
    for before, after in pairwise(batches):
        started = min(r.first_scheduled for r in after if r.first_scheduled is not None)
        assert started >= max(r.token_times[-1] for r in before)


def test_the_shortest_prompt_is_next(runs: dict[str, RunRecord]) -> None:
    def waited(name: str, short: bool) -> float:
        run = sorted(runs[name].requests, key=lambda r: r.prompt_len)
        some = run[: COUNT // 3] if short else run[-COUNT // 3 :]
        return sum(r.first_scheduled - r.arrival for r in some if r.first_scheduled is not None)

    assert waited("mixed_shortest", short=True) < waited("mixed", short=True)
    assert waited("mixed_shortest", short=False) > waited("mixed", short=False)
