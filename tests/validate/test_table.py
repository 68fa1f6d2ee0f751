"""Figures of comparisons: against numpy, and Kendall's tau by counting pairs."""

from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from properties import examples
from validate_cases import row, write_points

from jaxinfer.lab.validate.points import Point, Use, read_points
from jaxinfer.lab.validate.table import Compared, show, summarise

BOTH, ONE = Use(True, True), Use(True, False)


def point(ttft: float, tpot: float, system: str = "x9_sxm") -> Point:
    given = row(system=system, silicon_ttft_ms=str(ttft), silicon_tpot_ms=str(tpot))
    return Point(given, 4, 64, 11, 1, ttft, tpot)


def compared(
    ttft: float, tpot: float, ours: tuple[float, float], use: Use = BOTH, system: str = "x9_sxm"
) -> Compared:
    return Compared(point(ttft, tpot, system), use, {"ttft_ms": ours[0], "tpot_ms": ours[1]})


@examples(60)
@given(
    st.lists(
        st.tuples(st.floats(1, 100), st.floats(1, 100)),
        min_size=2,
        max_size=12,
        unique_by=(lambda pair: pair[0], lambda pair: pair[1]),
    )
)
def test_medians_upper_tenths_and_order(pairs: list[tuple[float, float]]) -> None:
    found = summarise([compared(10, tpot, (10, ours)) for tpot, ours in pairs])["all"]["tpot"]
    errors = np.array([ours / tpot - 1 for tpot, ours in pairs])
    assert found["median"] == pytest.approx(float(np.median(np.abs(errors))))
    assert found["bias"] == pytest.approx(float(np.median(errors)))
    assert found["p90"] == pytest.approx(float(np.quantile(np.abs(errors), 0.9)))
    signs = [np.sign((a - c) * (b - d)) for (a, b), (c, d) in combinations(pairs, 2)]
    assert found["tau"] == pytest.approx(float(np.mean(signs)))


def test_what_counts_in_which_figure() -> None:
    """A request of 11 tokens: 20 + 10 x 5 = 70 ms measured, 22 + 10 x 6 = 82 predicted."""
    found = summarise(
        [
            compared(20, 5, (22, 6)),
            compared(20, 5, (99, 6), ONE),
            compared(20, 5, (99, 99), Use(False, False, "twice")),
            Compared(point(20, 5), BOTH, {"refused": "no table"}),
        ]
    )["all"]
    assert [found[name]["n"] for name in ("tpot", "ttft", "e2e")] == [2, 1, 1]
    assert found["ttft"]["median"] == pytest.approx(0.1)
    assert found["e2e"]["median"] == pytest.approx(82 / 70 - 1)


def test_groups_are_by_model_card_and_engine() -> None:
    several = [compared(20, 5, (20, 5)), compared(20, 5, (20, 10), system="y9")]
    found = summarise(several)
    assert list(found) == ["made/up x9_sxm trtllm 1.2.0", "made/up y9 trtllm 1.2.0", "all"]
    assert [each["tpot"]["median"] for each in found.values()] == pytest.approx([0.0, 1.0, 0.5])
    assert show(found).row_count == 3


def test_rows_have_what_was_given_and_why_not(tmp_path: Path) -> None:
    (given,) = read_points(write_points(tmp_path / "points.csv", [row()]))
    refused = Compared(given, BOTH, {"refused": "no table"}).row
    assert (refused["ttft_ms"], refused["usable"], refused["why"]) == ("", "", "no table")
    found = Compared(given, ONE, {"ttft_ms": 1.0, "tpot_ms": 2.0}).row
    assert (found["id"], found["e2e_ms"], found["usable"]) == ("a", 1 + 7 * 2, "tpot")
