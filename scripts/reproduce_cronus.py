"""Cronus' Tables 2 and 3 on the modelled cluster, beside the paper's.

    python scripts/reproduce_cronus.py --trace CSV --out DIR [--calibrate]

CSV: the first 1,000 lengths of Azure's 2023 conversation trace, all at the start.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import click
import yaml
from cronus_targets import PAPER_RATIOS, ratios, targets
from matplotlib.figure import Figure
from results import show_table, show_targets, write_csv, write_targets
from scipy.optimize import brentq

from jaxinfer.config.run_file import RunFile, load_run_file
from jaxinfer.hardware.catalogue import find_gpu, find_model
from jaxinfer.pool import process_pool
from jaxinfer.report.plots import COLOURS
from jaxinfer.simulate.run import simulate
from jaxinfer.workload.lengths import BenchRequest, read_workload

FOLDER = Path(__file__).parents[1] / "configs" / "cronus"
CALIBRATION = FOLDER.with_name("cronus_calibration.yaml")
HEADING = (
    "# What scripts/reproduce_cronus.py --calibrate has found; docs/results/cronus.md says "
    "from what.\n"
)
MODELS = {"LLaMA3-8B": "llama-3-8b", "Qwen2-7B": "qwen2-7b"}
SETUPS = {f"A100+{low} {model}": (low, model) for low in ("A10", "A30") for model in MODELS}
APPROACHES = {
    "DP+Chunked": "data_parallel",
    "PP+Chunked": "pipeline_parallel",
    "Disagg. H-L": "disaggregated_high_low",
    "Disagg. L-H": "disaggregated_low_high",
    "Cronus": "cronus",
}
# Table 2, requests per second, in the order of SETUPS.
TABLE_2 = {
    "DP+Chunked": (7.28, 8.70, 8.54, 10.85),
    "PP+Chunked": (3.86, 4.08, 3.96, 3.97),
    "Disagg. H-L": (1.31, 3.45, 2.93, 6.74),
    "Disagg. L-H": (4.11, 4.35, 6.14, 6.59),
    "Cronus": (7.39, 8.29, 8.7, 10.27),
}
# Table 3, percent: prefill and decode of High-Low, then of Low-High.
TABLE_3 = {
    "A100+A10 LLaMA3-8B": (11, 97, 99, 32),
    "A100+A10 Qwen2-7B": (28, 101, 104, 25),
    "A100+A30 LLaMA3-8B": (25, 96, 98, 47),
    "A100+A30 Qwen2-7B": (54, 100, 99, 38),
}


def paper(approach: str, setup: str) -> float:
    """One cell of Table 2."""
    return TABLE_2[approach][list(SETUPS).index(setup)]


@dataclass(frozen=True)
class Case:
    """One cell: a setup under a system, with costs."""

    setup: str
    system: str
    costs: tuple[tuple[str, float], ...] = ()
    changes: tuple[str, ...] = ()

    def config(self) -> RunFile:
        """Of the system's run file, changed."""
        low, model = SETUPS[self.setup]
        return load_run_file(
            FOLDER / f"{self.system}.yaml",
            [
                f"model={MODELS[model]}",
                f"groups.low.kind={low}",
                *(f"simulate.{name}={value}" for name, value in self.costs),
                *self.changes,
            ],
        )


def throughput(case: Case, work: Sequence[BenchRequest]) -> float:
    """Requests per second."""
    metrics = simulate(case.config(), work)
    return metrics.requests / metrics.wall_s


# Calibration: each number makes one figure of the paper's come out.


def solve(figure: Callable[[float], float], target: float, low: float, high: float) -> float:
    """Where a monotonic figure meets its target."""
    found = brentq(lambda x: figure(x) - target, low, high, xtol=5e-4 * (high - low), rtol=1e-3)
    return float(f"{found:.4g}")


def capacity(setup: str, column: int, approach: str) -> float:
    """Of one stage alone: the system's throughput by the share of it that the stage needs."""
    return paper(approach, setup) / (TABLE_3[setup][column] / 100)


def mean_capacity(model: str, column: int, approach: str) -> float:
    """Of the A100, from both setups."""
    found = [capacity(s, column, approach) for s, (_, name) in SETUPS.items() if name == model]
    return sum(found) / len(found)


def calibrate(work: Sequence[BenchRequest]) -> dict[str, Any]:
    """All numbers, from the disaggregated rows and Table 3; the hop from one cell of PP."""
    prompts = [replace(item, max_tokens=1) for item in work]
    high_flops = {
        model: solve(
            lambda x, m=model: throughput(_prefill_only(m, x), prompts),
            mean_capacity(model, 0, "Disagg. H-L"), 0.2, 1.0,
        )
        for model in MODELS
    }  # fmt: skip
    bandwidth, sequence_s = _engine(work)
    engine = (("bandwidth", bandwidth), ("sequence_s", sequence_s))
    costs: dict[str, Any] = {"engine": dict(engine), "high": {}, "low": {}}
    for model in MODELS:
        costs["high"][model] = {"flops": high_flops[model]}
    for setup, (low, model) in SETUPS.items():
        high = (*engine, ("groups.high.flops", high_flops[model]))
        flops = solve(
            lambda x, s=setup, h=high: throughput(
                Case(s, "disaggregated_low_high", (*h, ("groups.low.flops", x))), work
            ),
            paper("Disagg. L-H", setup), 0.2, 1.0,
        )  # fmt: skip
        reserve = solve(
            lambda x, s=setup, h=(*high, ("groups.low.flops", flops)): throughput(
                Case(s, "disaggregated_high_low", (*h, ("groups.low.reserve_gb", x))), work
            ),
            paper("Disagg. H-L", setup), 0.0, _largest_reserve(low, model),
        )  # fmt: skip
        costs["low"].setdefault(low, {})[model] = {"flops": flops, "reserve_gb": reserve}
    first = next(iter(SETUPS))
    known = numbers(costs, first)
    costs["hop_s"] = solve(
        lambda x: throughput(Case(first, "pipeline_parallel", (*known, ("hop_s", x))), work),
        paper("PP+Chunked", first), 0.0, 0.5,
    )  # fmt: skip
    return costs


def _largest_reserve(low: str, model: str) -> float:
    """GB that leave room for the KV of one request of 8,192 tokens."""
    shape = find_model(MODELS[model])
    layers = shape.num_hidden_layers
    taken = 2 * shape.parameters(layers, True, True) + 8192 * shape.kv_bytes(layers, 2)
    return 0.9 * find_gpu(low).memory_gb - taken / 1e9


def _prefill_only(model: str, flops: float) -> Case:
    setup = next(s for s, (_, name) in SETUPS.items() if name == model)
    return Case(setup, "disaggregated_high_low", (("groups.high.flops", flops),))


def _engine(work: Sequence[BenchRequest]) -> tuple[float, float]:
    """Bandwidth and seconds per sequence that give the A100's decode capacity for both models."""

    def per_sequence(model: str, bandwidth: float) -> float:
        return solve(
            lambda x: throughput(_decode_only(model, bandwidth, x), work),
            mean_capacity(model, 3, "Disagg. L-H"), 0.0, 0.0004,
        )  # fmt: skip

    def apart(bandwidth: float) -> float:
        return per_sequence("LLaMA3-8B", bandwidth) - per_sequence("Qwen2-7B", bandwidth)

    bandwidth = solve(apart, 0.0, 0.45, 0.9)
    both = [per_sequence(model, bandwidth) for model in MODELS]
    return bandwidth, round(sum(both) / 2, 6)


def _decode_only(model: str, bandwidth: float, sequence_s: float) -> Case:
    """On the A100; prompts come from a GPU that is never what limits."""
    setup = next(s for s, (_, name) in SETUPS.items() if name == model)
    costs = (("bandwidth", bandwidth), ("sequence_s", sequence_s), ("groups.low.flops", 1.0))
    return Case(setup, "disaggregated_low_high", costs, ("groups.low.kind=H200",))


def numbers(costs: dict[str, Any], setup: str) -> tuple[tuple[str, float], ...]:
    """A setup's costs as settings."""
    low, model = SETUPS[setup]
    found = list(costs["engine"].items())
    found += [(f"groups.high.{name}", v) for name, v in costs["high"][model].items()]
    found += [(f"groups.low.{name}", v) for name, v in costs["low"][low][model].items()]
    if "hop_s" in costs:
        found.append(("hop_s", costs["hop_s"]))
    return tuple(found)


CALIBRATED_ON = {
    "Disagg. H-L": "reserve_gb of the low GPU",
    "Disagg. L-H": "flops of the low GPU",
}


def table_2(costs: dict[str, Any], work: Sequence[BenchRequest]) -> list[dict[str, Any]]:
    """All cells, calibrated and not."""
    cells = [(setup, approach) for setup in SETUPS for approach in APPROACHES]
    calibrated = [Case(s, APPROACHES[a], numbers(costs, s)) for s, a in cells]
    plain = [Case(s, APPROACHES[a]) for s, a in cells]
    with process_pool() as pool:
        ours, uncalibrated = (
            list(pool.map(partial(throughput, work=work), cases)) for cases in (calibrated, plain)
        )
    rows = []
    for (setup, approach), value, without in zip(cells, ours, uncalibrated, strict=True):
        on = CALIBRATED_ON.get(approach, "")
        if approach == "PP+Chunked" and setup == next(iter(SETUPS)):
            on = "hop_s"
        rows.append(
            {
                "setup": setup,
                "approach": approach,
                "paper": paper(approach, setup),
                "ours": round(value, 3),
                "uncalibrated": round(without, 3),
                "calibrated_on": on,
            }
        )
    return rows


def show(rows: Sequence[dict[str, Any]]) -> None:
    """Each setup's column."""
    for setup in SETUPS:
        print(f"\n{setup}: paper, ours (difference), uncalibrated; requests/s")
        here = [row for row in rows if row["setup"] == setup]
        for row in here:
            off = row["ours"] / row["paper"] - 1
            on = f"  calibrated: {row['calibrated_on']}" if row["calibrated_on"] else ""
            print(
                f"  {row['approach']:12} {row['paper']:6.2f} {row['ours']:6.2f} ({off:+6.1%}) "
                f"{row['uncalibrated']:6.2f}{on}"
            )


# Figure 4: one request every so many seconds.
INTERVALS = (0.1, 0.11, 0.12, 0.13, 0.14, 0.16, 0.18, 0.2, 0.25, 0.3, 0.4, 0.5)


def latency(case: Case, work: Sequence[BenchRequest], interval: float) -> tuple[float, float]:
    """TTFT p99 and TBT p99 in seconds, with requests at a fixed interval."""
    spaced = [replace(item, arrival=i * interval) for i, item in enumerate(work)]
    metrics = simulate(case.config(), spaced)
    assert metrics.ttft_p99 is not None
    assert metrics.tbt_p99 is not None
    return metrics.ttft_p99, metrics.tbt_p99


def figure_4(costs: dict[str, Any], work: Sequence[BenchRequest]) -> list[dict[str, Any]]:
    """Every setup and approach at every interval."""
    points = [(s, a, interval) for s in SETUPS for a in APPROACHES for interval in INTERVALS]
    cases = [Case(s, APPROACHES[a], numbers(costs, s)) for s, a, _ in points]
    with process_pool() as pool:
        found = list(pool.map(latency, cases, [work] * len(cases), [p[2] for p in points]))
    return [
        {"setup": s, "approach": a, "interval_s": i, "ttft_p99": ttft, "tbt_p99": tbt}
        for (s, a, i), (ttft, tbt) in zip(points, found, strict=True)
    ]


def draw_figure_4(points: Sequence[dict[str, Any]], path: Path) -> None:
    """As the paper: TTFT above, TBT below, a column for each setup."""
    figure = Figure(figsize=(13, 6), layout="constrained")
    axes = figure.subplots(2, len(SETUPS), sharex=True)
    for row, what in enumerate(PAPER_RATIOS):
        for column, setup in enumerate(SETUPS):
            ax = axes[row][column]
            for colour, approach in zip(COLOURS, APPROACHES, strict=False):
                here = [p for p in points if (p["setup"], p["approach"]) == (setup, approach)]
                x = [p["interval_s"] for p in here]
                ax.plot(x, [p[what] for p in here], "o-", ms=3, color=colour, label=approach)
            ax.set_yscale("log")
            ax.grid(alpha=0.3)
            if row == 0:
                ax.set_title(setup, fontsize=10)
            else:
                ax.set_xlabel("interval between requests (s)")
        axes[row][0].set_ylabel(f"{what[:4].upper().strip('_')} p99 (s)")
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels))
    figure.savefig(path, dpi=120)


def table_3(costs: dict[str, Any], work: Sequence[BenchRequest]) -> list[dict[str, Any]]:
    """Throughput of High-Low and Low-High by that of each of their stages alone, in percent."""
    prompts = [replace(item, max_tokens=1) for item in work]
    rows = []
    for setup in SETUPS:
        known = numbers(costs, setup)
        found = []
        for system, here in (
            ("disaggregated_high_low", "high"),
            ("disaggregated_low_high", "low"),
        ):
            whole = throughput(Case(setup, system, known), work)
            prefill = throughput(Case(setup, system, known), prompts)
            # The other GPU as one that is never what limits.
            fast = (f"groups.{here}.kind=H200", f"simulate.groups.{here}={{flops: 1.0}}")
            decode = throughput(Case(setup, system, known, fast), work)
            found += [100 * whole / prefill, 100 * whole / decode]
        for number, (stage, value) in enumerate(
            zip(("H-L prefill", "H-L decode", "L-H prefill", "L-H decode"), found, strict=True)
        ):
            theirs = TABLE_3[setup][number]
            rows.append({"setup": setup, "stage": stage, "paper": theirs, "ours": round(value, 1)})
    return rows


@click.command()
@click.option("--trace", required=True)
@click.option("--out", required=True, type=click.Path(path_type=Path))
@click.option("--calibrate", "again", is_flag=True, help="Anew, into configs/.")
def main(trace: str, out: Path, again: bool) -> None:
    """Print the paper's cells beside ours, and write them."""
    work = [replace(item, arrival=0.0) for item in read_workload(trace)[:1000]]
    if again:
        found = yaml.safe_dump(calibrate(work), sort_keys=False)
        CALIBRATION.write_text(HEADING + found, encoding="utf-8")
    costs = yaml.safe_load(CALIBRATION.read_text(encoding="utf-8"))
    out.mkdir(parents=True, exist_ok=True)
    cells = table_2(costs, work)
    show(cells)
    write_csv(out / "table2.csv", cells)
    shares = table_3(costs, work)
    print("\nTable 3, percent: paper, ours")
    for row in shares:
        print(f"  {row['setup']:20} {row['stage']:12} {row['paper']:4} {row['ours']:6.1f}")
    write_csv(out / "table3.csv", shares)
    points = figure_4(costs, work)
    print("\nFigure 4, percent by which Cronus is below, at most")
    found = ratios(points, cells)
    show_table(found)
    write_csv(out / "figure4.csv", points)
    draw_figure_4(points, out / "figure4.png")
    claims = targets(cells, shares, found)
    print()
    show_targets(claims)
    write_targets(out / "targets.csv", Path(__file__).name, claims)


if __name__ == "__main__":
    main()
