"""Cronus' calibration: each number is chosen so that one figure of the paper is reproduced."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from scipy.optimize import brentq

from jaxinfer.hardware.catalogue import find_gpu, find_model
from scripts.reproduce.cronus.cases import (
    MODELS,
    SETUPS,
    TABLE_3,
    CronusCase,
    numbers,
    paper,
    throughput,
)
from scripts.reproduce.reproduction import Work

Costs = tuple[tuple[str, float], ...]


def solve(figure: Callable[[float], float], target: float, low: float, high: float) -> float:
    """Find the point at which a monotonic figure meets its target."""
    found = brentq(lambda x: figure(x) - target, low, high, xtol=5e-4 * (high - low), rtol=1e-3)
    return float(f"{found:.4g}")


def capacity(setup: str, column: int, approach: str) -> float:
    """Return a stage's capacity: the system's throughput divided by the stage's share of it."""
    return paper(approach, setup) / (TABLE_3[setup][column] / 100)


def mean_capacity(model: str, column: int, approach: str) -> float:
    """Return the capacity of the A100, as a mean over both setups."""
    found = [capacity(s, column, approach) for s, (_, name) in SETUPS.items() if name == model]
    return sum(found) / len(found)


def calibrate(work: Work) -> dict[str, Any]:
    """Fit all numbers.

    They are fitted to the disaggregated rows and Table 3; the hop is fitted to one cell of PP.
    """
    prompts = [replace(item, max_tokens=1) for item in work]

    def prefills(model: str, flops: float) -> float:
        return throughput(_prefill_only(model, flops), prompts)

    high_flops = {
        model: solve(partial(prefills, model), mean_capacity(model, 0, "Disagg. H-L"), 0.2, 1.0)
        for model in MODELS
    }
    bandwidth, sequence_s = _engine(work)
    engine = (("bandwidth", bandwidth), ("sequence_s", sequence_s))
    costs: dict[str, Any] = {"engine": dict(engine), "high": {}, "low": {}}
    for model in MODELS:
        costs["high"][model] = {"flops": high_flops[model]}
    for setup, (low, model) in SETUPS.items():
        high = (*engine, ("groups.high.flops", high_flops[model]))
        at = partial(_with, setup, work)
        figure = partial(at, "disaggregated_low_high", high, "groups.low.flops")
        flops = solve(figure, paper("Disagg. L-H", setup), 0.2, 1.0)
        known = (*high, ("groups.low.flops", flops))
        figure = partial(at, "disaggregated_high_low", known, "groups.low.reserve_gb")
        most = _largest_reserve(low, model)
        reserve = solve(figure, paper("Disagg. H-L", setup), 0.0, most)
        costs["low"].setdefault(low, {})[model] = {"flops": flops, "reserve_gb": reserve}
    first = next(iter(SETUPS))
    fitted = numbers(costs, first)
    costs["hop_s"] = solve(
        lambda x: throughput(CronusCase(first, "pipeline_parallel", (*fitted, ("hop_s", x))), work),
        paper("PP+Chunked", first),
        0.0,
        0.5,
    )
    return costs


def _with(setup: str, work: Work, system: str, costs: Costs, name: str, value: float) -> float:
    """Return the requests per second with one additional cost."""
    return throughput(CronusCase(setup, system, (*costs, (name, value))), work)


def _largest_reserve(low: str, model: str) -> float:
    """Return the GB that leave room for the KV of one request of 8,192 tokens."""
    shape = find_model(MODELS[model])
    layers = shape.num_hidden_layers
    taken = 2 * shape.parameters(layers, True, True) + 8192 * shape.kv_bytes(layers, 2)
    return 0.9 * find_gpu(low).memory_gb - taken / 1e9


def _prefill_only(model: str, flops: float) -> CronusCase:
    setup = next(s for s, (_, name) in SETUPS.items() if name == model)
    return CronusCase(setup, "disaggregated_high_low", (("groups.high.flops", flops),))


def _engine(work: Work) -> tuple[float, float]:
    """Return the bandwidth and seconds per sequence that give the A100's decode capacity.

    They fit both models.
    """

    def per_sequence(model: str, bandwidth: float) -> float:
        return solve(
            lambda x: throughput(_decode_only(model, bandwidth, x), work),
            mean_capacity(model, 3, "Disagg. L-H"),
            0.0,
            0.0004,
        )

    def apart(bandwidth: float) -> float:
        return per_sequence("LLaMA3-8B", bandwidth) - per_sequence("Qwen2-7B", bandwidth)

    bandwidth = solve(apart, 0.0, 0.45, 0.9)
    both = [per_sequence(model, bandwidth) for model in MODELS]
    return bandwidth, round(sum(both) / 2, 6)


def _decode_only(model: str, bandwidth: float, sequence_s: float) -> CronusCase:
    """Return a case of decodes on the A100, with a GPU for prompts that is never the limit."""
    setup = next(s for s, (_, name) in SETUPS.items() if name == model)
    costs = (("bandwidth", bandwidth), ("sequence_s", sequence_s), ("groups.low.flops", 1.0))
    return CronusCase(setup, "disaggregated_low_high", costs, ("groups.low.kind=H200",))
