"""The picture of layouts: no line upon another, no number over the edge."""

from pathlib import Path

import pytest
from matplotlib.figure import Figure

from jaxinfer.lab.sharding import picture as shard_picture
from jaxinfer.lab.sharding.crossings import SecondsOf, fastest, token_counts

COUNTS = token_counts(65536)
SECONDS: dict[str, SecondsOf] = {
    "flat": lambda n: 1.0,
    "steep": lambda n: n / 32313,
    "alike": lambda n: n / 32313,
}


def drawn(monkeypatch: pytest.MonkeyPatch, *phases: dict[str, SecondsOf]) -> Figure:
    figures: list[Figure] = []
    monkeypatch.setattr(shard_picture, "save_picture", lambda figure, path: figures.append(figure))
    seconds = dict(zip(("prefill", "decode"), phases, strict=False))
    best = {phase: fastest(of, COUNTS) for phase, of in seconds.items()}
    asked = dict.fromkeys(seconds, 64)
    shard_picture.draw_seconds(Path("x.png"), seconds, seconds, best, COUNTS, asked, "a title")
    figures[0].draw_without_rendering()
    return figures[0]


def test_a_number_near_the_edge_stays_within_the_panel(monkeypatch: pytest.MonkeyPatch) -> None:
    figure = drawn(monkeypatch, SECONDS, SECONDS)
    for axes in figure.axes:
        (text,) = axes.texts
        assert text.get_text() == "32,314"
        assert axes.bbox.x0 <= text.get_window_extent().x0
        assert text.get_window_extent().x1 <= axes.bbox.x1


def test_layouts_that_are_alike_are_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where one is refused in a phase, they are not alike."""
    for decode, labels in (
        (SECONDS, ["flat", "steep, alike"]),
        ({name: SECONDS[name] for name in ("flat", "steep")}, ["flat", "steep", "alike"]),
    ):
        (legend,) = drawn(monkeypatch, SECONDS, decode).legends
        assert [text.get_text() for text in legend.get_texts()][:-3] == labels
