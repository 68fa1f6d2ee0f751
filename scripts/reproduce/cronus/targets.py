"""Cronus' claims, compared with our results."""

from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

from scripts.reproduce.claims import Kind, Target, by_amount, by_share, holds
from scripts.tables import Row

# The high GPU's capacities were found from these columns of Table 3.
CALIBRATED_ON = ("H-L prefill", "L-H decode")


class UpTo(NamedTuple):
    """The paper's "up to ``percent`` lower" of a latency, on some hardware or (empty) on all."""

    figure: str
    other: str
    hardware: str
    percent: int


UP_TO = (
    UpTo("ttft_p99", "DP+Chunked", "A100+A10", 55),
    UpTo("ttft_p99", "DP+Chunked", "A100+A30", 26),
    UpTo("ttft_p99", "PP+Chunked", "", 58),
    UpTo("ttft_p99", "Disagg. L-H", "", 84),
    UpTo("tbt_p99", "DP+Chunked", "", 63),
    UpTo("tbt_p99", "PP+Chunked", "", 70),
    UpTo("tbt_p99", "Disagg. H-L", "", 51),
)
LATENCIES = ("ttft_p99", "tbt_p99")


def ratios(points: Sequence[Row], cells: Sequence[Row]) -> list[Row]:
    """Return by how many percent Cronus is below the others at most, over setups and intervals.

    An interval counts only if the other system sustains it with a tenth to spare. Beyond that, its
    queue grows with the length of the run, and so does the ratio.
    """
    rates = {(cell["setup"], cell["approach"]): cell["ours"] for cell in cells}
    cronus = {(p["setup"], p["interval_s"]): p for p in points if p["approach"] == "Cronus"}
    rows = []
    for what, other, hardware, theirs in UP_TO:
        below = {
            (p["setup"], p["interval_s"]): 1 - cronus[p["setup"], p["interval_s"]][what] / p[what]
            for p in points
            if p["approach"] == other
            and p["setup"].startswith(hardware)
            and p["interval_s"] * rates[p["setup"], other] > 1.1
        }
        (setup, interval), most = max(below.items(), key=lambda item: item[1])
        at, below_what = f"{setup}, every {interval:g} s", f"{other} {hardware}".strip()
        ours = round(100 * most, 1)
        rows.append({"figure": what, "below": below_what, "paper": theirs, "ours": ours, "at": at})
    return rows


def of_table_2(cells: Sequence[Row]) -> list[Target]:
    """Return the targets of each cell, and of the order of each column."""
    found = []
    for cell in cells:
        kind: Kind = "calibrated" if cell["calibrated_on"] else "predicted"
        claim = f"Table 2, {cell['setup']}, {cell['approach']} (requests/s)"
        share = 0.01 if cell["calibrated_on"] else 0.1
        found.append(by_share(claim, cell["paper"], cell["ours"], share, kind))
    for setup, here in groupby(cells, lambda cell: cell["setup"]):
        rows = list(here)
        theirs, ours = (_order(rows, what) for what in ("paper", "ours"))
        claim = f"Table 2, {setup}: order"
        found.append(holds(claim, theirs, ours, theirs == ours, "the same order"))
    return found


def of_table_3(shares: Sequence[Row]) -> list[Target]:
    """Return the targets of each share of a stage's capacity."""
    found = []
    for row in shares:
        claim = f"Table 3, {row['setup']}, {row['stage']} (%)"
        if row["stage"] in CALIBRATED_ON:
            found.append(by_amount(claim, row["paper"], row["ours"], 5, "points", "calibrated"))
        else:  # The whole capacity of the stage that is the limit is used, for any model.
            found.append(by_amount(claim, 100, row["ours"], 5, "points", "consistency"))
    return found


def of_figure_4(below: Sequence[Row]) -> list[Target]:
    """Return targets of how far Cronus is below the others at most; see ``ratios``."""
    found = []
    for row in below:
        figure, paper, ours = row["figure"].replace("_", " "), row["paper"], row["ours"]
        claim = f"Figure 4, {figure}: most that it is below {row['below']}"
        met, criterion = ours >= paper, f"{paper} % or more"
        found.append(holds(claim, f"up to {paper} %", f"{ours} %", met, criterion))
    return found


def _order(rows: Sequence[Row], what: str) -> str:
    return " > ".join(row["approach"] for row in sorted(rows, key=lambda row: -row[what]))
