"""What a matrix of ledgers has exercised, by kinds of decisions."""

from pathlib import Path
from typing import Any

from scripts.validate.decisions import KINDS, kinds_of, never, runs_with, summary

RESULTS = Path(__file__).parents[2] / "docs" / "results"


def test_kinds_by_hand() -> None:
    """A prompt in two chunks, preempted and admitted again; another that is moved while it runs."""
    entries: list[tuple[str, list[Any], Any]] = [
        ("start", [], None),
        ("legs", ["a", [["p", None, "on_demand"]]], None),
        ("batch", ["p", 1, 0, 0, [["a", 0, 8, False], ["b", 0, 4, True]], [[1], [2]]], None),
        ("batch", ["p", 2, 0, 0, [["a", 8, 8, True], ["b", 4, 1, True]], [[1], [2]], [["b"]], []],
         None),
        ("batch", ["p", 2, 3, 40], None),
        ("victim", ["p", "a"], None),
        ("legs", ["b", [["q", None, "on_demand"]]], None),
        ("send", ["b", "p", "q", 0, 4, [1], [1]], None),
        ("role", ["q", "decode"], None),
        ("lost", ["q", True], "gone"),
        ("back", ["q"], None),
        ("without", ["p", [1], False], None),
        ("end", ["a", "stop", 3], None),
        ("end", ["b", "length", 3], None),
    ]  # fmt: skip
    found = kinds_of(entries)
    assert found == {
        "admissions": 2, "chunks": 1, "hand_offs": 2, "preemptions": 1, "reassignments": 1,
        "role_changes": 1, "halves": 0, "stops": 1, "losses": 1, "returns": 1, "without_shards": 1,
    }  # fmt: skip
    halves = ("batch", ["p", 2, 0, 0, [["a", 0, 8, True]], [[1]], [], [0]], None)
    assert kinds_of([halves])["halves"] == 1


def test_a_matrix_says_what_it_never_did() -> None:
    rows = [{"kinds": "admissions:3 chunks:1"}, {"kinds": ""}, {"kinds": "stops:2"}]
    lacking = [name for name in KINDS if name not in ("admissions", "chunks", "stops")]
    assert never(rows) == lacking
    assert never([{"kinds": " ".join(f"{name}:1" for name in KINDS)}]) == []


def test_the_published_table_has_the_runs_of_each_kind() -> None:
    found = runs_with(RESULTS / "proof" / "decisions.csv")
    page = (RESULTS / "proof.md").read_text(encoding="utf-8")
    for kind, words in KINDS.items():
        assert f"\n| {words} | {found[kind]} |\n" in page
    assert " ".join(summary(RESULTS / "proof" / "decisions.csv").split()) in " ".join(page.split())
