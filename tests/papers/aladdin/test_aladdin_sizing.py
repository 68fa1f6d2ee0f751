"""Aladdin's eq. 6 against workers that are simulated with as many requests as they can have."""

import pytest

from jaxinfer.config.run_file import RunFile, as_run_file
from jaxinfer.papers.aladdin.sizing import MeanRequest, most_tokens
from jaxinfer.serving.step_fit import DecodeFit
from jaxinfer.simulate.cluster import fit_instance
from jaxinfer.simulate.run import prepare, simulate
from jaxinfer.workload.lengths import BenchRequest

PROMPT, OUTPUT = 40, 60
# Seconds by KV entry, by sequence, and of each iteration; prompts take next to nothing.
CONTEXT_S, SEQUENCE_S, STEP_S = 2e-6, 2e-4, 0.01


def worker(num_pages: int, gpus: int = 1) -> RunFile:
    costs = {
        "prefill": {"step_s": 1e-9, "token_s": 0.0, "pair_s": 0.0},
        "decode": [{"step_s": STEP_S, "context_s": CONTEXT_S, "sequence_s": SEQUENCE_S}],
    }
    return as_run_file({
        "model": "llama-3-8b",
        "engine": {"page_size": 1, "num_pages": num_pages, "max_num_seqs": 512, "watermark": 0.0,
                   "max_num_batched_tokens": 4096, "max_model_len": 128, "launch_ahead": False,
                   "enable_prefix_caching": False,
                   "policies": {"batching": "prefill_first", "admit": "peak"}},
        "groups": {"g": {"kind": "A100-80G-SXM", "devices": gpus}},
        "instances": {"w": {"group": "g"}},
        "system": "single",
        "simulate": {"phases": costs},
    })  # fmt: skip


def serve(config: RunFile, count: int) -> tuple[float, float]:
    """Seconds of all, and of the slowest request's mean gap."""
    gaps = []

    def note(request: object, times: list[float]) -> None:
        gaps.append((times[-1] - times[0]) / (len(times) - 1))

    work = [BenchRequest(None, PROMPT, OUTPUT, 0.0) for _ in range(count)]
    wall = simulate(config, work, None, note).wall_s  # type: ignore[arg-type]
    return wall, max(gaps)


def eq6(config: RunFile, atgt_s: float) -> tuple[float, float]:
    """Return the worker's output tokens per second, as limited by memory and by the target."""
    cluster = prepare(config)
    room = cluster.instances["w"].num_tokens
    fit = fit_instance(cluster.instances["w"], relative=True).decode
    assert fit
    assert fit.per_context == pytest.approx(CONTEXT_S, rel=1e-6)
    assert fit.per_sequence == pytest.approx(SEQUENCE_S, rel=1e-6)
    assert fit.constant == pytest.approx(STEP_S, rel=1e-6)
    mean = MeanRequest.of([BenchRequest(None, PROMPT, OUTPUT, 0.0)])
    found = most_tokens(fit, 1, room, mean, atgt_s)
    return found.by_memory, found.by_target


@pytest.mark.parametrize("atgt_s", [0.015, 0.02, 0.03])
def test_the_largest_batch_that_keeps_the_target(atgt_s: float) -> None:
    """Requests decode together: their mean gap is that of the mean context, as in eq. 6."""
    config = worker(40_000)
    _, by_target = eq6(config, atgt_s)
    low, high = 1, 512
    while high - low > 1:
        batch = (low + high) // 2
        low, high = (batch, high) if serve(config, batch)[1] <= atgt_s else (low, batch)
    assert low == pytest.approx(by_target * atgt_s, abs=1)
    wall, _ = serve(config, low)
    assert low * OUTPUT / wall == pytest.approx(by_target, rel=0.05)


@pytest.mark.parametrize("num_pages", [2001, 8001])
def test_a_saturated_worker_has_the_tokens_that_its_memory_allows(num_pages: int) -> None:
    """Twenty times as many requests as fit: the pool is full but for what (e) keeps for growth."""
    config = worker(num_pages)
    by_memory, _ = eq6(config, 1.0)
    count = 20 * num_pages // (PROMPT + OUTPUT // 2)
    wall, _ = serve(config, count)
    assert 0.78 * by_memory < count * OUTPUT / wall <= by_memory * 1.005


def test_the_least_of_both_holds() -> None:
    fit = DecodeFit(CONTEXT_S, SEQUENCE_S, STEP_S)
    mean = MeanRequest(70.0, 60.0)
    small, large = (most_tokens(fit, 1, room, mean, 0.02) for room in (700, 70_000))
    assert small.least == small.by_memory < small.by_target == large.least < large.by_memory
