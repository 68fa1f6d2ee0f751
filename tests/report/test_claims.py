"""docs/results/*/targets.csv: each row says what it is, and which part of a script makes it."""

import csv
import re
from importlib import import_module
from pathlib import Path

import pytest

from scripts.reproduce import count_claims
from scripts.reproduce.claims import Target, agrees, by_amount, by_share, holds, write_claims

ROWS = count_claims.claims()
PAGES = sorted({row["page"] for row in ROWS})


def test_all_pages_have_rows() -> None:
    assert len(PAGES) == 15
    claims = [(row["page"], row["claim"]) for row in ROWS]
    assert len(claims) == len(set(claims))


@pytest.mark.parametrize("page", PAGES)
def test_each_row_says_what_it_is(page: str) -> None:
    for row in ROWS:
        if row["page"] == page:
            assert row["kind"] in count_claims.KINDS, row
            assert (row["kind"] == "consistency") == (not row["paper"]), row
            assert not (row["reference"] and row["paper"]), row
            assert bool(row["tolerance"]) != bool(row["criterion"]), row
            assert row["met"] in ("yes", "no"), row
            words = " ".join((row["paper"], row["tolerance"], row["criterion"]))
            nothing = ("as stated", "none given", "not in the paper", "our finding", "no paper")
            assert not any(each in words for each in nothing), row


@pytest.mark.parametrize("page", PAGES)
def test_each_row_names_the_part_that_makes_it(page: str) -> None:
    parts = import_module(f"scripts.reproduce.{page}").REPRODUCTION.parts
    commands = [f"scripts.reproduce {page} --part {part}" for part in parts]
    made_by = [row["made_by"] for row in ROWS if row["page"] == page]
    assert set(made_by) <= set(commands)
    assert made_by == sorted(made_by, key=commands.index)


@pytest.mark.parametrize("page", PAGES)
def test_met_is_what_figures_and_tolerance_say(page: str) -> None:
    for row in ROWS:
        if row["page"] != page or not row["tolerance"]:
            continue
        value, ours = float(row["paper"] or row["reference"]), float(row["ours"])
        most, _, unit = row["tolerance"].partition(" ")
        if row["tolerance"] == "sign, and a factor of 2":
            met, off = value / 2 <= ours <= 2 * value, 1.0
        else:
            # A share, or of values that are in percent themselves, points; figures are rounded.
            share = unit == "%" and not row["claim"].endswith("furthest apart (%)")
            limit = float(most) * (abs(value) / 100 if share else 1)
            met, off = abs(ours - value) <= limit, abs(abs(ours - value) - limit)
        assert met == (row["met"] == "yes") or off <= 6e-4 * abs(value), row


def test_pages_count_predicted_claims_alone() -> None:
    for page in PAGES:
        text = (count_claims.RESULTS / f"{page}.md").read_text(encoding="utf-8")
        predicted = [row for row in ROWS if row["page"] == page and row["kind"] == "predicted"]
        met = sum(row["met"] == "yes" for row in predicted)
        for found in re.findall(r"(\d+) of (\d+) predicted claims", text):
            assert found == (str(met), str(len(predicted))), page
        assert not re.search(r"\d+ of \d+ claims", text), page


def test_sums_are_those_of_the_files() -> None:
    text = count_claims.README.read_text(encoding="utf-8")
    assert text.endswith(count_claims.table() + "\n")
    predicted = [row for row in ROWS if row["kind"] == "predicted"]
    met = sum(row["met"] == "yes" for row in predicted)
    assert f"| {met} of {len(predicted)} |" in text.splitlines()[-1]


def test_a_claim_has_a_figure_of_a_paper_or_is_consistency() -> None:
    assert by_share("a", 2.0, 2.1, 0.1).paper == 2.0
    ours = by_amount("a", 2.0, 2.1, 0.2, "s", "consistency")
    assert (ours.paper, ours.reference, ours.met) == ("", 2.0, True)
    assert agrees("a", "so", True, "so").kind == "consistency"
    with pytest.raises(ValueError, match="predicted, and the paper has ''"):
        holds("a", "", "so", True, "so")
    with pytest.raises(ValueError, match="a tolerance or a criterion"):
        holds("a", "so", "so", True, "")
    with pytest.raises(ValueError, match="consistency, and the paper has 'so'"):
        Target("a", "so", "", "so", "", "so", "consistency", True)


def test_claims_that_a_script_makes_no_more_are_dropped(tmp_path: Path) -> None:
    path = tmp_path / "targets.csv"
    mine = [by_share(claim, 1.0, 1.0, 0.1) for claim in ("old", "kept")]
    write_claims(path, "a.py", mine)
    write_claims(path, "b.py", [by_share("other's", 1.0, 2.0, 0.1)])
    write_claims(path, "a.py", [*mine[1:], by_share("new", 1.0, 1.0, 0.1)])
    with path.open(newline="", encoding="utf-8") as file:
        rows = [(row["claim"], row["made_by"], row["met"]) for row in csv.DictReader(file)]
    assert rows == [("other's", "b.py", "no"), ("kept", "a.py", "yes"), ("new", "a.py", "yes")]
