"""Splitwise's claims, decided from tables."""

from collections.abc import Mapping, Sequence
from typing import Any

from scripts.reproduce.claims import Target, by_amount, by_share, holds
from scripts.reproduce.splitwise.capacities import (
    KINDS,
    Rows,
    design,
)


def batch_targets(rows: Rows) -> list[Target]:
    """Return the targets of section VI-E."""
    paper = {"A100": 0.89, "AA": 0.89, "H100": 0.75, "HH": 0.75}
    return [
        by_share(
            f"batch jobs, {row['cluster']}: RPS/$", paper[row["cluster"]], row["rps_by_usd"], 0.03
        )
        for row in rows
    ]


def other_targets(rows: Rows, at_home: Mapping[str, int]) -> list[Target]:
    """Return the targets of these rows."""
    found = {(row["case"], row["cluster"]): row["rps"] for row in rows}
    targets = []
    for name, theirs in (("AA", 0), ("HH", 0), ("HA", -7), ("HHcap", -7)):
        change = found["conv on the code cluster", name] / at_home[name] - 1
        targets.append(
            by_amount(f"conv on the code cluster, {name}: %", theirs, 100 * change, 4, "points")
        )
    slow = found["code, links of 20 GiB/s", "AA"]
    conv = found["conv, links of 20 GiB/s", "AA"]
    targets.append(
        holds(
            "a tenth of the bandwidth is still beneficial",
            "a guess there",
            f"conv AA {conv}, code AA {slow} RPS",
            slow > 0 and conv > 0,
            "carries something, in both",
        )
    )
    return targets


def llama_target(rows: Rows) -> Target:
    """Return the target of these rows."""
    found = {row["cluster"]: row["rps"] for row in rows}
    above = min(found[name] for name in KINDS) > max(found["A100"], found["H100"])
    said = ", ".join(f"{name} {rate}" for name, rate in found.items())
    return holds(
        "Llama 2 70B on BLOOM's clusters",
        "all Splitwise above both baselines",
        said,
        above,
        "so",
    )


def by_cluster(
    rows: Sequence[Mapping[str, Any]], decodes: str
) -> dict[tuple[str, str], dict[str, int]]:
    """Return requests/s of each cluster, by trace and by the quantity that is equal."""
    found: dict[tuple[str, str], dict[str, int]] = {}
    for row in rows:
        if row["decodes"] == decodes:
            found.setdefault((row["trace"], row["equal"]), {})[row["cluster"]] = row["rps"]
    return found


def ratios(rows: Sequence[Mapping[str, Any]], long: Mapping[str, int]) -> list[Target]:
    """Return targets of section VI's ratios, by the public reading of decode times."""
    found = by_cluster(rows, "public")
    # The text does not say which trace the 1.4 belongs to; the plot next to it shows conversations.
    conv = found["conv", "cost"]["AA"] / found["conv", "cost"]["H100"]
    ha, h100 = design("HA", "conv", "power"), design("H100", "conv", "power")
    cost, power = ha.usd_per_hour / h100.usd_per_hour - 1, ha.power / h100.power - 1
    return [
        by_share("AA / A100, conv, iso-power", 2.15, long["AA"] / long["A100"], 0.1),
        by_share("HA / H100, conv, iso-power", 1.18, long["HA"] / long["H100"], 0.1),
        by_amount("HA's cost beside H100's, %, by Table I", -10, 100 * cost, 3, "points", "input"),
        by_amount("HA's power beside H100's, %", 0, 100 * power, 1, "points", "input"),
        by_share("AA / H100, conv, iso-cost", 1.4, conv, 0.1),
    ]
