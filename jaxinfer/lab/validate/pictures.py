"""Draws predicted over measured times, one picture per engine."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from jaxinfer.lab.validate.table import Compared
from jaxinfer.report.pictures import save_picture
from jaxinfer.report.plots import COLOURS

_SIZE = (11.0, 5.2)  # Inches.


def draw(folder: Path, ending: str, compared: Sequence[Compared]) -> list[str]:
    """Draw a scatter plot per engine; return the names of the files."""
    names = []
    for backend in sorted({each.point.row["backend"] for each in compared if each.is_predicted}):
        own = [each for each in compared if each.point.row["backend"] == backend]
        names.append(f"scatter-{backend}.{ending}")
        save_picture(_scatter(backend, own), folder / names[-1])
    return names


def draw_requests(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Draw a scatter plot of single requests: predicted over measured milliseconds."""
    figure = Figure(figsize=_SIZE, layout="constrained")
    for axes, name in zip(figure.subplots(1, 2), ("tpot", "ttft"), strict=True):
        shown = [row for row in rows if row[f"silicon_{name}_ms"] != ""]
        measured = [row[f"silicon_{name}_ms"] for row in shown]
        ours = [row[f"{name}_ms"] for row in shown]
        axes.scatter(measured, ours, s=14, color=COLOURS[0], alpha=0.6)
        if shown:
            _finish(axes, [*measured, *ours])
        axes.set_title(f"{name.upper()} of each request")
    save_picture(figure, path)


def _finish(axes: Axes, ends: Sequence[float]) -> None:
    """Finish a picture: logarithmic axes, and the line on which both sides are equal."""
    line = [min(ends), max(ends)]
    axes.plot(line, line, color="black", linewidth=0.8)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("measured (ms)")
    axes.set_ylabel("predicted (ms)")


def _scatter(backend: str, compared: Sequence[Compared]) -> Figure:
    figure = Figure(figsize=_SIZE, layout="constrained")
    groups = sorted({each.point.group for each in compared if each.is_predicted})
    for axes, name in zip(figure.subplots(1, 2), ("tpot", "ttft"), strict=True):
        ends: list[float] = []
        for group, colour in zip(groups, COLOURS * len(groups), strict=False):
            shown = [e for e in compared if e.point.group == group and e.counts(name)]
            measured = [getattr(each.point, f"{name}_ms") for each in shown]
            ours = [each.predicted(name) for each in shown]
            ends += [*measured, *ours]
            label = " ".join(filter(None, (*group[:2], group[3]))).replace("$", r"\$")
            axes.scatter(measured, ours, s=14, color=colour, alpha=0.6, label=label)
        if ends:
            _finish(axes, ends)
        axes.set_title(f"{backend}: mean {name.upper()}")
        axes.legend(fontsize="small")
    return figure
