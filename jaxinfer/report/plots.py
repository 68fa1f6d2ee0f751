"""Pictures of runs: timelines, distributions of latencies, and throughput.

Colours are those of Okabe and Ito, which colour-blind readers can distinguish, and a brown.
"""

import math
import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import fill, wrap
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from jaxinfer.errors import JaxinferError
from jaxinfer.report.percentiles import percentile
from jaxinfer.report.perfetto import part_names, step_kind, transfer_lanes
from jaxinfer.report.pictures import save_picture
from jaxinfer.report.records import RunRecord
from jaxinfer.report.summary import Runs, emulation, figures, finished, median_round, number_text

WIDTH = 11.0  # In inches.
COLOURS = (
    "#0072B2",
    "#D55E00",
    "#009E73",
    "#E69F00",
    "#CC79A7",
    "#56B4E9",
    "#666666",
    "#8C510A",
    "#000000",
)
DASHES = ("solid", (0, (5, 1.5)), (0, (6, 1.5, 1.2, 1.5)), (0, (1.5, 1)))
# Description and colour of each kind of block of the timeline.
KINDS = {
    "prefill": ("prefill", "#0072B2"),
    "mixed": ("prefill chunk and decodes", "#E69F00"),
    "decode": ("decodes", "#009E73"),
    "transfer": ("KV transfer", "#CC79A7"),
}
DEFAULT_WINDOW_S = 12.0
# Up to this many neighbouring blocks can be told apart.
MAX_BLOCKS = 160
# An axis is logarithmic if the ratio of its largest to its smallest value is at least this.
LOG_FROM = 30.0
# Up to this many distributions can be told apart in one panel.
MAX_LINES = 4
# Percentiles of a system's row, with their markers.
PERCENTILES = {50: "o", 90: "D", 99: "|"}

DOT: dict[str, Any] = {
    "marker": "o",
    "markersize": 6,
    "color": "black",
    "markeredgecolor": "white",
    "linestyle": "none",
}

Block = tuple[str, float, float]  # Kind, start and end in seconds.


@dataclass(frozen=True)
class _Lane:
    """A row of the timeline; overlapping blocks are on several tracks."""

    label: str
    tracks: list[list[Block]]


def timeline(
    run: RunRecord, path: str | Path, start: float | None = None, stop: float | None = None
) -> Figure:
    """Draw a timeline with one row for each stage and each route.

    A route's row is above its destination, whose steps hide the transfers.

    Args:
        start, stop: the part of the run to show, in seconds. By default up to 12 s from the first
            step on, or less if steps are so short that they would merge.

    Raises:
        JaxinferError: the window is empty, or the file's ending is not .png, .svg or .pdf.
    """
    lanes = _lanes(run)
    start, stop = _window(run, lanes, start, stop)
    if not start < stop:
        raise JaxinferError(f"timeline of {run.name}: from {start:g} to {stop:g} s is no time")
    figure = _figure(1.4 + 0.5 * len(lanes), {run.name: [run]})
    axes = figure.subplots()
    kinds: set[str] = set()
    for row, lane in enumerate(lanes):
        kinds |= _draw_lane(axes, row, lane, start, stop)
    axes.set_yticks(range(len(lanes)), [lane.label for lane in lanes])
    axes.set_ylim(len(lanes) - 0.5, -0.5)
    axes.set_xlim(start, stop)
    axes.set_xlabel("time since the start of the run (s)")
    axes.grid(axis="x", color="0.85", linewidth=0.6)
    _bare(axes)
    axes.set_title(f"{run.name}: {start:.2f} to {stop:.2f} s of {run.wall_s:.2f} s", loc="left")
    handles = [Patch(color=c, label=label) for kind, (label, c) in KINDS.items() if kind in kinds]
    if handles:
        figure.legend(handles=handles, loc="outside upper right", ncols=4, frameon=False)
    save_picture(figure, path)
    return figure


def latencies(runs: Runs, path: str | Path) -> Figure:
    """Draw TTFT and TBT of each system, in the round with the median requests/s.

    Up to four systems are drawn as distributions; if there are more, each is a row of percentiles.
    """
    chosen = {name: median_round(rounds) for name, rounds in runs.items()}
    done = {name: finished(run) for name, run in chosen.items()}
    ttft = {n: [t for r in requests if (t := r.ttft) is not None] for n, requests in done.items()}
    tbt = {n: [gap for r in requests for gap in r.tbt] for n, requests in done.items()}
    if len(runs) > MAX_LINES:
        figure = _latency_rows(runs, {"TTFT": ttft, "TBT": tbt})
        save_picture(figure, path)
        return figure
    columns = _legend_columns(runs)
    figure = _figure(4.2 + 0.2 * math.ceil(len(runs) / columns), runs)
    left, right = figure.subplots(1, 2)
    _draw_cdfs(left, ttft, "time to first token (TTFT, s)", "share of requests")
    _draw_cdfs(right, tbt, "time between tokens (TBT, s)", "share of gaps")
    handles = [Line2D([], [], label=name, **_line(i)) for i, name in enumerate(runs)]
    figure.legend(handles=handles, loc="outside upper center", ncols=columns, frameon=False)
    save_picture(figure, path)
    return figure


def _latency_rows(runs: Runs, values: Mapping[str, Mapping[str, Sequence[float]]]) -> Figure:
    """Draw a row per system with its percentiles, and a panel per metric."""
    names, lines = _row_names(runs)
    figure = _figure(1.3 + max(0.4, 0.2 * lines) * len(runs), runs)
    for axes, (metric, found) in zip(
        figure.subplots(1, 2, sharey=True), values.items(), strict=True
    ):
        seen = []
        for row, each in enumerate(found.values()):
            if each:
                times = [percentile(each, percent) or 0.0 for percent in PERCENTILES]
                colour = COLOURS[row % len(COLOURS)]
                axes.plot(times, [row] * len(times), color=colour, linewidth=2)
                for time, marker in zip(times, PERCENTILES.values(), strict=True):
                    axes.plot(time, row, marker, color=colour, markersize=8, markeredgewidth=2)
                seen += times
        axes.set_xlabel(f"{metric}: p50, p90, p99 (s)")
        _set_scale(axes, seen)
        axes.grid(axis="x", color="0.85", linewidth=0.6)
        _bare(axes)
    figure.axes[0].set_yticks(range(len(names)), names)
    figure.axes[0].set_ylim(len(names) - 0.5, -0.5)
    handles = [
        Line2D([], [], color="black", linestyle="none", marker=marker, label=f"p{percent}")
        for percent, marker in PERCENTILES.items()
    ]
    figure.legend(handles=handles, loc="outside upper right", ncols=3, frameon=False)
    return figure


def throughput_bars(runs: Runs, path: str | Path) -> Figure:
    """Draw each system's requests/s: a bar up to the median, and a dot for each of several rounds.

    The median's number is in a separate column, since next to a dot it would look like the dot's.
    """
    several = any(len(rounds) > 1 for rounds in runs.values())
    names, lines = _row_names(runs)
    figure = _figure(1.3 + max(0.5, 0.2 * lines) * len(runs), runs)
    axes = figure.subplots()
    # Horizontally a share of the axes, vertically their rows.
    beside = axes.get_yaxis_transform()
    most = 0.0
    for row, rounds in enumerate(runs.values()):
        rates = [figures(run).requests_s for run in rounds]
        middle, most = statistics.median(rates), max([most, *rates])
        axes.barh(row, middle, 0.66, color=COLOURS[row % len(COLOURS)])
        places = [row + 0.36 * ((i + 0.5) / len(rates) - 0.5) for i in range(len(rates))]
        if several:
            axes.plot(rates, places, **DOT, clip_on=False)
        axes.text(1.02, row, number_text(middle), transform=beside, va="center")
    if several:
        axes.text(1.02, -0.5, "median", transform=beside, va="bottom")
    axes.set_yticks(range(len(runs)), names)
    axes.set_ylim(len(runs) - 0.5, -0.5)
    axes.set_xlim(0, 1.04 * most or 1.0)
    axes.set_xlabel("throughput (finished requests/s)")
    axes.grid(axis="x", color="0.85", linewidth=0.6)
    _bare(axes)
    if several:
        handles = {"median of the rounds": Patch(color="0.6"), "one round": Line2D([], [], **DOT)}
        figure.legend(handles.values(), handles, loc="outside upper right", ncols=2, frameon=False)
    save_picture(figure, path)
    return figure


def _lanes(run: RunRecord) -> list[_Lane]:
    """Return the lanes of each group, and within a group those of each instance."""
    blocks: dict[tuple[str, int], list[Block]] = {}
    for step in run.steps:
        for number, (start, end) in enumerate(step.stages):
            blocks.setdefault((step.instance, number), []).append((step_kind(step), start, end))
    arriving: dict[str, list[_Lane]] = {}
    for (source, dest), transfers in transfer_lanes(run).items():
        tracks = [[("transfer", t.start, t.end) for t in track] for track in transfers]
        label = f"{source} \N{RIGHTWARDS ARROW} {dest}"
        arriving.setdefault(dest, []).append(_Lane(label, tracks))
    places = [
        (group, name, number)
        for name, groups in run.groups.items()
        for number, group in enumerate(groups)
    ]
    order = list(dict.fromkeys(group for group, _, _ in places))
    lanes = []
    for group, name, number in sorted(places, key=lambda place: order.index(place[0])):
        if number == 0:
            lanes += arriving.get(name, [])
        words = ", ".join(filter(None, [name, part_names(run, name)[number]]))
        lanes.append(_Lane(f"{group}: {words}", [blocks.get((name, number), [])]))
    return lanes


def _window(
    run: RunRecord, lanes: Sequence[_Lane], start: float | None, stop: float | None
) -> tuple[float, float]:
    if start is None:
        start = min(
            (block[1] for lane in lanes for track in lane.tracks for block in track), default=0.0
        )
    if stop is None:
        stop = min(start + DEFAULT_WINDOW_S, run.wall_s)
        for track in (track for lane in lanes for track in lane.tracks):
            ends = sorted(end for _, _, end in track if end > start)
            stop = min([stop, *ends[MAX_BLOCKS - 1 : MAX_BLOCKS]])
    return start, stop


def _draw_lane(axes: Axes, row: int, lane: _Lane, start: float, stop: float) -> set[str]:
    """Draw the blocks inside the window; return their kinds."""
    inside = [[b for b in track if b[1] < stop and b[2] > start] for track in lane.tracks]
    inside = [track for track in inside if track]
    for number, track in enumerate(inside):
        height = 0.76 / len(inside)
        # Edges separate neighbours, but would cover blocks of one or two pixels. Transfers may be
        # that short, so their edges have their own colour.
        edge = 0.5 if len(track) <= 1.5 * MAX_BLOCKS else 0.0
        moves = track[0][0] == "transfer"
        axes.broken_barh(
            [(a, b - a) for _, a, b in track],
            (row - 0.38 + number * height, height),
            facecolors=[KINDS[kind][1] for kind, _, _ in track],
            edgecolor=KINDS["transfer"][1] if moves else "white" if edge else "none",
            linewidth=1.2 if moves else edge,
        )
    return {kind for track in inside for kind, _, _ in track}


def _draw_cdfs(axes: Axes, values: Mapping[str, Sequence[float]], xlabel: str, ylabel: str) -> None:
    """Draw a line per system that has values."""
    for number, found in enumerate(values.values()):
        if found:
            axes.ecdf(found, **_line(number))
    axes.set_xlabel(xlabel)
    axes.set_ylabel(ylabel)
    axes.set_ylim(0, 1.02)
    axes.set_yticks([0, 0.25, 0.5, 0.75, 0.99])
    axes.grid(color="0.85", linewidth=0.6)
    _set_scale(axes, [value for found in values.values() for value in found])


def _set_scale(axes: Axes, values: Sequence[float]) -> None:
    """Make the horizontal axis logarithmic if values differ widely; say if there are none."""
    positive = [value for value in values if value > 0]
    if not values:
        axes.text(0.5, 0.5, "no values", transform=axes.transAxes, ha="center")
    if not positive or max(positive) <= LOG_FROM * min(positive):
        return
    ratio = max(positive) / min(positive)
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if ratio < 1000 else (1.0,)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.xaxis.set_minor_locator(NullLocator())


def _legend_columns(names: Collection[str]) -> int:
    """Return how many names fit side by side: all of them, or columns as wide as the longest."""
    handle, letter = 0.7, 0.075
    if handle * len(names) + letter * sum(map(len, names)) < WIDTH:
        return len(names)
    return max(int(WIDTH / (handle + letter * max(map(len, names)))), 1)


def _line(number: int) -> dict[str, Any]:
    """Return the line style of a system by its number, in all plots; up to 36 are different."""
    return {
        "color": COLOURS[number % len(COLOURS)],
        "linestyle": DASHES[number % len(DASHES)],
        "linewidth": 2.0,
        # Lines with gaps are drawn over lines without.
        "zorder": 2.0 + 0.1 * (number % len(DASHES)),
    }


def _row_names(runs: Runs) -> tuple[list[str], int]:
    """Return the names of rows, wrapped, and the most lines of one."""
    names = [fill(name, 30) for name in runs]
    return names, max(name.count("\n") + 1 for name in names)


def _bare(axes: Axes) -> None:
    axes.set_axisbelow(True)
    axes.tick_params(left=False)
    axes.spines[["top", "right", "left"]].set_visible(False)


def _figure(height: float, runs: Runs) -> Figure:
    """Return a figure of this height in inches, plus space for a footnote on emulation."""
    lines = [line for said in emulation(runs) for line in wrap(said, 150)]
    figure = Figure(figsize=(WIDTH, height + 0.17 * len(lines)), layout="constrained")
    if lines:
        figure.supxlabel("\n".join(lines), x=0.01, ha="left", fontsize=9)
    return figure
