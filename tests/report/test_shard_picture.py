"""The picture of layouts: four lines at most, with names that do not overlap."""

import math
from itertools import pairwise
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
        (text,) = (text for text in axes.texts if text.get_text() == "32,314")
        assert axes.bbox.x0 <= text.get_window_extent().x0
        assert text.get_window_extent().x1 <= axes.bbox.x1


def test_layouts_that_are_alike_are_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where one is refused in a phase, they are not alike."""
    for decode, names in (
        (SECONDS, ["flat", "steep, alike"]),
        ({name: SECONDS[name] for name in ("flat", "steep")}, ["flat", "steep", "alike"]),
    ):
        prefill = drawn(monkeypatch, SECONDS, decode).axes[0]
        words = {text.get_text() for text in prefill.texts}
        assert words == {*names, "32,314", "64 tokens "}


def test_four_layouts_at_most_are_drawn_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fastest ones, then the next at 64 tokens; their lines end at nearly the same time."""
    layouts: dict[str, SecondsOf] = {
        f"layout {number}": lambda n, number=number: n + number / 9 for number in range(9)
    }
    layouts["last"] = lambda n: 50.0 + 0.9 * n
    figure = drawn(monkeypatch, layouts)
    (axes,) = figure.axes
    assert axes.get_title(loc="left") == "prefill: layout 0 is the fastest, last from 501 tokens on"
    named = [text for text in axes.texts if text.get_text() in layouts]
    expected = {"last", "layout 0", "layout 1", "layout 2"}
    assert {text.get_text() for text in named} == expected
    boxes = [text.get_window_extent() for text in named]
    boxes.sort(key=lambda box: box.y0)
    assert all(low.y1 <= high.y0 for low, high in pairwise(boxes))
    assert "layouts.csv" in figure.get_supxlabel()


def test_a_line_ends_where_a_step_no_longer_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    short: dict[str, SecondsOf] = {"flat": lambda n: 1.0 if n <= 100 else math.inf}
    (axes,) = drawn(monkeypatch, short).axes
    (line,) = (line for line in axes.lines if len(line.get_xdata()) > 2)
    assert max(line.get_xdata()) == 96
