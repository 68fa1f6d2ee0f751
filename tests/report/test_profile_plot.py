"""A profile's table and picture: numbers by hand, artists."""

from pathlib import Path

import numpy as np
import pytest
from matplotlib.axes import Axes

from jaxinfer.report.profile_plot import draw_profile, profile_figures, profile_table
from jaxinfer.steps.profile import Profile
from jaxinfer.steps.times import StepPoint

KEY = {"model": "tiny", "dtype": "float32", "chunk_tokens": 64}
# Stages of 2 ms and 1 ms a token, and 0.5 s; then contexts, of 100 us a token and of 25 us.
PREFILLS = [(n, (2e-3 * n + 0.5, 1e-3 * n)) for n in (100, 200, 400)]
MIXED = [(p, d, (1e-4 * p + 0.25, 2.5e-5 * d)) for d in (4000, 0, 1000) for p in (0, 500, 1000)]
EXACT = Profile(KEY, PREFILLS, MIXED, [StepPoint(((0, 1),), (1.0, 1.0))])
# Times 1, 1, 2 of lengths 1, 3, 2: the best line is 10 / 9, which is off by 1 / 9 and by 4 / 9.
BENT = Profile(
    KEY,
    [(1, (1.0,)), (3, (1.0,)), (2, (2.0,))],
    [(p, d, (0.5 + p + d,)) for p in (0, 1) for d in (0, 1)],
    [StepPoint(((0, 1),), (1.0,))],
)


def test_a_line_for_each_instance_and_equation() -> None:
    table = profile_table({"x": (EXACT, [1.0, 4.0]), "y": (BENT, [2.0])})
    headers = ["instance", "equation", "coefficients", "R^2", "MAPE"]
    assert [str(column.header) for column in table.columns] == headers
    x_2, x_3, y_2, y_3 = zip(*(column.cells for column in table.columns), strict=True)
    # 2 + 4 x 1 ms a token; 4 x 25 us of decode context.
    assert x_2 == ("x", "2: partial prefill", "6 ms per token + 500 ms", "1.000", "0.0 %")
    assert x_3 == (
        "",
        "3: mixed iteration",
        "100 us per token of prefill context + 100 of decode context + 250 ms",
        "1.000",
        "0.0 %",
    )
    # How well a line fits is told of the times as measured.
    r2 = 1 - (2 * (1 / 9) ** 2 + (8 / 9) ** 2) / (2 / 3)
    assert y_2[:2] == ("y", "2: partial prefill")
    assert str(y_2[2]).endswith(" ms per token + 2222 ms")
    assert y_2[3:] == (f"{r2:.3f}", "22.2 %")
    assert y_3[3:] == ("1.000", "0.0 %")


def test_figures_are_those_of_the_table() -> None:
    """2 + 4 x 1 ms a token, and 100 us of either context."""
    found = profile_figures({"x": (EXACT, [1.0, 4.0])}, {})["instances"]["x"]
    assert found["prefill"] == pytest.approx(
        {"per_token": 6e-3, "constant": 0.5, "r2": 1, "mape": 0}, abs=1e-9
    )
    assert found["mixed"] == pytest.approx(
        {
            "per_prefill_context": 1e-4,
            "per_decode_context": 1e-4,
            "constant": 0.25,
            "r2": 1,
            "mape": 0,
        },
        abs=1e-9,
    )


def drawn(axes: Axes) -> list[tuple[str, list[float], list[float]]]:
    """Marker or line, and where it is."""
    return [
        (
            line.get_marker() if line.get_linestyle() == "None" else line.get_linestyle(),
            np.asarray(line.get_xdata(), float).tolist(),
            np.asarray(line.get_ydata(), float).tolist(),
        )
        for line in axes.lines
    ]  # type: ignore[return-value]


def test_points_and_lines(tmp_path: Path) -> None:
    """The lines are of the emulated device, whose second stage takes four times as long."""
    path = tmp_path / "p.png"
    figure = draw_profile("x", EXACT, [1.0, 4.0], path)
    assert path.read_bytes()[:4] == b"\x89PNG"
    left, right = figure.axes
    lengths, times = [100.0, 200.0, 400.0], pytest.approx([1.1, 1.7, 2.9])
    assert drawn(left) == [("o", lengths, times), ("-", lengths, times)]
    assert [text.get_text() for text in left.get_legend().get_texts()] == ["measured", "eq. 2"]  # type: ignore[union-attr]
    contexts = [0.0, 500.0, 1000.0]
    expected = []
    for decode in (0, 1000, 4000):
        at = pytest.approx([250 + 0.1 * p + 0.1 * decode for p in contexts])
        expected += [("o", contexts, at), ("-", contexts, at)]
    assert drawn(right) == expected
    labels = [text.get_text() for text in right.get_legend().get_texts()]  # type: ignore[union-attr]
    assert labels == ["0 tokens", "1,000 tokens", "4,000 tokens"]
    colours = [line.get_color() for line in right.lines]
    assert colours[::2] == colours[1::2]
    assert len(set(colours)) == 3
    assert (left.get_xlabel(), left.get_ylabel()) == ("length of the prefill (tokens)", "time (s)")
    assert right.get_xlabel() == "prefill context (tokens)"
    assert right.get_ylabel() == "time of one iteration (ms)"


@pytest.mark.parametrize(
    ("slowdowns", "emulated"),
    [([1.0, 1.0], ""), ([1.0, 4.0], ", emulated 4 times slower"), ([2.5, 2.5], ", emulated 2.5 t")],
)
def test_the_title_says_what_was_measured(
    slowdowns: list[float], emulated: str, tmp_path: Path
) -> None:
    figure = draw_profile("x", EXACT, slowdowns, tmp_path / "p.png")
    title = figure.get_suptitle()
    assert title.startswith(f"x: tiny, float32, chunks of 64 tokens{emulated}")
    assert ("emulated" in title) == bool(emulated)
