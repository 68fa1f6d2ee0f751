"""``any_system`` compared with fixed systems, and the best way to share a pair by load."""

from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from statistics import fmean
from textwrap import fill
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from jaxinfer.config.run_file import RunFile, as_run_file
from jaxinfer.lab.plan.planners.any_system import AnySystem, AnySystemOptions
from jaxinfer.lab.plan.problem import Problem, merge
from jaxinfer.lab.plan.search import DrivenSearch
from jaxinfer.options.validation import read_yaml
from jaxinfer.report.pictures import name_lines
from jaxinfer.report.plots import COLOURS
from jaxinfer.simulate.capacity import capacity
from jaxinfer.simulate.read_targets import read_targets
from jaxinfer.simulate.run import simulate
from jaxinfer.workload.arrivals import Arrivals, with_arrivals
from jaxinfer.workload.lengths import BenchRequest
from scripts.reproduce.claims import Target, agrees
from scripts.tables import CONFIGS, Row

FOLDER = CONFIGS / "cronus"
SYSTEMS = (
    "cronus",
    "data_parallel",
    "pipeline_parallel",
    "disaggregated_high_low",
    "disaggregated_low_high",
)
LOWS = ("A10", "A30")
SLO = "ttft:p90=2,tbt:p99=0.2"
CHUNKS = (256, 512, 1024)
# Seeds of arrivals: the planner searches with the first three, and all are compared with the
# others.
SEARCHED, COMPARED = 3, (3, 4, 5)


def common(low: str) -> dict[str, Any]:
    """Return the settings of all run files of a pair: Llama 3 8B, groups and calibrated costs."""
    costs = read_yaml(FOLDER.with_name("cronus_calibration.yaml"))
    groups = {"high": costs["high"]["LLaMA3-8B"], "low": costs["low"][low]["LLaMA3-8B"]}
    return {
        "model": "llama-3-8b",
        "simulate": {**costs["engine"], "hop_s": costs["hop_s"], "groups": groups},
    }


def fixed(system: str, low: str) -> RunFile:
    """Return a run file of ``configs/cronus/`` for a pair; ``single`` is its A100 alone."""
    alone = system == "single"
    data = merge(read_yaml(FOLDER / f"{'data_parallel' if alone else system}.yaml"), common(low))
    if alone:
        data["system"] = "single"
        for part in (data["groups"], data["instances"], data["simulate"]["groups"]):
            del part["low"]
    else:
        data["groups"]["low"]["kind"] = low
    return as_run_file(data)


def chosen(
    low: str, trace: str, count: int, pool: ProcessPoolExecutor
) -> tuple[RunFile, dict[str, Any]]:
    """Return the choice of ``any_system`` on a pair, and facts about its search."""
    axes: dict[str, list[Any]] = {
        "groups.low.kind": [low],
        "engine.max_num_batched_tokens": list(CHUNKS),
    }
    files: dict[str, Any] = {str(FOLDER / f"{system}.yaml"): {} for system in SYSTEMS}
    problem = Problem.model_validate(
        {
            "planner": {"name": "any_system", "files": files, "axes": axes},
            "goal": {"maximise": "cluster", "slo": SLO, "seeds": SEARCHED, "at_once": 2},
            "run": {**common(low), "workload": {"trace": trace, "limit": count}},
        }
    )
    search = DrivenSearch(problem, pool.map)
    best = AnySystem(AnySystemOptions(files=files, axes=axes)).plan(search.problem, search)
    known = {
        "choice": str(best.axes["file"]),
        "chunk": best.axes["engine.max_num_batched_tokens"],
        "candidates": len(search.tried),
    }
    return as_run_file(problem.run_file(best.part)), known


@dataclass(frozen=True)
class CarriedRate:
    """Finds the largest rate of a run file with one seed; it is sent to other processes."""

    work: Sequence[BenchRequest]
    precision: float = 0.02

    def __call__(self, config: RunFile, seed: int) -> float:
        """Return requests per second."""
        targets = read_targets(SLO, self.work, None, None)
        return capacity(config, self.work, targets, (seed,), self.precision).rate


def systems(trace: str, work: Sequence[BenchRequest], pool: ProcessPoolExecutor) -> list[Row]:
    """Return rows of the choice and all fixed systems, with seeds that the search did not use."""
    rows = []
    for low in LOWS:
        config, known = chosen(low, trace, len(work), pool)
        configs = {"any_system": config} | {name: fixed(name, low) for name in SYSTEMS}
        asked = [(config, seed) for config in configs.values() for seed in COMPARED]
        rates = iter(list(pool.map(CarriedRate(work), *zip(*asked, strict=True))))
        found = {name: [next(rates) for _ in COMPARED] for name in configs}
        for name, each in found.items():
            axes = known if name == "any_system" else {"choice": name, "chunk": 512}
            rows.append(
                {
                    "pair": f"A100+{low}",
                    "system": name,
                    "is": f"{axes['choice']}, chunks of {axes['chunk']}",
                    **{f"seed_{s}": round(r, 3) for s, r in zip(COMPARED, each, strict=True)},
                }
            )
    return rows


def system_targets(rows: Sequence[Mapping[str, Any]]) -> list[Target]:
    """Return the targets of these rows."""
    targets = []
    for low in LOWS:
        found = {
            row["system"]: [row[f"seed_{seed}"] for seed in COMPARED]
            for row in rows
            if row["pair"] == f"A100+{low}"
        }
        ours = found.pop("any_system")
        best = [max(each) for each in zip(*found.values(), strict=True)]
        said = ", ".join(f"{a:.2f} / {b:.2f}" for a, b in zip(ours, best, strict=True))
        targets.append(
            agrees(
                f"A100+{low}: any_system's choice beats or equals each fixed system "
                f"(requests/s, its own / the best fixed one, {len(COMPARED)} seeds)",
                said,
                all(a >= b for a, b in zip(ours, best, strict=True)),
                "with each seed",
            )
        )
    return targets


WAYS = (
    "single",
    "data_parallel",
    "disaggregated_low_high",
    "disaggregated_high_low",
    "cronus",
)
# The ways in the picture, with their names there. Disaggregation with prompts on the A100 is left
# out: the other direction serves more requests at nearly all lengths.
DRAWN = {
    "single": "the A100 alone",
    "data_parallel": "colocation",
    "disaggregated_low_high": "disaggregation",
    "cronus": "Cronus",
}
# Targets of the picture's latencies in seconds, as in ``SLO``.
TARGETS = {"ttft_p90": 2.0, "tbt_p99": 0.2}
SCALES = (0.125, 0.25, 0.5, 1.0, 2.0, 4.0)
RATES = (0.5, 1, 2, 3, 4, 5, 6, 7, 8)
# Number of requests of each point.
SAMPLE = 300
LONGEST = 8192


def scaled(work: Sequence[BenchRequest], scale: float) -> list[BenchRequest]:
    """Make prompts longer by a factor, up to the model's context."""
    return [
        replace(
            item, prompt_len=max(1, min(round(scale * item.prompt_len), LONGEST - item.max_tokens))
        )
        for item in work
    ]


def by_length(work: Sequence[BenchRequest], pool: ProcessPoolExecutor) -> list[Row]:
    """Return the rate of each way, by length of the prompts."""
    points = [(low, way, scale) for low in LOWS for way in WAYS for scale in SCALES]
    rates = pool.map(partial(_carried, work), points)
    return [
        {
            "pair": f"A100+{low}",
            "way": way,
            "scale": scale,
            "mean_prompt": round(fmean(i.prompt_len for i in scaled(work[:SAMPLE], scale))),
            "requests_s": round(rate, 3),
        }
        for (low, way, scale), rate in zip(points, rates, strict=True)
    ]


def _carried(work: Sequence[BenchRequest], point: tuple[str, str, float]) -> float:
    low, way, scale = point
    return CarriedRate(scaled(work[:SAMPLE], scale), 0.05)(fixed(way, low), COMPARED[0])


def by_rate(work: Sequence[BenchRequest], pool: ProcessPoolExecutor) -> list[Row]:
    """Return the latencies of each way, by rate of Poisson arrivals."""
    points = [(low, way, rate) for low in LOWS for way in WAYS for rate in RATES]
    figures = pool.map(partial(_latencies, work), points)
    return [
        {"pair": f"A100+{low}", "way": way, "rate": rate, **each}
        for (low, way, rate), each in zip(points, figures, strict=True)
    ]


def _latencies(work: Sequence[BenchRequest], point: tuple[str, str, float]) -> dict[str, float]:
    low, way, rate = point
    arrivals = Arrivals(kind="poisson", rate=rate, seed=COMPARED[0])
    metrics = simulate(fixed(way, low), with_arrivals(work[:SAMPLE], arrivals))
    names = ("ttft_p90", "tbt_p99", "e2e_mean")
    return {name: round(getattr(metrics, name), 4) for name in names}


def begins(rows: Sequence[Mapping[str, Any]], x: str, y: str, least: bool) -> list[Row]:
    """Find the best way at each point of an axis, and the second best.

    Args:
        least: whether small values of y are better.
    """
    found = []
    for pair in dict.fromkeys(row["pair"] for row in rows):
        for value in dict.fromkeys(row[x] for row in rows):
            here = [row for row in rows if (row["pair"], row[x]) == (pair, value)]
            here.sort(key=lambda row: row[y] if least else -row[y])
            first, second = here[:2]
            found.append(
                {
                    "pair": pair,
                    x: value,
                    "best": first["way"],
                    y: first[y],
                    "next": second["way"],
                    f"{y}_next": second[y],
                }
            )
    return found


def draw(lengths: Sequence[Mapping[str, Any]], rates: Sequence[Mapping[str, Any]]) -> Figure:
    """Draw, for each pair, the rates of each way by length, and latencies by rate."""
    figure = Figure((11.5, 10), layout="constrained")
    axes = figure.subplots(3, len(LOWS), squeeze=False)
    panels = (
        (lengths, "mean_prompt", "requests_s", "requests/s within the targets", "serves most"),
        (rates, "rate", "ttft_p90", "TTFT p90 (s)", "has the lowest TTFT"),
        (rates, "rate", "tbt_p99", "TBT p99 (s)", "has the lowest TBT"),
    )
    for row, (points, x, y, label, wins) in enumerate(panels):
        for column, low in enumerate(LOWS):
            ax = axes[row][column]
            pair = [p for p in points if p["pair"] == f"A100+{low}" and p["way"] in DRAWN]
            ends = {}
            for (way, name), colour in zip(DRAWN.items(), COLOURS, strict=False):
                here = [p for p in pair if p["way"] == way]
                xs, ys = [p[x] for p in here], [p[y] for p in here]
                ax.plot(xs, ys, "o-", ms=3, lw=1.2, color=colour)
                ends[name] = (xs[-1], ys[-1], colour)
            if points is lengths:
                ax.set_xscale("log", base=2)
                ticks = list(dict.fromkeys(p[x] for p in pair))
                ax.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
                ax.set_xlabel("mean tokens of a prompt; answers have 247")
            else:
                ax.set_xlabel("requests/s (Poisson arrivals)")
                ax.axhline(TARGETS[y], color="0.6", lw=1, ls="--")
                ax.text(0.5, TARGETS[y], "target", color="0.4", va="top", fontsize=9)
            ax.set_yscale("log")
            ax.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
            ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
            ax.yaxis.set_minor_locator(NullLocator())
            ax.set_ylabel(label)
            ax.grid(alpha=0.3)
            name_lines(ax, ends, 0.075)
            finding = _finding(begins(pair, x, y, points is rates), x, wins)
            ax.set_title(fill(f"A100+{low}: {finding}", 64), loc="left", fontsize=10)
    return figure


def _finding(best: Sequence[Mapping[str, Any]], x: str, wins: str) -> str:
    """Say which way is the best, and from which value of the axis on."""
    first, *others = best
    said, last = f"{DRAWN[first['best']]} {wins}", first["best"]
    unit = "tokens" if x == "mean_prompt" else "requests/s"
    for point in others:
        if point["best"] != last:
            said, last = (
                f"{said}, {DRAWN[point['best']]} from {point[x]:,} {unit} on",
                point["best"],
            )
    return said
