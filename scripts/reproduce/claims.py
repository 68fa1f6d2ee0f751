"""A paper's claims compared with our results, and the file that lists them."""

import csv
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, get_args

from scripts.tables import Row, show_table, write_csv

# Fitted to the paper; following without a fit; taken from the paper; and compared with our own
# closed forms or other simulators, because no paper has such a figure.
Kind = Literal["calibrated", "predicted", "input", "consistency"]


@dataclass(frozen=True)
class Target:
    """A claim, compared with our result.

    Attributes:
        claim: what is compared.
        paper: the paper's figure or words; empty if it has none (a claim of consistency).
        reference: if the paper has none, what ours is compared with: a closed form, another
            simulator, or one.
        ours: our figure or words.
        tolerance: how far off a figure may be, in words; empty if there is a criterion.
        criterion: the test of any other claim; empty if there is a tolerance.
        kind: how the claim came about.
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
    """Return the target of a figure that may differ by a share of the paper's or a reference."""
    met = abs(ours - value) <= share * abs(value)
    tolerance = f"{100 * share:g} %"
    return Target(claim, *_sides(value, kind), _rounded(ours), tolerance, "", kind, met)


def by_amount(
    claim: str, value: float, ours: float, most: float, unit: str = "", kind: Kind = "predicted"
) -> Target:
    """Return the target of a figure that may differ by at most ``most``, in its own unit."""
    tolerance, met = f"{most:g} {unit}".rstrip(), abs(ours - value) <= most
    return Target(claim, *_sides(value, kind), _rounded(ours), tolerance, "", kind, met)


def holds(
    claim: str, paper: str, ours: str, met: bool, criterion: str, kind: Kind = "predicted"
) -> Target:
    """Return the target of a claim in words (an order, a direction, a bound), with our test."""
    return Target(claim, paper, "", ours, "", criterion, kind, met)


def agrees(claim: str, ours: str, met: bool, criterion: str) -> Target:
    """Return the target of a claim that is in no paper, with our test."""
    return Target(claim, "", "", ours, "", criterion, "consistency", met)


def _sides(value: float, kind: Kind) -> tuple[float | str, float | str]:
    """Return the paper's figure and the reference; one of them is empty."""
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
    """Return rows of a ``targets.csv`` as they are written; none if the file does not exist."""
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def write_claims(
    path: Path, made_by: str, claims: Sequence[Target], order: Sequence[str] = ()
) -> None:
    """Write a row for each claim, with the command that has made it in the last column.

    Claims that the same command has made before are replaced; those of other commands stay.

    Args:
        order: commands in the order by which rows are sorted; rows of other commands come first.
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
