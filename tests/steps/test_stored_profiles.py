"""Profiles on the disk, and fitted step times against a search of all of them."""

import os
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest

from jaxinfer.steps import profile as profiles
from jaxinfer.steps.profile import Profile, load_profile, profile_path, store_profile
from jaxinfer.steps.shapes import StepLimits
from jaxinfer.steps.times import Point, StepTimes, features

KEY = {"model": "m", "device": "cpu", "stages": [{"layers": 3, "slow": 2}]}
MADE = Profile(
    KEY, [(8, (0.5, 0.25))], [(16, 32, (1.0, 0.5))], [Point(((0, 8), (5, 1)), (0.5, 0.25))]
)


def test_a_profile_is_found_whatever_the_order_of_its_key(tmp_path: Path) -> None:
    path = store_profile(MADE, tmp_path)
    turned = {"stages": [{"slow": 2, "layers": 3}], "device": "cpu", "model": "m"}
    assert profile_path(turned, tmp_path) == path
    assert load_profile(turned, tmp_path) == MADE
    assert load_profile(KEY | {"model": "n"}, tmp_path) is None


def test_a_profile_is_whole_or_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever reads while another one is stored finds the one before."""
    path = store_profile(MADE, tmp_path / "new")
    seen = []
    replace = os.replace

    def watched(source: Path, dest: Path) -> None:
        seen.append((load_profile(KEY, tmp_path / "new"), source != dest))
        replace(source, dest)

    monkeypatch.setattr(profiles.os, "replace", watched)
    other = Profile(KEY, [(8, (9.0, 9.0))], MADE.mixed, MADE.points)
    assert store_profile(other, tmp_path / "new") == path
    assert seen == [(MADE, True)]
    assert load_profile(KEY, tmp_path / "new") == other
    assert list((tmp_path / "new").iterdir()) == [path]


def test_time_never_falls_with_work() -> None:
    """The best of all fits without a negative coefficient, found by trying each set of columns."""
    limits = StepLimits(16, 128, max_pages=64, page_size=16)
    # Steps get faster with the pairs, a little: noise, that the entries must not pay for.
    parts = [
        [(100 * i, 1), (50, 1), (0, 20 + 5 * j)]
        for i, j in ((1, 0), (2, 3), (3, 1), (4, 2), (5, 4))
    ]
    x = np.array([features(each) for each in parts])
    y = 0.1 + 1e-4 * x[:, 2] - 1e-5 * x[:, 1]
    points = [Point(tuple(p), (9.0, float(t))) for p, t in zip(parts, y, strict=True)]
    times = StepTimes.fit(limits, points, stage=1)
    (found,) = times.coefficients.values()
    best, least = None, np.inf
    for count in range(1, 4):
        for kept in map(list, combinations(range(3), count)):
            solved, *_ = np.linalg.lstsq(x[:, kept], y, rcond=None)
            error = float(((y - x[:, kept] @ solved) ** 2).sum())
            if (solved >= 0).all() and error < least:
                best, least = np.zeros(3), error
                best[kept] = solved
    assert list(found) == pytest.approx(list(best), rel=1e-6)
    assert found[1] == 0
    assert min(found[0], found[2]) > 0
