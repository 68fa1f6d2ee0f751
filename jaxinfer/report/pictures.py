"""Saves pictures as files, in several formats."""

import math
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from jaxinfer.errors import JaxinferError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Metadata by the file's suffix, so that the same picture always gives the same file.
FORMATS: dict[str, dict[str, Any]] = {
    "png": {},
    "svg": {"Date": None},
    "pdf": {"CreationDate": None},
}
DPI = 150
# Least distance of two lines' names, as a share of the panel's height.
APART = 0.055
# Least height of a name, as a share of the panel's: lower ones would touch the horizontal axis.
BOTTOM = 0.035


def save_picture(figure: "Figure", path: str | Path) -> None:
    """Write a figure in the format that the file's ending names: .png, .svg or .pdf.

    Raises:
        JaxinferError: the file has another ending.
    """
    from matplotlib import rc_context

    kind = Path(path).suffix.removeprefix(".")
    if kind not in FORMATS:
        endings = ", ".join(f".{name}" for name in FORMATS)
        raise JaxinferError(f"picture {path}: must end in one of {endings}")
    # Text stays text: letters in an SVG, and TrueType in a PDF. By default, matplotlib writes
    # outlines, which publishers refuse.
    with rc_context({"pdf.fonttype": 42, "svg.fonttype": "none", "svg.hashsalt": "jaxinfer"}):
        figure.savefig(path, dpi=DPI, format=kind, metadata=FORMATS[kind])


def name_lines(
    axes: "Axes", ends: Mapping[str, tuple[float, float, str]], apart: float = APART
) -> None:
    """Write the name of each line to the right of all lines' ends, in the line's colour.

    The names replace the right edge of the panel. Scales and limits of the axes must be set before.

    Args:
        ends: name -> x and y of the line's end, and its colour.
        apart: least distance between two names, as a share of the panel's height.
    """
    if not ends:
        return
    axes.spines[["top", "right"]].set_visible(False)
    scaled = math.log if axes.get_yscale() == "log" else float
    low, high = map(scaled, axes.get_ylim())
    own = {name: (scaled(y) - low) / (high - low) for name, (_, y, _) in ends.items()}
    order = sorted(own, key=lambda name: own[name])
    places = _apart([own[name] for name in order], apart)
    # Names were moved up only; without this shift, most would be above their lines.
    shift = fmean(places) - fmean(own.values())
    places = _apart([max(place - shift, BOTTOM) for place in places], apart)
    right = max(x for x, _, _ in ends.values())
    for name, place in zip(order, places, strict=True):
        axes.annotate(
            name,
            (right, place),
            xycoords=("data", "axes fraction"),
            xytext=(6, 0),
            textcoords="offset points",
            va="center",
            color=ends[name][2],
            annotation_clip=False,
        )


def _apart(places: list[float], least: float) -> list[float]:
    """Return increasing places, moved up where the distance to the one before is too small."""
    found = places[:1]
    for place in places[1:]:
        found.append(max(place, found[-1] + least))
    return found


def picture_link(words: str, file: str) -> str:
    """Return markdown that shows the picture, or a link if browsers do not show its format."""
    return f"{'' if file.endswith('.pdf') else '!'}[{words}]({file})"


def can_be_drawn(*values: float) -> bool:
    """Tell whether a picture can show these numbers: none may be infinite or extreme."""
    return all(value == 0 or 1e-15 < abs(value) < 1e15 for value in values)
