"""TetriInfer's admission, dispatch and flips."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any

from matplotlib.figure import Figure

from jaxinfer import load_run
from jaxinfer.report.plots import COLOURS
from scripts.reproduce.claims import agrees, by_amount, holds
from scripts.reproduce.recorded import recorded
from scripts.reproduce.reproduction import Inputs, Part, Work
from scripts.reproduce.tetriinfer.runs import (
    REQUESTS,
    SEEDS,
    TRACE,
    RunFigures,
    cluster,
    draw,
    phases,
    tetriinfer,
    with_flips,
)
from scripts.tables import Row

if TYPE_CHECKING:
    from pandas import DataFrame

# For each name: the policy, the end of the range that counts, and the accuracy.
ADMISSIONS = {
    "reserve-dynamic, 74.9 %": ("reserve_dynamic", "low", 0.749),
    "reserve-dynamic, 100 %": ("reserve_dynamic", "low", 1.0),
    "the same by the upper end": ("reserve_dynamic", "high", 1.0),
    "reserve-static, 100 %": ("reserve_static", "low", 1.0),
}


def admissions(inputs: Inputs) -> Part:
    """JCT relative to greedy admission by size of the pool, 256 requests, no pages kept free."""
    trace = inputs.work(TRACE)
    rows = []
    works = [draw(trace, "Mixed", 256, seed) for seed in SEEDS]
    for tokens in (4_800, 9_600, 38_640):
        pages = f"instances.decode.num_pages={tokens // 16 + 1}"

        def jct(policy: str, accuracy: float = 1.0, free: float = 0.0, pages: str = pages) -> float:
            settings = [pages, f"instances.decode.watermark={free}", policy]
            return fmean(tetriinfer(w, 1, 1, accuracy, settings).jct for w in works)

        greedy = jct(GREEDY)
        row: Row = {"pool (tokens)": tokens, "greedy (s)": round(greedy, 2)}
        row["greedy with 1 % free (%)"] = round(100 * (jct(GREEDY, free=0.01) / greedy - 1), 1)
        for name, (rule, bound, accuracy) in ADMISSIONS.items():
            policy = f"{POLICIES}={{admit: {{name: {rule}, bound: {bound}}}}}"
            row[f"{name} (%)"] = round(100 * (jct(policy, accuracy) / greedy - 1), 1)
        rows.append(row)
    last = rows[-1]
    claims = {
        "reserve-dynamic, 74.9 %": (0, 2),
        "reserve-dynamic, 100 %": (-12, 3),
        "reserve-static, 100 %": (-10, 3),
    }
    return Part(
        rows,
        [
            by_amount(f"{name}: JCT by greedy's (%)", theirs, last[f"{name} (%)"], most, "points")
            for name, (theirs, most) in claims.items()
        ],
    )


POLICIES = "instances.decode.policies"
GREEDY = f"{POLICIES}={{admit: greedy}}"

DISPATCHES = ("two_choices", "random", "ratio", "imbalance")
PAIRED = range(20)


def dispatches(inputs: Inputs) -> Part:
    """Makespans with 32 requests for each decode instance, the same ones in each column."""
    trace = inputs.work(TRACE)
    rows, targets = [], []
    for count in (2, 4, 8):
        works = [draw(trace, "Mixed", 32 * count, seed) for seed in PAIRED]
        spans = {
            rule: [
                tetriinfer(w, 1, count, settings=[f"system.dispatch={rule}"]).makespan
                for w in works
            ]
            for rule in DISPATCHES
        }
        row: Row = {"decode instances": count}
        row |= {f"{rule} (s)": round(fmean(each), 1) for rule, each in spans.items()}
        rows.append(row)
        for rule in ("imbalance", "random", "ratio"):
            off = [a - b for a, b in zip(spans["two_choices"], spans[rule], strict=True)]
            error = stdev(off) / len(off) ** 0.5
            ours = f"{fmean(off):+.2f} +- {error:.2f} s"
            if rule == "imbalance":
                claim = f"two choices end before the imbalanced case, {count} instances"
                targets.append(
                    holds(
                        claim,
                        "before",
                        ours,
                        fmean(off) + 2 * error < 0,
                        "by more than two standard errors",
                    )
                )
            row[f"by {rule}"] = ours
    return Part(rows, targets)


def predictions(inputs: Inputs) -> Part:
    """Value of accurate predictions: four decode instances with small pools, Poisson arrivals."""
    trace = inputs.work(TRACE)
    rows = []
    works = [phases(trace, [("Mixed", 6, 60)], seed) for seed in SEEDS]
    pool = f"instances.decode.num_pages={9_600 // 16 + 1}"
    for accuracy in (0.0, 0.25, 0.5, 0.749, 1.0):
        runs = [tetriinfer(w, 2, 4, accuracy, [pool]) for w in works]
        rows.append(_means(f"{accuracy:.1%}", runs))
    runs = [tetriinfer(w, 2, 4, 1.0, [pool, "workload.predictor=null"]) for w in works]
    rows.append(_means("none: limits, here the truth", runs))
    return Part(rows)


def _means(name: str, runs: Sequence[RunFigures]) -> Row:
    return {
        "accuracy": name,
        "JCT (s)": round(fmean(r.jct for r in runs), 2),
        "TTFT (s)": round(fmean(r.ttft for r in runs), 2),
        "preemptions": sum(r.preemptions for r in runs),
    }


SHIFTING = (("HPLD", 3.0, 40.0), ("LPHD", 8.0, 40.0), ("HPLD", 3.0, 40.0))
STEADY = (("Mixed", 4.0, 120.0),)
# Prompts are heavier for a longer time, so no decoding instance is idle for long again.
BACK = (("HPLD", 6.0, 60.0), ("LPHD", 4.0, 60.0), ("HPLD", 6.0, 60.0))

# What the classes are called in the picture.
LOADS = {"HPLD": "long prompts", "LPHD": "long answers"}


def flips(inputs: Inputs) -> Part:
    """Two pairs of GPUs in each role, by the seconds for which an instance must be idle."""
    trace = inputs.work(TRACE)
    rows: list[Row] = []
    jct: dict[tuple[str, str], float] = {}
    changes: dict[tuple[str, str], float] = {}
    for load, parts in (("shifting", SHIFTING), ("steady", STEADY), ("back", BACK)):
        works = [phases(trace, parts, seed) for seed in SEEDS]
        for idle in ("null", "60", "5", "1"):
            settings = [f"system.flip_after_s={idle}"]
            found = [with_flips(w, 2, 2, settings) for w in works]
            runs, taken = [run for run, _ in found], [count for _, count in found]
            jct[load, idle] = fmean(r.jct for r in runs)
            changes[load, idle] = fmean(taken)
            rows.append(
                {
                    "load": load,
                    "looked back on (s)": "never" if idle == "null" else idle,
                    "JCT (s)": round(jct[load, idle], 2),
                    "flips in a run": round(fmean(taken), 1),
                    "TTFT (s)": round(fmean(r.ttft for r in runs), 2),
                }
            )
    steady = changes["steady", "5"]
    gain = 100 * (jct["shifting", "5"] / jct["shifting", "null"] - 1)
    return Part(
        rows,
        [
            agrees("a load that shifts gains by flips", f"JCT {gain:+.0f} %", gain < 0, "shorter"),
            agrees(
                "a steady load does not flip to and fro",
                f"{steady:.1f} flips in a run, over 5 s",
                steady <= 2,
                "at most 2 in a run",
            ),
        ],
        {"flips": draw_flips(trace)},
    )


def links(inputs: Inputs) -> Part:
    """JCT by the link between the roles."""
    trace = inputs.work(TRACE)
    work = draw(trace, "Mixed", REQUESTS, 0)
    runs = {
        rate: tetriinfer(work, settings=[f"links=[{{between: [p, d], gb_s: {rate}}}]"])
        for rate in (25, 300)
    }
    return Part([{"GB/s": rate, "JCT (s)": round(run.jct, 3)} for rate, run in runs.items()])


def draw_flips(trace: Work) -> Figure:
    """Draw the instances' prompts and decodes under a load that shifts."""
    work = phases(trace, SHIFTING, 0)
    _, run = recorded(cluster(2, 2, settings=["system.flip_after_s=5"]), work, load_run)
    return _draw_steps(run.steps, run.run["system_report"]["flips"])


def _draw_steps(steps: DataFrame, flips: Sequence[Mapping[str, Any]]) -> Figure:
    """Draw the steps and flips of instances, and the parts of the load above them."""
    names = sorted(steps["instance"].unique(), reverse=True)
    figure = Figure(figsize=(10, 3), layout="constrained")
    ax = figure.subplots()
    kinds = {"steps with prompts": "prefill_tokens", "steps with decodes": "decode_tokens"}
    for number, (kind, column) in enumerate(kinds.items()):
        for height, name in enumerate(names):
            here = steps[(steps["instance"] == name) & (steps[column] > 0)]
            spans = list(zip(here["start"], here["end"] - here["start"], strict=True))
            ax.broken_barh(spans, (height - 0.35, 0.7), color=COLOURS[number])
        place = (1.01, 0.6 - 0.15 * number)
        ax.annotate(kind, place, xycoords="axes fraction", color=COLOURS[number])
    for flip in flips:
        place = (flip["asked"], names.index(flip["instance"]) + 0.42)
        ax.plot(*place, "v", color="black", ms=6)
    if flips:
        ax.annotate("\N{BLACK DOWN-POINTING TRIANGLE} flip", (1.01, 0.3), xycoords="axes fraction")
    start = 0.0
    for name, rate, seconds in SHIFTING:
        ax.text(start + 0.7, len(names) - 0.4, f"{LOADS[name]}, {rate:g} requests/s", fontsize=9)
        start += seconds
        ax.axvline(start, color="0.6", lw=0.8, ls="--")
    ax.set(xlabel="time (s)", ylim=(-0.5, len(names)), xlim=(0, steps["end"].max()))
    ax.set_yticks(range(len(names)), names)
    ax.spines[["top", "right"]].set_visible(False)
    changes = [f"{f['instance']} flips to {f['role']} after {f['asked']:.0f} s" for f in flips]
    ax.set_title("; ".join(changes) or "No instance changes its role", loc="left")
    return figure
