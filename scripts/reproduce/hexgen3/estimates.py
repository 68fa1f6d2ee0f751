"""Claims on HexGen-3's published plans. All figures are simulators' estimates."""

import json
import statistics
from collections.abc import Mapping, Sequence

from scripts.reproduce.claims import Kind, Target, agrees, by_share
from scripts.reproduce.reproduction import Inputs, Part
from scripts.tables import Row

ROWS = "hexgen3_plans.json"
# Columns of our rates: with the three assumptions that we found by comparing, and without any.
SAME, OURS = "ours, all three", "none: ours"
KINDS: Mapping[str, Kind] = {SAME: "calibrated", OURS: "predicted"}
WORDS = {SAME: "by three of their assumptions", OURS: "by our rooflines"}
HEXGEN3, HEXGEN2 = "static HexGen3_Hetero_AFD", "static HexGen2_Hetero_PD"
PAIRS = {
    "on unlike GPUs over HexGen-2": (HEXGEN3, HEXGEN2),
    "on unlike GPUs over H100s alone": (HEXGEN3, "static HexGen3_Homo_AFD"),
    "on H100s over MegaScale-Infer": ("static HexGen3_Homo_AFD", "static MegaScaleInfer_Homo_AFD"),
}
HOURS = range(1, 7)


def plans(inputs: Inputs) -> Part:
    """Published plans by our rooflines, and the best plans by their simulator."""
    rows = json.loads(inputs.path(ROWS).read_text(encoding="utf-8"))
    slowest = max(float(row.pop("found in s")) for row in rows)
    seconds = agrees(
        "seconds to find the best plan, on one core", f"{slowest:g}", slowest < 10, "less than 10"
    )
    return Part(rows, [*claims_of(rows), seconds])


def claims_of(rows: Sequence[Row]) -> list[Target]:
    """Return the claims on the rows of ``scripts.validate.hexgen3``."""
    by_plan = {str(row["plan"]): row for row in rows}
    found = [
        by_share(
            f"estimate of {name}, requests/s, {WORDS[SAME]}",
            row["published"],
            row[SAME],
            0.05,
            KINDS[SAME],
        )
        for name, row in by_plan.items()
    ]
    best = [row["best plan, their code"] >= row["published"] for row in rows]
    found.append(
        agrees(
            "by their simulator, the best plan of three pools serves as much as the published one",
            f"{sum(best)} of {len(best)} plans",
            all(best),
            "all",
        )
    )
    return [*found, *_gains(by_plan)]


def _gains(by_plan: Mapping[str, Row]) -> list[Target]:
    """Compare gains in requests per dollar with those of the published estimates."""

    def per_usd(column: str, name: str) -> float:
        return float(by_plan[name][column] / by_plan[name]["$/hour"])

    def hourly(column: str, name: str) -> float:
        return statistics.mean(per_usd(column, f"hour {hour} {name}") for hour in HOURS)

    def gains(column: str) -> dict[str, float]:
        found = {
            what: per_usd(column, name) / per_usd(column, other)
            for what, (name, other) in PAIRS.items()
        }
        autoscaled = hourly(column, "HexGen3_Autoscale_AFD")
        other = hourly(column, "HeteroScale_Autoscale_PD")
        return found | {"autoscaled over HeteroScale, mean of hours": autoscaled / other}

    theirs, found = gains("published"), []
    for column, words in WORDS.items():
        ours = gains(column)
        for what, ratio in theirs.items():
            claim = f"estimated requests per dollar of HexGen-3 {what}, {words}"
            found.append(by_share(claim, round(ratio, 3), ours[what], 0.05, KINDS[column]))
    return found
