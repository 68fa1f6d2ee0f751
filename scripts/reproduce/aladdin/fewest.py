"""Aladdin's figures on the modelled cluster, beside the paper's.

    python -m scripts.reproduce.aladdin.fewest --trace CSV --profiles FOLDER --out DIR

CSV: prompt and output lengths of ShareGPT's first turns. FOLDER: Vidur's profiles (``vidur``) and
aiconfigurator's (``aiconfigurator``). DIR keeps what was simulated: the command goes on there.
"""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean, stdev

import click
from scipy.stats import t as student

from jaxinfer.plan.workers import fit_workers
from jaxinfer.workload.lengths import read_workload
from scripts.reproduce.aladdin.runs import ATGT_S, JSQ, TWO, Search, Way, aladdin, draw
from scripts.reproduce.aladdin.sensitivity import (
    all_requests,
    decodes_alone,
    off_seconds,
    on_four,
    other_workers,
    process_costs,
    theta_seeds,
)
from scripts.reproduce.aladdin.single import equation_6, figure_3, models, opened, overhead, table_2
from scripts.reproduce.aladdin.tables import make_tables
from scripts.reproduce.aladdin.unlike import LEVELS as UNLIKE
from scripts.reproduce.aladdin.unlike import cheapest, small_cases
from scripts.reproduce.claims import Target, holds
from scripts.reproduce.reproduction import Work
from scripts.tables import Row, show_table, write_csv

RATE, LEVELS, SEEDS = 25.0, (0.99, 0.995), range(5)
# Theta is chosen with another seed, once for each level and kind of prediction.
THETAS, CALIBRATION = (0.9, 0.8, 0.7, 0.6, 0.5), 100
RATES = (3.0, 6.0, 12.0, 18.0, 25.0, 50.0)
# About how many workers RATE takes, to begin with.
USUAL = 17.0


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Mean, and half of the 95 % interval of it, by Student's t; not numbers of fewer than two."""
    if len(values) < 2:
        return math.nan, math.nan
    half = student.ppf(0.975, len(values) - 1) * stdev(values) / len(values) ** 0.5
    return fmean(values), float(half)


def best_theta(search: Search, level: float, oracle: bool) -> tuple[float, list[Row]]:
    """The theta that takes the fewest workers, with a seed that nothing else has.

    Of equal ones the smallest, which is the safest: it is to hold with other seeds, too.
    """
    rows: list[Row] = []
    guess = USUAL
    for theta in THETAS:
        way = aladdin(theta, oracle)
        found = None
        # Where none keeps the lower level, none keeps this one.
        if search.fewest(way, RATE, LEVELS[0], CALIBRATION, guess):
            found = search.fewest(way, RATE, level, CALIBRATION, guess)
        guess = found or guess
        rows.append({"lengths": "true" if oracle else "predicted", "attainment (%)": 100 * level,
                     "theta": theta, "workers": found or "none"})  # fmt: skip
    kept = [row for row in rows if row["workers"] != "none"]
    return min(kept, key=lambda row: (row["workers"], row["theta"]))["theta"], rows


def counts_of(search: Search, way: Way, level: float) -> list[int | None]:
    """The fewest workers with each seed; each search begins where the one before ended."""
    found: list[int | None] = []
    for seed in SEEDS:
        guess = (found and found[-1]) or USUAL
        found.append(search.fewest(way, RATE, level, seed, guess))
    return found


def fewest_workers(
    search: Search, level: float
) -> tuple[list[Row], list[Row], list[Target], list[Way]]:
    """Of all systems, over seeds; theta, claims, and Aladdin as it was chosen."""
    rows: list[Row] = []
    thetas: list[Row] = []
    targets, chosen = [], []
    for oracle in (True, False):
        theta, tried = best_theta(search, level, oracle)
        thetas += tried
        chosen.append(aladdin(theta, oracle))
    ways = [JSQ, TWO, *chosen]
    counts = {way.name: counts_of(search, way, level) for way in ways}
    for way in ways:
        found = [n for n in counts[way.name] if n]
        row: Row = {"attainment (%)": 100 * level, "system": way.name}
        row["theta"] = way.system.get("theta", "-")
        row["workers"] = "{:.1f} +- {:.1f}".format(*interval(found))
        row["seeds that no number keeps"] = len(SEEDS) - len(found)
        for base in (JSQ, TWO):
            pairs = zip(counts[way.name], counts[base.name], strict=True)
            mean, half = interval([100 * (1 - n / m) for n, m in pairs if n and m])
            row[f"fewer than {base.name} (%)"] = f"{mean:.1f} +- {half:.1f}"
            if way in chosen:
                claim = f"{way.name}: fewer workers than {base.name} at {100 * level:g} %"
                percent, of = (40, "") if base is JSQ else (49, ", decodes only")
                met = len(found) == len(SEEDS) and mean + half >= percent
                targets.append(
                    holds(claim, f"up to {percent} %{of}", f"{mean:.1f} +- {half:.1f} % fewer", met,
                          f"{percent} % or more, within the interval", "calibrated")
                )  # fmt: skip
        rows.append(row)
    return rows, thetas, targets, chosen


def equation_7(search: Search, way: Way) -> tuple[list[Row], list[Target]]:
    """The fewest at six rates, and the line through the other five."""
    searched = [(rate, search.fewest(way, rate, LEVELS[0], 0, 4 + USUAL / RATE * rate * 0.8))
                for rate in RATES]  # fmt: skip
    found = [(rate, workers) for rate, workers in searched if workers]
    rows, off = [], []
    line = fit_workers(found)
    for rate, workers in found:
        without = fit_workers([each for each in found if each[0] != rate]).workers(rate)
        rows.append({"requests/s": rate, "fewest": workers, "eq. 7": line.workers(rate),
                     "eq. 7 of the other rates": without})  # fmt: skip
        off.append(abs(line.workers(rate) - workers))
    says = f"{max(off)} at most; {line.per_rate:.3f} r + {line.constant:.2f}"
    return rows, [holds("eq. 7 within one worker at six rates", "linear", says, max(off) <= 1,
                        "within one of the line of the others", "calibrated")]  # fmt: skip


def sensitivities(add: Callable[..., None], search: Search, out: Path, ours: Way) -> None:
    """What the figures depend on; Aladdin with true lengths, as it was chosen for 99 %."""
    other = Search(search.trace, search.tables, out / "sensitivity.jsonl")
    ways = {"shortest queue": JSQ, "power of two": TWO, "Aladdin": ours}
    add("Workers that are off", "off", *off_seconds(out))
    add("Four A100s", "four", *on_four(search, ways, out))
    add("What more processes cost", "processes", *process_costs(other, ours))
    add("Decodes alone", "decodes", *decodes_alone(other, ours))
    add("All requests", "all_requests", *all_requests(search, out, ours))
    seeds = [CALIBRATION, CALIBRATION + 1]
    add("Theta by seed", "theta_seeds", theta_seeds(search, THETAS, seeds))
    add("Table 2's workers", "other_workers", *other_workers(other, ours.system["theta"]))


@click.command()
@click.option("--trace", required=True)
@click.option("--profiles", required=True, type=click.Path(path_type=Path))
@click.option("--out", required=True, type=click.Path(path_type=Path))
def main(trace: str, profiles: Path, out: Path) -> None:
    """Print all tables, and write them and the targets."""
    work: Work = read_workload(trace)
    out.mkdir(parents=True, exist_ok=True)
    tables = make_tables(profiles, out)
    search = Search(work, tables, out / "simulated.jsonl")
    targets: list[Target] = []

    def add(title: str, name: str, rows: Sequence[Row], more: Sequence[Target] = ()) -> None:
        print(f"\n## {title}\n", flush=True)
        show_table(rows)
        write_csv(out / f"{name}.csv", rows)
        targets.extend(more)

    add("Figure 3", "figure3", *figure_3())
    add("Table 2", "table2", *table_2())
    add("Models", "models", *models(tables))
    add("Eq. 6 and Table 3", "equation6", *equation_6(tables, draw(work, CALIBRATION), ATGT_S))
    chosen: list[Way] = []
    for level in LEVELS:
        rows, thetas, more, ways = fewest_workers(search, level)
        percent = f"{100 * level:g}".replace(".", "_")
        add(f"Theta at {100 * level:g} %", f"theta_{percent}", thetas)
        title = f"Fewest workers at {RATE:g} requests/s and {100 * level:g} %"
        add(title, f"workers_{percent}", rows, more)
        if not chosen:
            add("Eq. 7", "equation7", *equation_7(search, ways[0]))
            add("Overhead", "overhead", *overhead(tables, work, ways[0]))
        chosen += ways
    add(
        "With workers to spare",
        "opened",
        kept(out / "opened.csv", lambda: opened(tables, draw(work, 0), chosen, RATE)),
    )
    add("Unlike workers", "unlike", *cheapest(work, out, SEEDS[:1]))
    cases = [(level, *small_cases(work, level, 100, out)) for level in UNLIKE]
    rows = [
        {"first token (s)": ttft, "gap (ms)": round(1000 * gap)} | row
        for (ttft, gap), rows, _ in cases for row in rows
    ]  # fmt: skip
    add("Unlike workers, small cases", "packing", rows, [t for *_, more in cases for t in more])
    sensitivities(add, search, out, chosen[0])
    print("\n## Targets\n")
    show_targets(targets)
    write_targets(out / "targets.csv", Path(__file__).name, targets)


if __name__ == "__main__":
    main()
