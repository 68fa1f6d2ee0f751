"""Rows of measured points: how they are read, and the rules of their use."""

import csv
from pathlib import Path
from typing import Any

import pytest
from validate_cases import row, write_points

from jaxinfer import JaxinferError
from jaxinfer.validate.points import Point, read_points, uses


def points(tmp_path: Path, *rows: dict[str, Any]) -> list[Point]:
    return read_points(write_points(tmp_path / "points.csv", rows))


def test_a_note_has_the_concurrency(tmp_path: Path) -> None:
    first, second = points(
        tmp_path, row(batch_size="16.0"), row(batch_size="16.0", note="silicon_concurrency=20")
    )
    assert (first.concurrency, second.concurrency) == (16, 20)


def test_without_a_concurrency_where_others_say_one_it_does_not_count(tmp_path: Path) -> None:
    silent, said = row(id="a"), row(id="b", osl="9", note="silicon_concurrency=4")
    found = uses(points(tmp_path, silent, said))
    assert [(use.tpot, use.why) for use in found] == [
        (False, "does not say its concurrency, as others do"),
        (True, ""),
    ]
    assert [use.tpot for use in uses(points(tmp_path, silent))] == [True]


@pytest.mark.parametrize(
    ("id", "tp"),
    [
        ("2026_x_1024x1024_c16_tp4_ep4_995", 4),
        ("x_c4_tp8_0_ep1_0_210", 8),
        ("x_tp2_epnone_8", 16),
        ("other", 16),
    ],
)
def test_the_id_has_the_degree_where_it_was_multiplied(tmp_path: Path, id: str, tp: int) -> None:
    (point,) = points(tmp_path, row(id=id, tp_size="16.0"))
    assert point.tp == tp


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"isl": "many"}, r"line 2: isl is 'many', must be a number from 1 on$"),
        ({"osl": "0"}, r"line 2: osl is '0', must be a number from 1 on$"),
        ({"silicon_tpot_ms": "-1"}, r"silicon_tpot_ms is '-1', must be a number from 0 on$"),
        ({"silicon_ttft_ms": "nan"}, r"silicon_ttft_ms is 'nan', must be"),
    ],
)
def test_numbers_that_are_none(tmp_path: Path, changes: dict[str, str], message: str) -> None:
    with pytest.raises(JaxinferError, match=message):
        points(tmp_path, row(**changes))


def test_files_that_have_no_points(tmp_path: Path) -> None:
    with pytest.raises(JaxinferError, match=r"none\.csv: No such file"):
        read_points(tmp_path / "none.csv")
    path = tmp_path / "points.csv"
    path.write_text("id,isl\n")
    with pytest.raises(JaxinferError, match=r"points\.csv: has no points$"):
        read_points(path)
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([["id", "isl"], ["a", "1"]])
    with pytest.raises(JaxinferError, match=r"points\.csv: lacks the column backend$"):
        read_points(path)


def test_of_equal_points_one_counts(tmp_path: Path) -> None:
    """Another concurrency, or another time, is another point."""
    others = [row(id="b"), row(id="c", batch_size="9"), row(id="d", silicon_tpot_ms="9")]
    found = uses(points(tmp_path, row(id="a"), *others))
    assert [use.tpot for use in found] == [True, False, True, True]
    assert found[1].why == "the same as a point before"


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"mode": "disagg"}, "mode disagg: its launch is not known"),
        ({"silicon_ttft_ms": "0"}, "has no TTFT or no TPOT"),
        ({"osl": "1"}, "has no TTFT or no TPOT"),
    ],
)
def test_points_that_count_nowhere(tmp_path: Path, changes: dict[str, str], why: str) -> None:
    (use,) = uses(points(tmp_path, row(**changes)))
    assert (use.tpot, use.ttft, use.why) == (False, False, why)


@pytest.mark.parametrize(
    ("pairs", "falling", "usable"), [(10, 2, True), (10, 3, False), (9, 9, True)]
)
def test_a_group_whose_ttft_falls_too_often_gives_none(
    tmp_path: Path, pairs: int, falling: int, usable: bool
) -> None:
    """More than a fifth of ten pairs or more; a fall is of more than 5 %, in one series."""
    rows = [
        row(id=f"{n} {c}", isl=str(100 + n), batch_size=str(c), silicon_ttft_ms=str(ttft))
        for n in range(pairs)
        for c, ttft in ((8, 100.0), (16, 94.0 if n < falling else 95.5))
    ]
    other = row(id="other", system="h200_sxm")
    found = uses(points(tmp_path, *rows, other))
    assert {use.ttft for use in found[:-1]} == {usable}
    assert all(use.tpot for use in found)
    assert found[-1].ttft
