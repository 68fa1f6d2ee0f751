"""TetriInfer's Figures 11 to 15: five workloads, by the cap of the baseline's batch, and perf/$."""

from collections.abc import Sequence
from statistics import fmean

from matplotlib.figure import Figure

from jaxinfer.report.pictures import name_lines
from jaxinfer.report.plots import COLOURS
from scripts.reproduce.claims import Target, agrees, by_amount
from scripts.reproduce.reproduction import Inputs, Part, Work
from scripts.reproduce.tetriinfer.runs import (
    CLASSES,
    REQUESTS,
    SEEDS,
    WORKLOADS,
    draw,
    tetriinfer,
    vllm,
)
from scripts.tables import Row

CAPS = (16, 24, 32, 64, 256)
# TTFT, JCT and resource time in percent, and perf/$, of Figs. 11 to 15; None if not stated.
PAPER: dict[str, tuple[float | None, float, float | None, float]] = {
    "LPLD": (-44, -40, None, 1.4),
    "LPHD": (-97, -47, -38, 2.4),
    "HPLD": (-9, -23, 43, 0.86),
    "HPHD": (None, -19, 7, 1.1),
    "Mixed": (-85, -50, -21, 1.9),
}
NAMES = ("TTFT", "JCT", "resource time")


def perf_per_dollar(jct: float, resource: float) -> float:
    """Return the paper's formula, by changes in percent; it is no ratio of performances."""
    return (1 - jct / 100) / (1 + resource / 100)


def quotient(jct: float, resource: float) -> float:
    """Return requests per second and GPU-second, relative to those of vLLM."""
    return 1 / (1 + jct / 100) / (1 + resource / 100)


def workloads(trace: Work) -> tuple[list[Row], dict[tuple[str, int], tuple[float, float, float]]]:
    """Return means over seeds, for each cap."""
    rows, found = [], {}
    for name in WORKLOADS:
        works = [draw(trace, name, REQUESTS, seed) for seed in SEEDS]
        ours = [tetriinfer(work) for work in works]
        for cap in CAPS:
            changes = [o.changes(vllm(w, cap)) for o, w in zip(ours, works, strict=True)]
            mean = tuple(fmean(column) for column in zip(*changes, strict=True))
            found[name, cap] = mean
            row = {"workload": name, "cap": cap}
            row |= {f"{n} (%)": round(v) for n, v in zip(NAMES, mean, strict=True)}
            row["perf/$, the paper's form"] = round(perf_per_dollar(mean[1], mean[2]), 2)
            row["quotient of performances"] = round(quotient(mean[1], mean[2]), 2)
            rows.append(row)
    return rows, found  # type: ignore[return-value]


def paper_cells(found: dict[tuple[str, int], tuple[float, float, float]]) -> list[Target]:
    """Return targets for the cap of 16, and for the gains that remain at 256."""
    targets = []
    for name, cells in PAPER.items():
        for what, theirs, ours in zip(NAMES, cells[:3], found[name, 16], strict=True):
            if theirs is None:
                continue
            claim = f"{name}, {what} at a cap of 16"
            most = 30 if name == "Mixed" else 20
            targets.append(by_amount(f"{claim} (%)", theirs, ours, most, "points"))
    for name in ("LPLD", "LPHD", "Mixed"):
        ttft, jct, resource = found[name, 256]
        said = f"TTFT {ttft:+.0f} %, JCT {jct:+.0f} %, resource time {resource:+.0f} %"
        gone = ttft > -5 and jct > -20 and resource > -5
        claim = f"{name}: TTFT and resource gains of the cap of 16 are gone at 256"
        criterion = "TTFT and resource time above -5 %, JCT above -20 %"
        targets.append(agrees(claim, said, gone, criterion))
    return targets


def prices(inputs: Inputs) -> Part:
    """The paper's perf/$ from its own changes, by two formulas."""
    rows, targets = [], []
    for name, (_, jct, resource, theirs) in PAPER.items():
        value = perf_per_dollar(jct, resource or 0.0)
        rows.append(
            {
                "workload": name,
                "paper": theirs,
                "(1 + r) / R": round(value, 2),
                "1 / (1 - r) / R": round(quotient(jct, resource or 0.0), 2),
            }
        )
        claim = f"perf/$ of {name} from its changes of JCT and resource time"
        targets.append(by_amount(claim, theirs, round(value, 2), 0.05, kind="input"))
    return Part(rows, targets)


def draw_caps(rows: Sequence[Row]) -> Figure:
    """Draw the changes of the four classes by the cap of vLLM's batch, next to the paper's."""
    figure = Figure(figsize=(13, 4), layout="constrained")
    for number, (ax, what) in enumerate(zip(figure.subplots(1, 3), NAMES, strict=True)):
        ends = {}
        gains = dict.fromkeys(CAPS, 0)
        for colour, name in zip(COLOURS, CLASSES, strict=False):
            changes = [row[f"{what} (%)"] for row in rows if row["workload"] == name]
            ax.plot(CAPS, changes, "o-", ms=3, color=colour)
            ends[name] = (CAPS[-1], changes[-1], colour)
            for cap, change in zip(CAPS, changes, strict=True):
                gains[cap] += change < 0
            theirs = PAPER[name][number]
            if theirs is not None:
                ax.plot([11], [theirs], "<", color=colour, ms=8)
        ax.axhline(0, color="grey", lw=0.8)
        ax.set_xscale("log", base=2)
        ax.set_xticks([11, *CAPS], ["paper", *(str(cap) for cap in CAPS)])
        ax.minorticks_off()
        ax.set_title(
            f"{what}: shorter for {gains[CAPS[0]]} of {len(CLASSES)} classes\nat a cap of "
            f"{CAPS[0]}, for {gains[CAPS[-1]] or 'none'} at {CAPS[-1]}",
            loc="left",
            fontsize=10,
        )
        ax.set(xlabel="cap of vLLM's batch (requests)", ylabel=f"{what} relative to vLLM (%)")
        ax.grid(alpha=0.3)
        name_lines(ax, ends)
    figure.supxlabel("Classes: light (L) or heavy (H) prefill (P) and decode (D)", fontsize=9)
    return figure
