"""Saves pictures as files, in several formats."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxinfer.errors import JaxinferError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Metadata by the file's suffix, so that the same picture always gives the same file.
FORMATS: dict[str, dict[str, Any]] = {
    "png": {},
    "svg": {"Date": None},
    "pdf": {"CreationDate": None},
}
DPI = 150


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


def picture_link(words: str, file: str) -> str:
    """Return a link in markdown, which shows the picture if browsers show its format."""
    return f"{'' if file.endswith('.pdf') else '!'}[{words}]({file})"


def can_be_drawn(*values: float) -> bool:
    """Tell whether a picture can show these numbers: none is infinite or extreme."""
    return all(value == 0 or 1e-15 < abs(value) < 1e15 for value in values)
