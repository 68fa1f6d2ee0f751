"""A paper's claims beside ours, and the file that lists them."""

import csv
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, get_args

from scripts.tables import Row, show_table, write_csv

# What was fitted to the paper, what follows without, what was taken from it; and what is compared
# with our own closed forms, other simulators or nothing, since no paper has a figure of it.
Kind = Literal["calibrated", "predicted", "input", "consistency"]


@dataclass(frozen=True)
class Target:
    """A claim beside what came out here.

    Attributes:
        paper: its own figure or words; empty where it has none, which is a claim of consistency.
        reference: what ours is compared with there: a closed form, another simulator, one.
        tolerance: how far off a figure may be, in words; ``criterion``: the test of any other
            claim. One of them is empty.
        met: whether ours is within the tolerance, or passes the test.
    """

    claim: str
    paper: float | str
    reference: float | str
    ours: float | str
    tolerance: str
    criterion: str
    kind: Kind
    met: bool

    def __post_init__(self) -> None:
        if (self.kind == "consistency") != (self.paper == ""):
            raise ValueError(f"{self.claim}: {self.kind}, and the paper has {self.paper!r}")
        if bool(self.tolerance) == bool(self.criterion):
            raise ValueError(f"{self.claim}: must have a tolerance or a criterion")


def by_share(
    claim: str, value: float, ours: float, share: float, kind: Kind = "predicted"
) -> Target:
    """A figure that may be off by a share of the paper's, or, for consistency, of a reference."""
    met = abs(ours - value) <= share * abs(value)
    tolerance = f"{100 * share:g} %"
    return Target(claim, *_sides(value, kind), _rounded(ours), tolerance, "", kind, met)


def by_amount(
    claim: str, value: float, ours: float, most: float, unit: str = "", kind: Kind = "predicted"
) -> Target:
    """A figure that may be off by so much, in units of its own."""
    tolerance, met = f"{most:g} {unit}".rstrip(), abs(ours - value) <= most
    return Target(claim, *_sides(value, kind), _rounded(ours), tolerance, "", kind, met)


def holds(
    claim: str, paper: str, ours: str, met: bool, criterion: str, kind: Kind = "predicted"
) -> Target:
    """A claim of the paper in words (an order, a direction, a bound), and the test it has here."""
    return Target(claim, paper, "", ours, "", criterion, kind, met)


def agrees(claim: str, ours: str, met: bool, criterion: str) -> Target:
    """A claim of our own, which is in no paper, and the test it has here."""
    return Target(claim, "", "", ours, "", criterion, "consistency", met)


def _sides(value: float, kind: Kind) -> tuple[float | str, float | str]:
    """The paper's figure and the reference, of which one is empty."""
    return ("", _rounded(value)) if kind == "consistency" else (value, "")


def show_claims(rows: Sequence[Row]) -> None:
    """Print rows of a ``targets.csv`` as a markdown table, and how many of each kind are met."""
    marks = {"yes": "met", "no": "**missed**"}
    show_table([row | {"met": marks[row["met"]]} for row in rows])
    print()
    for kind in get_args(Kind):
        here = [row["met"] == "yes" for row in rows if row["kind"] == kind]
        if here:
            print(f"{kind}: {sum(here)} of {len(here)} met")


def read_claims(path: Path) -> list[Row]:
    """Rows of a ``targets.csv``, as they are written; none where there is no such file."""
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def write_claims(
    path: Path, made_by: str, claims: Sequence[Target], order: Sequence[str] = ()
) -> None:
    """Write a row for each claim, and in its last column the command that has made it.

    Claims that the command made before are dropped; other commands' are left.

    Args:
        order: of commands, by which rows are sorted; those of others come first.
    """
    rows = [row for row in read_claims(path) if row["made_by"] != made_by]
    for claim in claims:
        rows.append(asdict(claim) | {"met": "yes" if claim.met else "no", "made_by": made_by})
    rows.sort(key=lambda row: order.index(row["made_by"]) if row["made_by"] in order else -1)
    if rows:
        write_csv(path, rows)
    elif path.exists():
        path.unlink()


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")
