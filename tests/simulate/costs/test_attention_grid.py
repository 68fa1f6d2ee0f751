"""Attention by measured points: exact where the truth is known, holes, edges, points anywhere."""

import random
from itertools import pairwise, product

import pytest
from hypothesis import given
from hypothesis import strategies as st
from properties import examples

from jaxinfer.simulate.costs.attention_grid import At, AttentionGrid

SIDES = ((16.0, 64.0, 512.0), (0.0, 100.0, 4000.0), (1.0, 8.0, 128.0), (16.0, 300.0, 2000.0))


def key_of(chunk: float, before: float) -> float:
    return before + chunk / 2


def truth(c: float, p: float, n: float, k: float) -> float:
    """A launch, each token, each pair of a token and an entry, and the longest run of entries."""
    pairs, run = c * (p + c / 2), (p + c if c else 0)
    return 3 + 0.5 * c + 0.25 * n + 0.01 * pairs + 0.02 * n * k + 0.003 * k + 0.004 * run


def grid_of(*points: At) -> AttentionGrid:
    return AttentionGrid({at: truth(*at) for at in points}, key_of)


@examples(100)
@given(st.lists(st.floats(0.1, 9.0), min_size=16, max_size=16), st.data())
def test_a_full_grid_is_linear_in_each(values: list[float], data: st.DataObject) -> None:
    """The grid against the formula with all sixteen corners of one cell."""
    ends = [(side[0], side[2]) for side in SIDES]
    points = dict(zip(product(*ends), values, strict=True))
    at = [data.draw(st.floats(low, high)) for low, high in ends]
    expected = 0.0
    for corner, value in points.items():
        for x, y, (low, high) in zip(at, corner, ends, strict=True):
            value *= (x - low if y == high else high - x) / (high - low)
        expected += value
    found = AttentionGrid(points, key_of)
    assert (found.size, found.filled) == (16, 0)
    assert found(*at) == pytest.approx(expected)


def test_a_full_grid_has_its_points() -> None:
    rng = random.Random(0)
    points = {at: rng.uniform(1, 9) for at in product(*SIDES)}
    found = AttentionGrid(points, key_of)
    assert all(found(*at) == value for at, value in points.items())


@pytest.mark.parametrize("axis", range(4))
def test_between_two_places_only_these_two_count(axis: int) -> None:
    """A quarter of the way, among points that follow no law."""
    rng = random.Random(0)
    points = {at: rng.uniform(1, 9) for at in product(*SIDES)}
    found = AttentionGrid(points, key_of)
    for at, (low, high) in product(points, pairwise(SIDES[axis])):
        here, a, b = (
            (*at[:axis], x, *at[axis + 1 :]) for x in (0.75 * low + 0.25 * high, low, high)
        )
        assert found(*here) == pytest.approx(0.75 * points[a] + 0.25 * points[b])


def test_two_sweeps_fill_each_others_holes() -> None:
    """Sweeps are over places of their own; what they leave open is met, as is what lies beyond."""
    sweeps = [product(*(side[:2] for side in SIDES)), product(*(side[1:] for side in SIDES))]
    points = [at for sweep in sweeps for at in sweep]
    found = grid_of(*points)
    assert found.size == 81
    assert found.filled == 81 - len(set(points))
    for at in product(*SIDES):
        assert found(*at) == pytest.approx(truth(*at), rel=1e-6)
    # Between places of n and k, where the truth is linear, and beyond the ends of all axes.
    for at in (
        (64.0, 100.0, 70.0, 1000.0),
        (2048.0, 9000.0, 500.0, 9000.0),
        (64.0, 100.0, 8.0, 9000.0),
        (2.0, 0.0, 1.0, 1.0),
        (64.0, 9000.0, 8.0, 300.0),
    ):
        assert found(*at) == pytest.approx(truth(*at), rel=1e-6)


def test_a_hole_is_between_what_is_around_it() -> None:
    """A kernel that takes twice the time from 8 decodes on, measured but for a few points."""
    points = {at: truth(*at) * (2 if at[2] >= 8 else 1) for at in product(*SIDES)}
    holes = [(64.0, 100.0, 8.0, 300.0), (512.0, 4000.0, 128.0, 2000.0), (64.0, 0.0, 1.0, 300.0)]
    found = AttentionGrid({at: t for at, t in points.items() if at not in holes}, key_of)
    assert found.filled == 3
    for at in holes:
        assert 0.95 * truth(*at) < found(*at) < 2.05 * truth(*at)


def test_points_may_lie_anywhere() -> None:
    """So many places that a grid of them all has 10^7 points: it gets coarser, and stays right."""
    rng = random.Random(1)

    def anywhere() -> At:
        return (
            float(rng.randint(2, 2048)),
            float(rng.randint(0, 8000)),
            float(rng.randint(1, 128)),
            float(rng.randint(1, 8000)),
        )

    found = grid_of(*(anywhere() for _ in range(60)))
    assert 1000 < found.size <= 20_060
    for _ in range(100):
        c, p, n, k = anywhere()
        # Between its points a grid is above a square of c by no more than a cell's width allows.
        assert found(c, p, n, k) == pytest.approx(truth(c, p, n, k), rel=0.25)
        assert found(2048.0, p, n, k) == pytest.approx(truth(2048.0, p, n, k), rel=1e-3)


def test_a_coarser_grid_keeps_both_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four chunks by two counts of decodes, three of them not measured, of which two may be."""
    monkeypatch.setattr("jaxinfer.simulate.costs.attention_grid._MOST_FILLED", 2)
    points = {(c, 0.0, 1.0, 1.0): micros for c, micros in ((1.0, 2.0), (2.0, 9.0), (3.0, 4.0))}
    points |= {(4.0, 0.0, 1.0, 1.0): 3.0, (1.0, 0.0, 2.0, 1.0): 5.0}
    found = AttentionGrid(points, key_of)
    assert (found.size, found.filled) == (6, 2)
    measured = {at: micros for at, micros in points.items() if at[0] != 2}
    assert all(found(*at) == micros for at, micros in measured.items())
    assert found(2.0, 0.0, 1.0, 1.0) == pytest.approx(3.0)  # Between 1 and 3.


def test_one_point_is_a_grid() -> None:
    found = AttentionGrid({(0.0, 0.0, 4.0, 100.0): 7.0}, key_of)
    assert found(0.0, 0.0, 4.0, 100.0) == 7.0
    assert found(0.0, 0.0, 8.0, 200.0) > 7.0
