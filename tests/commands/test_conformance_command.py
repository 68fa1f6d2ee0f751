"""``jaxinfer check hand-offs``: its tables and files, by outcomes that are known."""

import csv
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from jaxinfer.commands.app import cli
from jaxinfer.lab.hand_offs import measured as conformance
from jaxinfer.lab.hand_offs.measured import HandOffCheck
from jaxinfer.lab.hand_offs.sides import HandOffSide
from jaxinfer.lab.hand_offs.table import as_markdown, conformance_tables

SIDES = {
    "A": HandOffSide(),
    "B": HandOffSide("bfloat16", "int8", 24, "interpret", 2, 2),
    "C": HandOffSide("int8"),
}
OUTCOMES = [
    HandOffCheck("A", "A", "exact", "", 0.0, 0.0, 0.0, 8, 0.0, 4000, 0.001),
    HandOffCheck("A", "B", "rounds", "", 0.004, 0.001, 0.005, 3, 0.1, 2000, 0.003),
    HandOffCheck("A", "C", "refused", "not int8"),
    HandOffCheck("B", "A", "wrong", "", 0.02, 0.003, 0.005, 1, 0.0, 2000, 0.002),
    HandOffCheck("B", "B", "exact", "", 0.0, 0.0, 0.005, 8, 0.0, 2000, 0.005),
    HandOffCheck("B", "C", "refused", "not int8"),
]


def test_tables() -> None:
    sides, matrix, formats, refused = conformance_tables(SIDES, OUTCOMES, 8).values()
    assert sides[1][1] == ["B", "bfloat16", "int8", "24", "token", "2", "2"]
    assert matrix[1][:2] == [["A", "=", "0.4 %", "-"], ["B", "WRONG 2 %", "=", "-"]]
    assert formats[1] == [
        ["float32", "float32", "1", "1", "0 %", "0 %", "0 %", "8", "4,000", "1.0"],
        ["float32", "int8 of bfloat16", "1", "0", "0.4 %", "0.5 %", "0.1 %", "3", "2,000", "3.0"],
        ["int8 of bfloat16", "float32", "1", "0", "2 %", "0.5 %", "0.3 %", "1", "2,000", "2.0"],
        ["int8 of bfloat16"] * 2 + ["1", "1", "0 %", "0.5 %", "0 %", "8", "2,000", "5.0"],
    ]
    assert refused[1] == [["A B", "C", "not int8"]]
    some = [replace(OUTCOMES[0], reason="left out"), *OUTCOMES[1:]]
    *_, (_, reasons) = conformance_tables(SIDES, some, 8).values()
    assert reasons == [["A", "A", "left out"], ["A B", "C", "not int8"]]
    assert as_markdown("T", (["a", "b"], [["1", "2"]])).splitlines() == [
        "### T",
        "",
        "| a | b |",
        "| --- | --- |",
        "| 1 | 2 |",
    ]


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> list[HandOffCheck]:
    """The outcomes that all pairs come to, without loading either side."""
    outcomes: list[HandOffCheck] = []

    class Known:
        def __init__(self, checkpoint: Any, sides: Any, prompt: Any, outputs: int, *_: Any) -> None:
            assert (checkpoint.name, len(prompt), outputs) == ("small", 20, 2)
            assert list(sides.values()) == [HandOffSide(page_size=8)]

        def outcomes(self) -> Iterator[HandOffCheck]:
            return iter(outcomes)

    monkeypatch.setattr(conformance, "Conformance", Known)
    return outcomes


ONE = ["page_size=8", "dtype=float32", "kv_cache_dtype=auto", "kernels=plain", "stages=1"]


def run(*more: str) -> Any:
    values = [word for text in [*ONE, "tensor_parallel_size=1"] for word in ("--values", text)]
    return CliRunner().invoke(
        cli, ["check", "hand-offs", *values, "--tokens", "20", "--outputs", "2", *more]
    )


def test_files(known: list[HandOffCheck], tmp_path: Path) -> None:
    known.append(OUTCOMES[0])
    ran = run("--out", str(tmp_path / "new"))
    assert ran.exit_code == 0, ran.output
    (row,) = csv.DictReader((tmp_path / "new" / "conformance.csv").open())
    assert (row["verdict"], row["num_bytes"], row["source_page_size"]) == ("exact", "4000", "8")
    assert "| A | = |" in (tmp_path / "new" / "conformance.md").read_text()
    (pair,) = json.loads(run("--json").stdout)["pairs"]
    assert {name: str(value) for name, value in pair.items() if name in row} == {
        name: row[name] or "None" if name != "reason" and name != "fault" else row[name]
        for name in pair
    }
    again = run("--out", str(tmp_path / "new"))
    assert "has files in it" in str(again.exception)


def test_what_is_wrong_is_an_error(known: list[HandOffCheck]) -> None:
    known.append(HandOffCheck("A", "A", "wrong", "", 0.02, 0.003, 0.005, 1, 0.0, 2000, 0.002))
    ran = run()
    assert ran.exit_code == 1
    assert "jaxinfer: KV arrives changed by more than its formats round: A to A\n" in ran.stderr
    assert "WRONG 2 %" in ran.output
