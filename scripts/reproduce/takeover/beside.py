"""The gain of takeover's parts, and Cronus' Table 2 with takeover."""

from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from statistics import mean

from jaxinfer.options.validation import read_yaml
from scripts.reproduce.claims import Target, agrees
from scripts.reproduce.cronus.cases import APPROACHES, SETUPS, CronusCase, numbers
from scripts.reproduce.reproduction import Work
from scripts.reproduce.takeover.cases import OURS, Cell, TakeoverRun, beside_bound, shares
from scripts.tables import CONFIGS, Row

TRACE, REQUESTS = "azure_conversation.csv", 1000
# Takeover's run file, from Cronus' folder; and the systems that Table 2 compares with the bound.
PAIR, STEADY = "../takeover/pair", ("Cronus", OURS)
PARTS: dict[str, tuple[str, ...]] = {
    "all of it": (),
    "no decode taken": ("system.most_moves=0",),
    "no room kept": ("system.keeps_room=false",),
    "one take per request": ("system.most_moves=1",),
    "no wide step": (
        "system.narrow=1",
        "instances.high.max_num_batched_tokens=512",
        "instances.low.max_num_batched_tokens=256",
    ),
    "wide steps alone": ("system.narrow=1",),
}
PART_CELLS = ((256, 128), (256, 512), (1024, 128), (1024, 2048), (16384, 512), (16384, 2048))


def parts(pool: ProcessPoolExecutor) -> list[Row]:
    """Return a row for each part that is left out, on A100+A10, with one seed."""
    wanted = [Cell("A100+A10", *lengths) for lengths in PART_CELLS]
    runs = [
        TakeoverRun(cell, "takeover/pair", changes, 0)
        for changes in PARTS.values()
        for cell in wanted
    ]
    found = iter(list(pool.map(shares, runs)))
    return [
        {"without": name} | {cell.name: _share(next(found)) for cell in wanted} for name in PARTS
    ]


def _share(made: tuple[float, float] | None) -> float | str:
    return "could not run" if made is None else round(made[0], 4)


def table_2(work: Work, pool: ProcessPoolExecutor) -> list[Row]:
    """Return the requests per second of each approach and ours in each calibrated setup."""
    costs = read_yaml(CONFIGS / "cronus_calibration.yaml")
    systems = {**APPROACHES, OURS: PAIR}
    cases = [
        CronusCase(s, system, numbers(costs, s)) for s in SETUPS for system in systems.values()
    ]
    found = iter(list(pool.map(partial(_share_and_rate, work=work), cases)))
    rows = []
    for setup in SETUPS:
        made = {name: next(found) for name in systems}
        row: Row = {"setup": setup}
        row |= {name: round(rate, 3) for name, (_, rate, _) in made.items()}
        rows.append(row | {f"{name} share": round(made[name][0], 4) for name in STEADY})
    return rows


def _share_and_rate(case: CronusCase, work: Work) -> tuple[float, float, float]:
    return beside_bound(case.config(), replace(case, system=PAIR).config(), work)


def table_2_claims(rows: Sequence[Row]) -> list[Target]:
    """Return claims that compare ours with Cronus."""
    over = [100 * (float(row[OURS]) / float(row["Cronus"]) - 1) for row in rows]
    return [
        agrees(
            "Cronus' Table 2: takeover above Cronus, percent of its requests/s",
            f"{', '.join(f'{each:.1f}' for each in over)}; mean {mean(over):.1f}",
            min(over) >= 3 and mean(over) >= 7,
            "3 in each setup, 7 in the mean",
        )
    ]
