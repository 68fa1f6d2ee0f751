"""Hetis' dispatch compared with linear programs, and the time that it takes.

The paper solves one linear program for all new requests, and does not say how it rounds.
"""

import random
import statistics
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from scipy.optimize import linprog

from jaxinfer.papers.hetis.head_dispatch import DeviceLoad, dispatch
from jaxinfer.papers.hetis.system import Hetis
from jaxinfer.serving.step_fit import AttentionFit
from scripts.reproduce.claims import agrees
from scripts.reproduce.hetis.cases import (
    PRIMARIES,
    SEVENTY,
    THIRTEEN,
    TWO,
    cluster,
    hetis,
    modelled,
)
from scripts.reproduce.reproduction import Inputs, Part
from scripts.tables import Row

SETS, ROOM = 12, 10**7


def fits(model: str, layers: Any, attention: Any) -> list[AttentionFit]:
    """Return the fits of the devices of a cluster's first stage."""
    shards = modelled(cluster(model, layers, attention, hetis())).shards
    return [shard.cost.fit for shard in shards if shard.stage == 0 and shard.cost]


def by_program(
    loads: Sequence[DeviceLoad], requests: Sequence[tuple[int, float]], used: Sequence[bool]
) -> tuple[float, np.ndarray] | None:
    """Solve eqs. 5 to 7 relaxed; return the slowest device's time, and shares of slices.

    Args:
        requests: number of slices of each request, and entries of each slice.
    """
    D, R = len(loads), len(requests)
    above, most = np.zeros((2 * D, D * R + 1)), np.zeros(2 * D)
    for i, load in enumerate(loads):
        fit = load.fit
        pair = fit.per_pair + fit.exchange_per_pair
        for j, (_, entries) in enumerate(requests):
            above[i, i * R + j] = pair + fit.per_entry * entries
            above[D + i, i * R + j] = entries
        above[i, -1] = -1
        there = pair * load.pairs + fit.per_entry * load.entries
        most[i] = -(there + (fit.constant + fit.exchange) * used[i])
        most[D + i] = load.free_pages * load.page_size
    each = np.zeros((R, D * R + 1))
    for j in range(R):
        each[j, j : D * R : R] = 1
    bounds = [(0, None if used[i] else 0) for i in range(D) for _ in range(R)] + [(0, None)]
    scale = 1e6  # Seconds of a layer are small relative to the solver's tolerances.
    above[:D, :-1], most[:D] = above[:D, :-1] * scale, most[:D] * scale
    slices = [float(count) for count, _ in requests]
    cost = np.append(np.zeros(D * R), 1.0)
    found = linprog(cost, above, most, each, slices, bounds, method="highs")
    if not found.success:
        return None
    return found.fun / scale, found.x[:-1].reshape(D, R)


def best_program(
    loads: Sequence[DeviceLoad], requests: Sequence[tuple[int, float]]
) -> tuple[float, np.ndarray] | None:
    """Return the best solution over sets of used devices.

    A set has all devices with load, and the first few of the others. Without such sets, the
    constant time of an idle device would always count.
    """
    idle = [i for i, load in enumerate(loads) if not load.pairs]
    tried = [
        by_program(loads, requests, [i not in idle[count:] for i in range(len(loads))])
        for count in range(len(idle) + 1)
    ]
    return min((each for each in tried if each), key=lambda each: each[0], default=None)


def rounded(shares: np.ndarray, slices: int) -> list[int]:
    """Round to whole slices: down, and then up for the largest remainders."""
    counts = np.floor(shares + 1e-9).astype(int)
    by_rest = np.argsort(counts - shares, kind="stable")
    for i in by_rest[: slices - counts.sum()]:
        counts[i] += 1
    return [int(count) for count in counts]


class ByProgram(Hetis):
    """Hetis with a linear program for each request, solved by HiGHS and rounded."""

    def _dispatch(
        self, loads: Sequence[DeviceLoad], slices: int, entries: float, pages: int
    ) -> list[int] | None:
        found = best_program(loads, [(slices, entries)])
        counts = rounded(found[1][:, 0], slices) if found else None
        if counts is None or any(
            load.free_pages < count * pages for load, count in zip(loads, counts, strict=True)
        ):
            return super()._dispatch(loads, slices, entries, pages)
        return counts


def placed(loads: Sequence[DeviceLoad], counts: Sequence[int], entries: float) -> list[DeviceLoad]:
    """Return the loads with one more request."""
    return [load.plus(n, entries, 1) for load, n in zip(loads, counts, strict=True)]


def compared(inputs: Inputs) -> Part:
    """Requests on empty devices: greedy one by one, the rounded program, and its bound."""
    rows, worst, slowest = list[Row](), 0.0, 0.0
    cases = {
        "13B, one A100 and two 3090": (fits(THIRTEEN, (("one", None),), TWO), 40, 9_000),
        "70B, four A100, four P100": (fits(SEVENTY, PRIMARIES, ("p",)), 8, 90_000),
    }
    for case, (devices, slices, longest) in cases.items():
        for count in (1, 4, 16):
            by_greedy, by_rounding, ms, ms_program = [], [], list[float](), list[float]()
            for seed in range(SETS):
                draw = random.Random(seed)
                requests = [(slices, float(draw.randint(200, longest))) for _ in range(count)]
                empty = [DeviceLoad(fit, 0, 0.0, ROOM) for fit in devices]
                start = time.process_time()
                found = best_program(empty, requests)
                ms_program.append(1e3 * (time.process_time() - start))
                assert found
                loads = others = empty
                for j, (_, entries) in enumerate(requests):
                    start = time.process_time()
                    counts = dispatch(loads, slices, entries, 1)
                    ms.append(1e3 * (time.process_time() - start))
                    assert counts
                    loads = placed(loads, counts, entries)
                    others = placed(others, rounded(found[1][:, j], slices), entries)
                by_greedy.append(max(load.seconds for load in loads) / found[0])
                by_rounding.append(max(load.seconds for load in others) / found[0])
            slowest = max(slowest, max(ms))
            if count == 16:  # With few slices, whole numbers do not come near the bound.
                worst = max(worst, *by_greedy)
            rows.append(
                {
                    "devices": case,
                    "requests": count,
                    "greedy / bound, mean": round(statistics.mean(by_greedy), 4),
                    "worst": round(max(by_greedy), 4),
                    "program rounded / bound, mean": round(statistics.mean(by_rounding), 4),
                    "its worst": round(max(by_rounding), 4),
                    "ms a call, median": round(statistics.median(ms), 2),
                    "most": round(max(ms), 2),
                    "ms a program": round(statistics.median(ms_program), 1),
                }
            )
    return Part(rows, [
        agrees("16 requests: greedy is near the linear program's bound",
               f"{100 * (worst - 1):.1f} % at most", worst <= 1.05, "within 5 %"),
        agrees("a call of the dispatch takes little time",
               f"{slowest:.2f} ms of CPU at most", slowest < 2, "less than 2 ms"),
    ])  # fmt: skip
