"""Rows of measured points: how they are read, and the rules of their use."""

import csv
from pathlib import Path
from typing import Any

import pytest
from validate_cases import row, write_points

from jaxinfer import JaxinferError
from jaxinfer.lab.validate.points import Point, read_points, uses


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
        ("x_c4_tp8_0_ep2_0_210", 8),
        ("x_tp2_epnone_8", 16),
        ("other", 16),
    ],
)
def test_the_id_has_the_degree_where_it_was_multiplied(tmp_path: Path, id: str, tp: int) -> None:
    (point,) = points(tmp_path, row(id=id, tp_size="16.0"))
    assert point.tp == tp


INTEGER = "must be an integer from"


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"isl": "many"}, f"isl is 'many', {INTEGER} 1 to 10000000"),
        ({"isl": "256.7"}, f"isl is '256.7', {INTEGER} 1 to 10000000"),
        ({"osl": "0"}, f"osl is '0', {INTEGER} 1 to 10000000"),
        ({"osl": "1e300"}, f"osl is '1e300', {INTEGER} 1 to 10000000"),
        ({"batch_size": "1e12"}, f"batch_size is '1e12', {INTEGER} 1 to 100000"),
        ({"batch_size": ""}, f"batch_size is '', {INTEGER} 1 to 100000"),
        ({"note": "concurrency=4.5"}, f"concurrency of note is '4.5', {INTEGER} 1 to 100000"),
        ({"tp_size": ""}, f"tp_size is '', {INTEGER} 1 to 1024"),
        ({"tp_size": "2", "id": "x_tp4_ep1_0"}, "tp_size is 2, the id has tp4"),
        ({"id": "x_tp0_ep1_0"}, "tp_size is 1.0, the id has tp0"),
        ({"pp_size": "two"}, f"pp_size is 'two', {INTEGER} 1 to 1024"),
        ({"moe_ep_size": "abc"}, f"moe_ep_size is 'abc', {INTEGER} 0 to 1024"),
        (
            {"moe_ep_size": "1000", "moe_tp_size": "1000"},
            "moe_tp_size x moe_ep_size is 1000000, must be at most 1024",
        ),
        ({"silicon_tpot_ms": "-1"}, "silicon_tpot_ms is '-1', must be a number from 0 on"),
        ({"silicon_ttft_ms": "nan"}, "silicon_ttft_ms is 'nan', must be a number from 0 on"),
    ],
)
def test_a_row_with_a_wrong_number_is_left_out_by_name(
    tmp_path: Path, changes: dict[str, str], why: str
) -> None:
    """The row before it and the row after it stand."""
    given = points(tmp_path, row(id="p"), row(**changes), row(id="q", osl="9"))
    found = uses(given)
    assert [use.why for use in found] == ["", why, ""]
    assert [use.tpot for use in found] == [True, False, True]
    assert [point.line for point in given] == [2, 3, 4]


def test_rows_of_other_widths_and_blank_lines(tmp_path: Path) -> None:
    path = write_points(tmp_path / "points.csv", [row(), row(osl="9"), row(osl="10")])
    header, one, two, three = path.read_text().splitlines()
    text = "\n".join([header, one, "", f"{two},more", three.rpartition(",")[0]])
    path.write_text(f"\ufeff{text}", encoding="utf-8")
    found = read_points(path)
    assert [(point.line, point.wrong) for point in found] == [
        (2, ""),
        (4, "has 20 cells, the header 19"),
        (5, "has 18 cells, the header 19"),
    ]
    assert found[0].id == "a"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: text.replace(",", ";"), "its columns are apart by semicolons, must be by"),
        (lambda text: text.replace(",", "\t"), "its columns are apart by tabs, must be by commas"),
        (lambda text: text.replace("osl", "isl", 1), "has the column 'isl' twice"),
        (lambda text: text.replace("pp_size", "stages"), "lacks the column pp_size"),
    ],
)
def test_files_of_another_form(tmp_path: Path, change: Any, message: str) -> None:
    path = write_points(tmp_path / "points.csv", [row()])
    path.write_text(change(path.read_text()))
    with pytest.raises(JaxinferError, match=message):
        read_points(path)


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
