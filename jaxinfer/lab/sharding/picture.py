"""Plots a step's time against its tokens, and marks where another layout becomes the fastest."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from textwrap import fill

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullLocator

from jaxinfer.lab.sharding.crossings import SecondsOf
from jaxinfer.report.pictures import name_lines, save_picture
from jaxinfer.report.plots import COLOURS, DOT, MAX_LINES, WIDTH

UNITS = {"prefill": "tokens", "decode": "sequences"}
AXES = {"prefill": "tokens of the prompt", "decode": "sequences, with one token each"}
# Part of a panel's width in which lines are drawn; their names are in the rest.
LINES = 0.66


def draw_seconds(
    path: Path,
    seconds: Mapping[str, Mapping[str, SecondsOf]],
    fitting: Mapping[str, Mapping[str, SecondsOf]],
    fastest: Mapping[str, Sequence[tuple[int, str]]],
    counts: Sequence[int],
    asked: Mapping[str, int],
    title: str,
) -> None:
    """Draw a panel for each phase, with at most four layouts in each.

    These layouts are the fastest for some number of tokens, then the next ones for the number in
    the question. A line ends where the step no longer fits the cards.

    Args:
        seconds: phase -> layout -> seconds by tokens.
        fitting: the same, but infinite where the step does not fit.
        fastest: phase -> numbers of tokens from which on a layout is the fastest.
        asked: phase -> number of tokens in the user's question.
    """
    figure = Figure(figsize=(WIDTH, 5), layout="constrained")
    panels = figure.subplots(1, len(seconds), squeeze=False)[0]
    names = _alike(seconds, fitting, counts)
    colours: dict[str, str] = {}
    left_out = False
    for axes, (phase, of) in zip(panels, fitting.items(), strict=True):
        here = [name for name in names if name in of and of[name](counts[0]) < math.inf]
        first = [name for _, name in fastest[phase]]
        order = sorted(here, key=lambda name: (name not in first, of[name](asked[phase])))
        lines = {name: [(c, of[name](c)) for c in counts] for name in order[:MAX_LINES]}
        lines = {name: [p for p in points if p[1] < math.inf] for name, points in lines.items()}
        for name, points in lines.items():
            colour = colours.setdefault(name, COLOURS[len(colours) % len(COLOURS)])
            axes.plot(*zip(*points, strict=True), color=colour, linewidth=1.8)
        left_out |= sum(len(names[name]) for name in lines) < len(of)
        _mark_changes(axes, of, fastest[phase])
        _arrange(axes, phase, max((p[-1][0] for p in lines.values()), default=counts[-1]))
        ends = {", ".join(names[n]): (*p[-1], colours[n]) for n, p in lines.items() if p}
        name_lines(axes, {fill(said, 26): end for said, end in ends.items()})
        axes.axvline(asked[phase], color="0.5", linewidth=1, linestyle=(0, (2, 2)))
        axes.text(
            asked[phase],
            0.99,
            f"{asked[phase]:,} {UNITS[phase]} ",
            transform=axes.get_xaxis_transform(),
            ha="right",
            va="top",
            color="0.4",
        )
        axes.set_title(_finding(phase, fastest[phase]), loc="left", fontsize=11)
    figure.suptitle(title, x=0.01, ha="left")
    said = "A line ends where a step no longer fits the cards."
    if left_out:
        said += " The other layouts are in layouts.csv."
    figure.supxlabel(said, x=0.01, ha="left", fontsize=9)
    save_picture(figure, path)


def _finding(phase: str, fastest: Sequence[tuple[int, str]]) -> str:
    """Say which layout is the fastest, and from which number of tokens on."""
    if not fastest:
        return f"{phase}: no layout fits"
    (_, first), *others = fastest
    said = f"{phase}: {first} is the fastest"
    for number, (count, name) in enumerate(others):
        said += f", {name} from {count:,}{'' if number else f' {UNITS[phase]}'} on"
    return fill(said, 62)


def _mark_changes(
    axes: Axes, of: Mapping[str, SecondsOf], fastest: Sequence[tuple[int, str]]
) -> None:
    """Mark where another layout becomes the fastest, and write the number of tokens there."""
    changes = [(count, of[name](count)) for count, name in fastest[1:]]
    axes.plot([count for count, _ in changes], [s for _, s in changes], **DOT)
    for count, found in changes:
        axes.annotate(
            f"{count:,}",
            (count, found),
            xytext=(7, -13),
            textcoords="offset points",
            path_effects=[withStroke(linewidth=3, foreground="white")],
            zorder=4,
        )


def _arrange(axes: Axes, phase: str, most: int) -> None:
    """Set scales and ticks, with space to the right of lines that end at ``most`` tokens."""
    axes.set(xscale="log", yscale="log", ylabel="seconds of a step", xlabel=AXES[phase])
    axes.set_xlim(0.9, max(most, 2) ** (1 / LINES))
    ticks = [10**power for power in range(math.floor(math.log10(most)) + 1)]
    axes.xaxis.set_major_locator(FixedLocator(ticks))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.grid(color="0.88", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)


def _alike(
    seconds: Mapping[str, Mapping[str, SecondsOf]],
    fitting: Mapping[str, Mapping[str, SecondsOf]],
    counts: Sequence[int],
) -> dict[str, list[str]]:
    """Group layouts whose lines coincide; return one of each group with all that it stands for."""
    found: dict[tuple[float | None, ...], list[str]] = {}
    tables = [of[phase] for of in (seconds, fitting) for phase in seconds]
    for name in dict.fromkeys(name for of in tables for name in of):
        drawn = (of[name](count) if name in of else None for of in tables for count in counts)
        found.setdefault(tuple(drawn), []).append(name)
    return {names[0]: names for names in found.values()}
