"""DistServe's Table 2 from another trace, and its goodput with two kinds of kernels."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from statistics import fmean, stdev

from matplotlib.figure import Figure

from jaxinfer.report.pictures import name_lines
from jaxinfer.report.plots import COLOURS
from jaxinfer.workload.arrivals import Arrivals, with_arrivals
from scripts.reproduce.claims import Target, by_amount, by_share, holds
from scripts.reproduce.distserve.model import (
    Data,
    DistServeCluster,
    Shape,
    colocated,
    fixed,
    pair,
    turns,
)
from scripts.reproduce.distserve.requests import (
    LOW,
    RATES,
    TABLE_2,
    attained,
    latencies,
)
from scripts.reproduce.reproduction import Work
from scripts.tables import Row

SEEDS = range(8)
CANDIDATES = (0.1, 0.12, 0.14, 0.16, 0.18, 0.2, 0.22, 0.25)


def table_2(data: Data, trace: Work) -> tuple[float, list[Row], list[Target]]:
    """Return q and the row of Table 2 with it; q is fitted to the last cell."""

    @cache
    def cell(q: float, rate: float) -> list[float]:
        found = []
        for seed in SEEDS:
            arrivals = Arrivals(kind="poisson", rate=3 * rate, seed=seed)
            work = with_arrivals(turns(trace, q, 300, seed), arrivals)
            found.append(attained(latencies(LOW, data, work)))
        return found

    paper = TABLE_2["DistServe-Low"]
    q = min(CANDIDATES, key=lambda q: abs(fmean(cell(q, 4)) - paper[-1]))
    rows, targets = [], []
    for rate, theirs in zip(RATES, paper, strict=True):
        found, kind = cell(q, rate), "calibrated" if rate == 4 else "predicted"
        row = {
            "per GPU": rate,
            "paper": theirs,
            f"ours, q {q:g}": round(fmean(found), 1),
            "standard deviation": round(stdev(found), 1),
        }
        rows.append(row | {f"q {other:g}": round(fmean(cell(other, rate)), 1) for other in (0.02,)})
        claim = f"Table 2, DistServe-Low, {rate:g} per GPU (%)"
        targets.append(by_amount(claim, theirs, fmean(found), 6, "points", kind))  # type: ignore[arg-type]
    return q, rows, targets


# Numbers of draws of lengths and arrivals (one for the long runs); rates at which a search begins;
# and the factor by which the rate may be off before interpolation.
DRAWS, LONG = 3, 1000
LEAST_RATE, FIRST_RATE, PRECISION = 0.01, 0.25, 0.15


@dataclass(frozen=True)
class GoodputCase:
    """A comparison of DistServe with colocation.

    Attributes:
        name: name in tables.
        low: DistServe's cluster.
        vllm: shape of vLLM's instances.
        work: returns a number of requests, drawn with a seed.
        slo: limits of TTFT and TPOT in seconds.
        requests: the artefact's number of requests per GPU.
        artefact: DistServe's goodput per GPU and its ratio to vLLM's in the artefact's later plots.
        paper: smallest and largest ratio to vLLM in the paper's text.
        equal: further shapes that are colocated with equal kernels.
        long: whether to run 1,000 requests per GPU, too.
    """

    name: str
    low: DistServeCluster
    vllm: Shape
    work: Callable[[int, int], Work]
    slo: tuple[float, float]
    requests: int
    artefact: tuple[float, float] | None = None
    paper: tuple[float, float] | None = None
    equal: tuple[Shape, ...] = ()
    long: bool = False


def cases(trace: Work) -> list[GoodputCase]:
    """Return the cases of the paper and of the artefact for which there are coefficients."""

    def of_turns(q: float) -> Callable[[int, int], Work]:
        return lambda count, seed: turns(trace, q, count, seed)

    def equal(prompt: int, output: int) -> Callable[[int, int], Work]:
        return lambda count, seed: fixed(prompt, output, count)

    big = pair("opt-66b", (4, 1), (2, 2))
    return [
        GoodputCase("13B chatbot, turns(.2)", LOW, (1, 1), of_turns(0.2), (0.25, 0.1), 100,
             (2.30, 4.6), (2.0, 3.41), long=True),
        GoodputCase("13B chatbot, turns(.02)", LOW, (1, 1), of_turns(0.02), (0.2, 0.1), 100,
             equal=((2, 1), (4, 1)), long=True),
        GoodputCase("66B chatbot, turns(.02)", big, (4, 1), of_turns(0.02), (0.4, 0.1), 25),
        GoodputCase("66B code, 171/98", big, (4, 1), equal(171, 98), (0.125, 0.2), 50, (1.14, 5.72),
             (3.2, 3.2)),
        GoodputCase("66B summaries, 1738/91", big, (4, 1), equal(1738, 91), (15, 0.15), 50,
             (0.53, 4.24), (4.48, 4.48)),
    ]  # fmt: skip


class Attainments:
    """Percent that meet both limits, by cluster, case, requests per GPU and rate per GPU."""

    def __init__(self, data: Data) -> None:
        self._data = data
        self._found: dict[tuple[DistServeCluster, str, int, float], float] = {}

    def at(self, cluster: DistServeCluster, case: GoodputCase, each: int, rate: float) -> float:
        """Return the mean over several draws."""
        key = cluster, case.name, each, rate
        if key not in self._found:
            found = []
            for seed in range(1 if each == LONG else DRAWS):
                arrivals = Arrivals(kind="poisson", rate=rate * cluster.gpus, seed=seed)
                work = with_arrivals(case.work(each * cluster.gpus, seed), arrivals)
                found.append(attained(latencies(cluster, self._data, work), *case.slo))
            self._found[key] = fmean(found)
        return self._found[key]

    def goodput(self, cluster: DistServeCluster, case: GoodputCase, each: int) -> float:
        """Return the rate per GPU up to which 90 % meet both limits; 0 if they never do."""
        at = partial(self.at, cluster, case, each)
        if at(LEAST_RATE) < 90:
            return 0.0
        low, high = LEAST_RATE, FIRST_RATE
        while at(high) >= 90:
            low, high = high, 1.5 * high
        while high > low * (1 + PRECISION):
            middle = (low + high) / 2
            low, high = (middle, high) if at(middle) >= 90 else (low, middle)
        return low + (high - low) * (at(low) - 90) / (at(low) - at(high))

    def row(self, case: GoodputCase, each: int) -> Row:
        """Return the goodput of DistServe, of vLLM, and of colocation with DistServe's kernels."""
        model = case.low.model
        low = self.goodput(case.low, case, each)
        vllm = colocated(model, case.vllm, kernels="vllm")
        theirs = self.goodput(vllm, case, each)
        equal = {
            shape: self.goodput(colocated(model, shape), case, each)
            for shape in (case.vllm, *case.equal)
        }
        shape, best = max(equal.items(), key=lambda item: item[1])
        return {
            "case": case.name,
            "requests per GPU": each,
            "DistServe": round(low, 2),
            "vLLM's kernels": round(theirs, 2),
            "vLLM at 0.01/s (%)": round(self.at(vllm, case, each, LEAST_RATE), 1),
            "equal kernels": round(equal[case.vllm], 2),
            "best shape, equal": f"{best:.2f} (TP{shape[0]})",
            "ratio, published": _by(low, theirs),
            "ratio, equal": _by(low, best),
        }


def _by(a: float, b: float) -> str:
    return f"{a / b:.2f}" if b else "infinite"


def ratios(
    attainments: Attainments, compared: Sequence[GoodputCase]
) -> tuple[list[Row], list[Target]]:
    """Return ratios of each case, over the artefact's number of requests and 1,000 per GPU."""
    rows, targets = [], []
    for case in compared:
        row = attainments.row(case, case.requests)
        rows.append(row)
        if case.artefact and case.paper:
            low, ratio = case.artefact
            ours, theirs = row["DistServe"], row["vLLM's kernels"]
            claim = f"{case.name}: goodput per GPU, the artefact's plot (requests/s)"
            targets.append(by_share(claim, low, ours, 0.3, "consistency"))
            found = ours / theirs if theirs else math.inf
            claim = f"{case.name}: ratio to vLLM with its own kernels"
            of_artefact = f"{claim}, the artefact's plot"
            targets.append(by_share(of_artefact, ratio, found, 0.3, "consistency"))
            least, most = case.paper
            if least == most:
                targets.append(by_share(claim, least, found, 0.3))
            else:
                met = least <= found <= most
                figures = f"{least:g} to {most:g}"
                targets.append(holds(claim, figures, f"{found:.4g}", met, "within the range"))
        if case.long:
            rows.append(attainments.row(case, LONG))
    return rows, targets


def curves(attainments: Attainments, case: GoodputCase) -> list[Row]:
    """Return attainment by rate."""
    systems = {
        "DistServe": LOW,
        "vLLM's kernels": colocated("opt-13b", (1, 1), kernels="vllm"),
        "equal kernels": colocated("opt-13b", (1, 1)),
    }
    rates = [FIRST_RATE * 1.5**step for step in range(7)]
    return [
        {
            "requests per GPU": each,
            "system": name,
            "per GPU": round(rate, 2),
            "attainment": round(attainments.at(cluster, case, each, rate), 1),
        }
        for each in (100, LONG)
        for name, cluster in systems.items()
        for rate in rates
    ]


def draw_curves(rows: Sequence[Row]) -> Figure:
    """Draw attainment by rate, with a panel for each number of requests."""
    figure = Figure(figsize=(11, 4), layout="constrained")
    numbers = dict.fromkeys(row["requests per GPU"] for row in rows)
    for ax, each in zip(figure.subplots(1, len(numbers), sharey=True), numbers, strict=True):
        here = [row for row in rows if row["requests per GPU"] == each]
        ends, kept = {}, {}
        for colour, name in zip(COLOURS, dict.fromkeys(r["system"] for r in here), strict=False):
            points = [(r["per GPU"], r["attainment"]) for r in here if r["system"] == name]
            ax.plot(*zip(*points, strict=True), "o-", ms=3, color=colour)
            ends[name] = (*points[-1], colour)
            kept[name] = max((rate for rate, share in points if share >= 90), default=0.0)
        rates = [row["per GPU"] for row in here]
        ax.plot([min(rates), max(rates)], [90, 90], color="grey", lw=0.8, ls="--")
        ax.text(min(rates), 89, "90 %", color="0.4", va="top")
        ax.set(xlabel="requests/s per GPU", ylim=(0, 101))
        ax.grid(alpha=0.3)
        name_lines(ax, ends)
        ours, theirs, _ = kept.values()
        ax.set_title(
            f"{each:,} requests per GPU: DistServe keeps 90 %\nup to {ours:g} requests/s, "
            f"vLLM's kernels up to {theirs:g}",
            loc="left",
            fontsize=10,
        )
    figure.axes[0].set_ylabel("requests that meet both targets (%)")
    return figure
