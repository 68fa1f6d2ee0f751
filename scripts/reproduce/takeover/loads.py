"""Takeover's latencies at 80 % of Cronus' rate, for even, random and bursty arrivals."""

from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from statistics import mean
from typing import NamedTuple

from jaxinfer.simulate.run import prepare, serve
from jaxinfer.workload.arrivals import Arrivals, with_arrivals
from jaxinfer.workload.bench_request import BenchRequest
from scripts.reproduce.claims import Target, agrees
from scripts.reproduce.reproduction import Work
from scripts.reproduce.takeover.cases import OURS, Cell, TakeoverRun, cells, systems
from scripts.reproduce.takeover.lengths import CLUSTER, LOADED, drawn
from scripts.tables import Row

# 80 % load: requests arrive at 80 % of the rate that relative Cronus can serve.
LOAD, COUNT, SEEDS = 0.8, 300, (1,)
KINDS = ("even", "poisson", "bursty")
SERVED = ("Cronus", "DP", OURS)
WITH_SLO = f"{OURS} with slo"
MOST_TTFT, MOST_TBT = 1.05, 1.08


class Asked(NamedTuple):
    """A run at a rate; ``slo`` has takeover's targets for TTFT and TBT."""

    cell: Cell
    rate: float
    kind: str
    seed: int
    system: str
    slo: tuple[float, float] | None = None


def uniform(pool: ProcessPoolExecutor) -> list[Row]:
    """Return TTFT and TBT p99 of eight cells of A100+A10 for Cronus, DP and ours.

    Ours also runs with targets, as the comparison with Cronus needs.
    """
    return _rows([cell for cell in cells(CLUSTER) if cell.answer in (128, 512)], pool)


def of_traces(traces: Mapping[str, Work], pool: ProcessPoolExecutor) -> list[Row]:
    """Return the same rows for other lengths on two clusters."""
    return _rows([cell for name in LOADED for cell in drawn(name, traces)], pool)


def _rows(wanted: Sequence[Cell], pool: ProcessPoolExecutor) -> list[Row]:
    rates = list(pool.map(_cronus_rate, wanted))
    each = [
        (cell, rate, kind, seed)
        for cell, rate in zip(wanted, rates, strict=True)
        for kind in KINDS
        for seed in SEEDS
    ]
    found = {name: list(pool.map(_latency, [Asked(*one, name) for one in each])) for name in SERVED}
    slo = [(MOST_TTFT * ttft, MOST_TBT * tbt) for ttft, tbt in found["Cronus"]]
    asked = [Asked(*one, OURS, targets) for one, targets in zip(each, slo, strict=True)]
    found[WITH_SLO] = list(pool.map(_latency, asked))
    return [
        {
            "cluster": cell.cluster,
            "cell": cell.name,
            "rate": round(rate, 3),
            "arrivals": kind,
            "seed": seed,
            "system": name,
            "ttft_p99": round(made[number][0], 5),
            "tbt_p99": round(made[number][1], 6),
        }
        for number, (cell, rate, kind, seed) in enumerate(each)
        for name, made in found.items()
    ]


def _cronus_rate(cell: Cell) -> float:
    """Return the steady rate of Cronus with its relative fits."""
    config = TakeoverRun(cell, *_first(cell, "Cronus"), 0).config()
    made = serve(prepare(config), cell.work(0, cell.count), None)
    assert made.steady_requests_s
    return LOAD * made.steady_requests_s


def _first(cell: Cell, system: str) -> tuple[str, tuple[str, ...]]:
    """Return the first variant of a system."""
    return next(iter(systems(cell.cluster)[system].values()))


def arriving(work: Sequence[BenchRequest], kind: str, rate: float, seed: int) -> Work:
    """Return requests that arrive evenly, at random, or in random bursts."""
    made = {
        "even": {"kind": "interval", "seconds": 1 / rate},
        "poisson": {"kind": "poisson", "rate": rate, "seed": seed},
        "bursty": {"kind": "gamma", "rate": rate, "cv": 4.0, "seed": seed},
    }
    return with_arrivals(work, Arrivals.model_validate(made[kind]))


def _latency(asked: Asked) -> tuple[float, float]:
    cell, rate, kind, seed, system, slo = asked
    file, changes = _first(cell, system)
    if slo:
        changes = (*changes, f"system.slo={{ttft: {slo[0]}, tbt: {slo[1]}}}")
    work = arriving(cell.work(seed, COUNT), kind, rate, seed)
    made = serve(prepare(TakeoverRun(cell, file, changes, 0).config()), work, None)
    assert made.ttft_p99 is not None
    assert made.tbt_p99 is not None
    return made.ttft_p99, made.tbt_p99


def claims(where: str, rows: Sequence[Row]) -> list[Target]:
    """Return claims that compare ours with Cronus by arrivals; ratios are means over runs."""
    return [claim for kind in KINDS for claim in _claims(f"80 % load, {where}, {kind}", rows, kind)]


def _claims(said: str, rows: Sequence[Row], kind: str) -> list[Target]:
    found: dict[tuple[str, str], dict[tuple[str, str], Row]] = {}
    for row in rows:
        if row["arrivals"] == kind:
            cell = found.setdefault((str(row["cluster"]), str(row["cell"])), {})
            cell[str(row["seed"]), str(row["system"])] = row
    made = []
    for figure, most in (("ttft_p99", MOST_TTFT), ("tbt_p99", MOST_TBT)):
        ratios = [mean(_ratios(cell, OURS, figure)) for cell in found.values()]
        over = sum(ratio > most for ratio in ratios)
        made.append(
            agrees(
                f"{said}: takeover's {figure} by Cronus', {len(ratios)} cells",
                f"{over} above {most}; mean {mean(ratios):.2f}, most {max(ratios):.2f}",
                over == 0,
                f"at most {most} in each",
            )
        )
    ttft, tbt = (
        [each for cell in found.values() for each in _ratios(cell, WITH_SLO, figure)]
        for figure in ("ttft_p99", "tbt_p99")
    )
    kept = [a <= MOST_TTFT and b <= MOST_TBT for a, b in zip(ttft, tbt, strict=True)]
    made.append(
        agrees(
            f"{said}: slo of {MOST_TTFT} and {MOST_TBT} times Cronus' p99, both kept",
            f"in {sum(kept)} of {len(kept)} runs; most {max(ttft):.2f} and {max(tbt):.2f}",
            all(kept),
            "in each, as Cronus keeps them",
        )
    )
    return made


def _ratios(cell: Mapping[tuple[str, str], Row], system: str, figure: str) -> list[float]:
    """Return the ratios of a system's figure to Cronus', for each run of a cell."""
    seeds = dict.fromkeys(seed for seed, _ in cell)
    return [
        float(cell[seed, system][figure]) / float(cell[seed, "Cronus"][figure]) for seed in seeds
    ]
