"""The benchmark of all systems on one card: answers that part, predictions that are published."""

from pathlib import Path

import pytest

from jaxinfer import JaxinferError
from scripts.bench import one_card
from scripts.bench.same_answers import ComparedAnswers, Comparison, compare
from scripts.tables import read_csv

ROOT = Path(__file__).parents[2]


def test_where_answers_part(tmp_path: Path) -> None:
    """Equal; parted at a tie of 0.1; by a token that was 0.5 less likely, or none of the top."""
    path = tmp_path / "answers.json"
    likely = {7: -1.0, 8: -1.1, 9: -1.5}
    names = ("equal", "tied", "unlikely", "unknown")
    first = ComparedAnswers(
        {name: [5, 7] for name in names}, {n: [{5: -0.1}, likely] for n in names}
    )
    first.write(path)
    second = ComparedAnswers(
        {"equal": [5, 7], "tied": [5, 8], "unlikely": [5, 9], "unknown": [5, 6]}
    )
    found = compare(ComparedAnswers.read(path), second, bound=0.125)
    assert found == Comparison(1, 1, ["unknown", "unlikely"], 2 + 3 * 1, pytest.approx(0.1))
    assert compare(first, second, bound=0.5).apart == ["unknown"]
    assert compare(first, second, bound=0.05).apart == ["tied", "unknown", "unlikely"]


def test_answers_that_are_not_there_or_too_short() -> None:
    first = ComparedAnswers({"a": [1, 2], "b": [1]}, {"a": [{1: -0.1}, {2: -0.1}]})
    found = compare(first, ComparedAnswers({"a": [1], "c": [1]}), bound=1.0)
    assert (found.equal, found.tied, found.apart) == (0, 0, ["a", "b", "c"])


@pytest.mark.parametrize("card", one_card.CARDS)
def test_the_published_predictions_are_those_of_the_run_files(
    card: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    rows = read_csv(ROOT / "docs/results/gpu/one_card_predicted.csv")
    told = {row["system"]: row for row in rows if row["card"] == card}
    assert told.keys() == {*one_card.SYSTEMS, *one_card.PROCESSES} - {"hetis"}
    for system in ("single", "takeover"):
        assert one_card.predict(system, card) == told[system]
    assert one_card.predict("hetis", card) is None


def test_what_is_wrong() -> None:
    fine = {"result": "ok", "apart": 0, "ledger": "the same in both worlds"}
    for changes in ({}, {"result": "not run: no time left"}, {"tied": 3}):
        assert not one_card.is_wrong(fine | changes)
    for changes in ({"result": "failed: X"}, {"apart": 1}, {"ledger": "step 3"}):
        assert one_card.is_wrong(fine | changes)


def test_a_run_without_answers_to_compare_with_is_wrong(tmp_path: Path) -> None:
    suite = one_card.Suite(tmp_path, "H200", is_rehearsal=True)
    kind, row = one_card.Pass("exact", "m", (), "float32", False), {"system": "x", "result": "ok"}
    ComparedAnswers({"0": [1]}, {}).write(tmp_path / "exact_x.json")
    assert one_card.is_wrong(suite.against(kind, row))
    ComparedAnswers({"0": [1]}, {}).write(tmp_path / "exact_single.json")
    assert suite.against(kind, row)["equal"] == 1
    assert suite.shown_card == "H200, played by a CPU"
    late = row | {"result": "not run: no time left"}
    assert suite.against(kind, late) == late


def test_passes_that_are_not_there_are_refused(tmp_path: Path) -> None:
    asked = ["--out", str(tmp_path), "--rehearse", "--passes", "exact,big"]
    wrong = r"^--passes has big, must be exact or large, or both$"
    with pytest.raises(JaxinferError, match=wrong):
        one_card.main(asked, standalone_mode=False)
