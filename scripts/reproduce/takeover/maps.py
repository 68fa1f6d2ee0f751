"""Shares of the bound by cell and system: tables, claims, and their picture."""

from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from math import inf, isnan, nan
from statistics import mean
from typing import Any

from matplotlib.figure import Figure

from scripts.reproduce.claims import Target, agrees
from scripts.reproduce.takeover.cases import (
    ANSWERS,
    OURS,
    PROMPTS,
    SYSTEMS,
    Cell,
    TakeoverRun,
    cells,
    shares,
    systems,
)
from scripts.tables import Row

Best = tuple[float, float]
_TITLES = {"DP": "data parallelism (DP)", "L-H": "low-high disagg. (L-H)"}


def map_of(
    cluster: str,
    seeds: Sequence[int],
    pool: ProcessPoolExecutor,
    wanted: Sequence[Cell] | None = None,
) -> list[Row]:
    """Return a row for each cell and seed; a system counts with its best variant."""
    asked = [
        (cell, seed, system, variant, TakeoverRun(cell, file, changes, seed))
        for cell in (cells(cluster) if wanted is None else wanted)
        for seed in seeds
        for system, variants in systems(cluster).items()
        for variant, (file, changes) in variants.items()
    ]
    best: dict[tuple[Cell, int], dict[str, Best]] = {}
    failed: dict[tuple[Cell, int], list[str]] = {}
    found = pool.map(shares, [run for *_, run in asked])
    for (cell, seed, system, variant, _), made in zip(asked, found, strict=True):
        here = best.setdefault((cell, seed), {})
        if made is None:
            failed.setdefault((cell, seed), []).append(f"{system} {variant}".strip())
        here[system] = max(here.get(system, (0.0, 0.0)), made or (0.0, 0.0))
    return [_row(*key, made, failed.get(key, [])) for key, made in best.items()]


def _row(cell: Cell, seed: int, made: Mapping[str, Best], failed: Sequence[str]) -> Row:
    row: Row = {"cell": cell.name, "requests": cell.count, "seed": seed}
    for system, (share, whole) in made.items():
        row |= {system: round(share, 4), f"{system} whole": round(whole, 4)}
    others = [system for system in made if system != OURS]
    for name, suffix in (("by_best", ""), ("whole_by_best", " whole")):
        best = max(float(row[f"{system}{suffix}"]) for system in others)
        row[name] = round(float(row[f"{OURS}{suffix}"]) / best, 4)
    # Variants that gave an instance a request which does not fit there.
    return row | {"could_not_run": "; ".join(failed)}


def by_cell(rows: Sequence[Row]) -> dict[str, dict[str, float]]:
    """Return means over seeds, by cell and column."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(str(row["cell"]), []).append(row)
    return {
        cell: {
            key: mean(float(row[key]) for row in here)
            for key in here[0]
            if key not in ("cell", "seed", "requests", "could_not_run")
        }
        for cell, here in found.items()
    }


def claims(cluster: str, rows: Sequence[Row]) -> list[Target]:
    """Return a map's claims: ours compared with the best other, and all with the bound."""
    made = by_cell(rows)
    ratios = sorted(cell["by_best"] for cell in made.values())
    share = [cell[OURS] for cell in made.values()]
    above = max(float(row[key]) for row in rows for key in row if str(key).endswith("whole"))
    low = sum(ratio < 0.98 for ratio in ratios)
    return [
        agrees(
            f"{cluster}: no run's rate is above the bound",
            f"at most {above:.4f}",
            above <= 1 + 1e-6,
            "1 or less, all systems, cells and seeds",
        ),
        agrees(
            f"{cluster}: takeover by the best other system, {len(ratios)} cells",
            f"{low} below 0.98, the least {ratios[0]:.3f}",
            low <= 2 and ratios[0] >= 0.95,
            "0.98 in all but two, 0.95 in those",
        ),
        agrees(
            f"{cluster}: the same, in the mean",
            f"{mean(ratios):.3f}; share of the bound {mean(share):.3f}",
            mean(ratios) >= 1.02 and mean(share) >= 0.95,
            "1.02; share 0.95",
        ),
    ]


def draw(maps: Mapping[str, Sequence[Row]]) -> Figure:
    """Draw a heat map per pair and system: prompts downwards, answers to the right."""
    figure = Figure(figsize=(2.4 * len(SYSTEMS), 2.5 * len(maps)), layout="constrained")
    axes: Any = figure.subplots(len(maps), len(SYSTEMS), squeeze=False)
    image: Any = None
    least = dict.fromkeys(SYSTEMS, inf)
    for line, (pair, rows) in enumerate(maps.items()):
        made = by_cell(rows)
        for column, system in enumerate(SYSTEMS):
            ax = axes[line][column]
            grid = [
                [made.get(Cell(pair, p, a).name, {}).get(system, nan) for a in ANSWERS]
                for p in PROMPTS
            ]
            image = ax.imshow(grid, vmin=0.3, vmax=1.0, cmap="viridis")
            for y, line_ in enumerate(grid):
                for x, value in enumerate(line_):
                    if isnan(value):  # It was not run.
                        continue
                    least[system] = min(least[system], value)
                    colour = "black" if value > 0.75 else "white"
                    said = f"{value:.2f}".removeprefix("0")
                    ax.text(x, y, said, ha="center", va="center", color=colour, fontsize=8)
            ax.set_xticks(range(len(ANSWERS)), [str(n) for n in ANSWERS], fontsize=7)
            ax.set_yticks(range(len(PROMPTS)), [str(n) for n in PROMPTS], fontsize=7)
            if not line:
                ax.set_title(_TITLES.get(system, system), fontsize=9)
            if not column:
                ax.set_ylabel(f"{pair}\nprompt tokens", fontsize=8)
            if line == len(maps) - 1:
                ax.set_xlabel("answer tokens", fontsize=8)
    found = [_TITLES.get(system, system) for system in SYSTEMS if least[system] >= 0.9]
    figure.suptitle(f"At least 0.9 of the bound for all lengths: {', '.join(found) or 'no system'}")
    figure.colorbar(image, ax=axes, label="share of the bound", shrink=0.8)
    return figure
