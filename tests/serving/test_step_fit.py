"""Least squares by hand; TestLeastSquares in tests/systems has random ones against numpy's."""

import pytest

from jaxinfer.serving.step_fit import (
    DecodeFit,
    LeastSquares,
    MixedFit,
    PrefillFit,
    least_squares,
)


def test_seconds() -> None:
    assert PrefillFit(per_token=2, constant=5).seconds(10) == 25
    fit = MixedFit(per_prefill_context=2, per_decode_context=3, constant=7)
    assert fit.seconds(10, 100) == 327
    assert fit.seconds(0, 0) == 7
    assert DecodeFit(per_context=2, per_sequence=3, constant=7).seconds(10, 100) == 327


def fitted(*rows: tuple[float, ...]) -> list[float] | None:
    fit = LeastSquares(len(rows[0]) - 1)
    for number, (*x, y) in enumerate(rows):
        assert fit.count == number
        fit.add(x, y)
    return fit.solve()


def test_a_line() -> None:
    # By the normal equations: 3 a + 3 b = 12 and 5 a + 3 b = 15 (x of 0, 1 and 2).
    assert fitted((0, 1, 2.0), (1, 1, 5.0), (2, 1, 5.0)) == pytest.approx([1.5, 2.5])


@pytest.mark.parametrize("scale", [1e-12, 1e-6, 1.0, 1e6])
def test_units_do_not_matter(scale: float) -> None:
    found = fitted((0, 1, 1.0), (scale, 1, 3.0), (3 * scale, 1, 7.0))
    assert found == pytest.approx([2 / scale, 1])


def test_three_that_stand_on_each_other() -> None:
    rows = [(1, 1, 0, 3.0), (1, 1, 1, 7.0), (0, 1, 2, 10.0), (1, 0, 0, 1.0)]
    assert fitted(*rows) == pytest.approx([1, 2, 4])
    assert fitted((1, -2, 1, 2.0), (-2, 1, 1, -1.0), (1, 1, -2, 5.0)) is None
    assert fitted((1, -2, 1, 0.0), (-2, 1, 1, 3.0), (1, 1, -1, 0.0)) == pytest.approx([1, 2, 3])


@pytest.mark.parametrize(("apart", "decided"), [(1e-2, True), (1e-4, True), (1e-7, False)])
def test_columns_that_are_nearly_alike(apart: float, decided: bool) -> None:
    """The rest of the second column, squared, is held against rounding."""
    found = fitted((1, 1, 2.0), (1, 1 + apart, 2.0 + apart), (1, 1, 2.0))
    assert (found is not None) == decided
    if found:
        assert found == pytest.approx([1, 1], rel=1e-3)


def test_columns_that_have_nothing_in_common() -> None:
    assert fitted((1, 1, 3.0), (-1, 1, 1.0)) == pytest.approx([1, 2])
    assert fitted((1, 0, 0, 5.0), (0, 2, 0, 8.0), (0, 0, 3, 3.0)) == pytest.approx([5, 4, 1])


def test_undecided() -> None:
    assert LeastSquares(2).solve() is None
    assert fitted((0, 1, 1.0), (0, 2, 2.0)) is None
    assert fitted((1, 1, 1.0)) is None


def test_relative_and_absolute_errors() -> None:
    """A constant for 1 and 3: 2 in the middle; by relative errors (1/1 + 1/3) / (1 + 1/9)."""
    points = [((1.0,), 1.0), ((1.0,), 3.0)]
    assert least_squares(points, relative=False) == pytest.approx([2.0])
    assert least_squares(points, relative=True) == pytest.approx([1.2])
    assert least_squares([], relative=True) is None
    assert least_squares([((1.0, 0.0), 0.0)], relative=True) is None
