"""Draws seconds of a step over its tokens, a line per layout, with crossings of the fastest."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patheffects import withStroke
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from jaxinfer.lab.sharding.crossings import SecondsOf
from jaxinfer.report.pictures import save_picture
from jaxinfer.report.plots import COLOURS, DASHES, DOT, WIDTH

# Colour of layouts that do not fit the cards.
FAINT = 0.3
# A number within this factor of the panel's right edge is written to the left of its mark.
INWARD = 8


def draw_seconds(
    path: Path,
    seconds: Mapping[str, Mapping[str, SecondsOf]],
    fitting: Mapping[str, Mapping[str, SecondsOf]],
    fastest: Mapping[str, Sequence[tuple[int, str]]],
    counts: Sequence[int],
    asked: Mapping[str, int],
    title: str,
) -> None:
    """Draw a panel for each phase.

    Args:
        seconds: phase -> layout -> seconds by tokens.
        fitting: the same, but infinite where the step does not fit.
        fastest: phase -> numbers of tokens from which on a layout is the fastest.
        asked: phase -> number of tokens in the user's question.
    """
    figure = Figure(figsize=(WIDTH, 5.4), layout="constrained")
    panels = figure.subplots(1, len(seconds), squeeze=False)[0]
    names = _alike(seconds, fitting, counts)
    for axes, (phase, of_layouts) in zip(panels, seconds.items(), strict=True):
        for name in (name for name in names if name in of_layouts):
            seconds_of = of_layouts[name]
            style = _line(names, name)
            axes.plot(counts, list(map(seconds_of, counts)), alpha=FAINT, **style)
            within = [count for count in counts if fitting[phase][name](count) < math.inf]
            axes.plot(within, list(map(seconds_of, within)), **style)
        changes = fastest[phase][1:]
        axes.plot([c for c, _ in changes], [of_layouts[n](c) for c, n in changes], **DOT)
        for number, (count, name) in enumerate(changes):
            is_last = count * INWARD > counts[-1]
            axes.annotate(
                f"{count:,}",
                (count, of_layouts[name](count)),
                # Neighbours may be close to each other.
                xytext=(-7 if is_last else 7, 9 if number % 2 else -13),
                ha="right" if is_last else "left",
                textcoords="offset points",
                path_effects=[withStroke(linewidth=3, foreground="white")],
                zorder=4,
            )
        axes.axvline(asked[phase], color="0.5", linewidth=1, linestyle=(0, (2, 2)))
        axes.set(xscale="log", yscale="log", ylabel="seconds of a step")
        axes.set_xlabel(
            "tokens of the prompt" if phase == "prefill" else "sequences, one token each"
        )
        axes.set_title(phase, loc="left")
        axes.grid(color="0.88", linewidth=0.6)
        axes.xaxis.set_major_locator(LogLocator(10))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title, x=0.01, ha="left")
    handles = [
        Line2D([], [], label=", ".join(alike), **_line(names, name))
        for name, alike in names.items()
    ]
    handles.append(Line2D([], [], label="another is the fastest from here on", **DOT))
    handles.append(Line2D([], [], color="0.5", linewidth=1, linestyle=(0, (2, 2)), label="asked"))
    handles.append(Line2D([], [], color="0.2", alpha=FAINT, label="faint: too large for a card"))
    figure.legend(handles=handles, loc="outside lower center", ncols=4, frameon=False)
    save_picture(figure, path)


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


def _line(names: Mapping[str, Sequence[str]], name: str) -> dict[str, Any]:
    number = list(names).index(name)
    return {
        "color": COLOURS[number % len(COLOURS)],
        "linestyle": DASHES[number % len(DASHES)],
        "linewidth": 1.8,
    }
