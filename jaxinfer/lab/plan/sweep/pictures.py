"""Pictures of a sweep: a line per file over a numeric axis, with intervals over seeds."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxinfer.lab.plan.sweep.sweep import HALF
from jaxinfer.lab.plan.sweep.sweep_file import Sweep, varied, x_axis
from jaxinfer.report.pictures import can_be_drawn, save_picture

if TYPE_CHECKING:
    from matplotlib.axes import Axes

TableRow = Mapping[str, Any]
# For each line: x, y, and half of y's interval.
Line = list[tuple[float, float, float]]
# An axis is logarithmic if the ratio of its largest to its smallest value is at least this.
LOG_FROM = 30
_LATENCIES = {
    "ttft": "time to first token (TTFT)",
    "tpot": "a request's mean time between tokens (TPOT)",
    "tbt": "time between tokens (TBT)",
    "e2e": "time from arrival to end",
    "normalised": "time from arrival to end, per output token",
    "delay": "time from arrival to first step",
}
_OF_REQUESTS = {"mean": "mean", "p50": "median", "p90": "90th percentile", "p99": "99th percentile"}
_WORDS = {
    "requests_s": "finished requests per second",
    "wall_s": "time of the run (s)",
    "mfu": "share of the devices' peak (MFU)",
}
_UNITS = {"requests_s": "requests/s", "tok_s": "tokens/s", "s": "s", "mib": "MiB"}
_AXES = {
    "workload.arrivals.rate": "arrivals (requests/s)",
    "workload.arrivals.seconds": "time between arrivals (s)",
    "workload.arrivals.cv": "variation of the times between arrivals",
    "workload.limit": "requests",
    "workload.synthetic.count": "requests",
    "engine.max_num_batched_tokens": "tokens in a step, at most",
    "engine.max_num_seqs": "requests in a step, at most",
    "engine.max_model_len": "tokens of a request, at most",
    "engine.page_size": "tokens of a page",
    "engine.num_pages": "pages",
}


def figure_words(name: str) -> str:
    """Return a figure's name in words, with its unit."""
    metric, _, of = name.rpartition("_")
    if metric in _LATENCIES and of in _OF_REQUESTS:
        return f"{_LATENCIES[metric]}, {_OF_REQUESTS[of]} (s)"
    if name in _WORDS:
        return _WORDS[name]
    found = re.fullmatch(rf"(.+?)_({'|'.join(_UNITS)})", name)
    if not found:
        return name.replace("_", " ")
    what, unit = found.groups()
    return f"{what.replace('_', ' ')} ({_UNITS[unit]})"


def axis_words(key: str) -> str:
    """Return a dotted key of a run file in words."""
    return _AXES.get(key) or key.rpartition(".")[2].replace("_", " ")


def draw(
    folder: Path, kind: str, sweep: Sweep, rows: Sequence[TableRow]
) -> tuple[list[Path], list[str]]:
    """Draw a picture for each ``y`` if an axis is numeric; also return what was not drawn."""
    from matplotlib.figure import Figure

    x = x_axis(sweep)
    if x is None:
        return [], []
    written, left_out = [], 0
    for y in sweep.y:
        lines, missing = _lines(sweep, rows, x, y)
        left_out += missing
        if not lines:
            continue
        figure = Figure((6.4, 3.8 + 0.2 * (len(lines) > 2) * len(lines)), layout="constrained")
        axes = figure.subplots()
        points = [point for line in lines.values() for point in line]
        if _is_wide([px for px, _, _ in points]):
            axes.set_xscale("log")
        lowest = _scale_y(axes, points)
        for number, (label, line) in enumerate(lines.items()):
            _draw_line(axes, number, label, line, lowest)
        seeds = len(sweep.all_seeds)
        what = f"\nmean of {seeds} seeds, bars: 95 % interval" if seeds > 1 else ""
        axes.set_xlabel(axis_words(x) + what)
        axes.set_ylabel(figure_words(y), wrap=True)
        axes.grid(color="0.9", linewidth=0.6)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        if list(lines) != [""]:
            figure.legend(
                loc="outside upper left",
                frameon=False,
                fontsize="small",
                ncols=1 if max(map(len, lines)) > 24 else 2,
            )
        path = folder / f"{y}.{kind}"
        save_picture(figure, path)
        written.append(path)
    beyond = f"{left_out} values are too large or small to be drawn: sweep.csv has them"
    return written, [beyond] if left_out else []


def _lines(sweep: Sweep, rows: Sequence[TableRow], x: str, y: str) -> tuple[dict[str, Line], int]:
    """Return the lines of a picture by their labels, and the number of points left out."""
    others = varied(sweep)
    # Values that all points share do not distinguish lines.
    others = [name for name in others if len({str(row.get(name)) for row in rows}) > 1]
    lines: dict[str, Line] = {}
    missing = 0
    for row in rows:
        if row.get(y) is None:
            continue
        if not can_be_drawn(row[x], row[y]):
            missing += 1
            continue
        named = [
            str(row[name]) if name == "file" else f"{axis_words(name)}: {row[name]}"
            for name in others
            if row.get(name) is not None
        ]
        half = row.get(y + HALF) or 0.0
        lines.setdefault(", ".join(named), []).append((row[x], row[y], half))
    return {label: sorted(line) for label, line in lines.items()}, missing


def _draw_line(axes: "Axes", number: int, label: str, line: Line, lowest: float) -> None:
    from jaxinfer.report.plots import COLOURS, DASHES

    dashes = DASHES[number // len(COLOURS) % len(DASHES)]
    xs, ys, halves = zip(*line, strict=True)
    # Drawn over the axes' own lines, which would hide a flat one.
    look: dict[str, Any] = {"color": COLOURS[number % len(COLOURS)], "clip_on": False, "zorder": 3}
    marker = "os^vDP*Xd"[number % 9]
    axes.plot(xs, ys, label=label, ls=dashes, lw=1.4, marker=marker, ms=4, **look)
    if any(halves):
        # An interval that reaches below the axis ends there.
        below = [min(half, y - lowest) for y, half in zip(ys, halves, strict=True)]
        axes.errorbar(xs, ys, (below, halves), fmt="none", elinewidth=1, capsize=2.5, **look)


def _is_wide(values: Sequence[float]) -> bool:
    """Tell whether an axis needs a logarithmic scale, because the largest value hides the rest."""
    return min(values) > 0 and max(values) > LOG_FROM * min(values)


def _scale_y(axes: "Axes", points: Line) -> float:
    """Scale from 0, or on a logarithmic axis from a fraction of the smallest value, up to all bars.

    Returns the lower end.
    """
    ys = [y for _, y, _ in points]
    most = max(y + half for _, y, half in points)
    if _is_wide(ys):
        axes.set_yscale("log")
        lowest = min(ys) / 2
        axes.set_ylim(lowest, 1.3 * most)
    else:
        least = min(y - half for _, y, half in points)
        lowest = min(min(ys), 0.0) and 1.06 * least
        axes.set_ylim(lowest, 1.06 * most if most > 0 else 1.0)
    return lowest
