"""The study of routing by caches: its sessions by hand, and its claims from published tables."""

import csv
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import pytest

from jaxinfer.workload.bench_request import BenchRequest
from scripts.reproduce.claims import Target
from scripts.reproduce.prefixes import runs
from scripts.tables import read_csv

PUBLISHED = Path(__file__).parents[2] / "docs" / "results" / "prefixes"


def item(arrival: float, *names: int) -> BenchRequest:
    """A prompt whose last block has one token."""
    return BenchRequest(None, 512 * (len(names) - 1) + 1, 1, arrival, hash_ids=names)


def test_a_turn_begins_with_the_whole_blocks_of_one_before() -> None:
    work = [
        item(0.0, 0, 1, 2, 90),
        item(0.0, 0, 3, 91),
        item(1.0, 0, 1, 2, 4, 92),  # Of the first.
        item(2.0, 0, 1, 2, 4, 5, 93),  # Of the third, and so of the first.
        item(2.0, 0, 1, 94),  # Begins as the first, without all of it.
        item(3.0, 0, 3, 6, 95),  # Of the second.
        item(3.0, 0, 96),
        item(4.0, 0, 7, 97),  # Shares only the first block, as all do.
    ]
    found = [each.session for each in runs.with_sessions(work)]
    assert found == [0, 1, 0, 0, 4, 1, 6, 7]


def test_arrivals_keep_their_bursts() -> None:
    work = [item(at, 0, 1) for at in (0.0, 0.0, 3.0, 12.0)]
    assert [each.arrival for each in runs.at_rate(work, 2.0)] == [0.0, 0.0, 0.5, 2.0]


def test_capacities_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "_alone", lambda work, kind: {"h": 2.0, "a": 0.5}[kind])

    class Here:
        map = staticmethod(map)

    found = runs.capacities([item(0.0, 0)], Here())  # type: ignore[arg-type]
    assert found == {"8 H100": 16.0, "4 H100 + 8 A10": 10.0}


def published(part: str, claims: Sequence[Target]) -> None:
    """Check the claims that the published table of a part gives."""
    with (PUBLISHED / "targets.csv").open(newline="", encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["made_by"].endswith(f" {part}")]
    assert claims
    assert [{**row, "made_by": "", "met": row["met"]} for row in rows] == [
        {**asdict(claim), "met": "yes" if claim.met else "no", "made_by": ""} for claim in claims
    ]


def test_claims_of_published_tables() -> None:
    published("loads", runs.claims_of_loads(read_csv(PUBLISHED / "loads.csv")))
    published("alone", runs.claims_of_alone(read_csv(PUBLISHED / "alone.csv")))
