"""``jaxinfer sweep``: simulates a grid of run files, with one table and pictures."""

import json
import os
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console

from jaxinfer.commands.common import (
    cores,
    counted,
    kept_results,
    refuse,
    say,
    settings_of,
    with_pictures,
    with_ray,
)
from jaxinfer.commands.figures import print_json, with_json
from jaxinfer.errors import JaxinferError, one_line

if TYPE_CHECKING:
    from jaxinfer.lab.plan.sweep.sweep_file import Sweep

# A sweep with more runs than this prints their number before it begins, because it checks all of
# them first.
MANY = 1000


@click.command()
@click.argument("sweep_file")
@click.option("--out", required=True, help="Folder for results; a killed sweep continues there.")
@click.option(
    "--real", is_flag=True, help="Run the points, one after the other, instead of simulating."
)
@click.option(
    "--jobs", type=click.IntRange(min=1), help="Number of processes (default: one per core)."
)
@click.option("--folders", is_flag=True, help="Keep a run folder for each point, as compare does.")
@with_ray
@with_pictures
@settings_of("sweep", "run.workload.limit=100")
@with_json
def sweep(
    sweep_file: str,
    out: str,
    real: bool,
    jobs: int | None,
    folders: bool,
    ray_address: str | None,
    pictures: str | None,
    settings: tuple[str, ...],
    as_json: bool,
) -> None:
    """Simulate (or run) a grid or list of configurations, and tabulate the results.

    SWEEP_FILE names run files, axes (dotted keys with lists of values) or a list of points, and the
    options that all points share.
    """
    from jaxinfer.lab.plan.sweep.sweep import clusters, run_point, simulate_point, sweep_rows
    from jaxinfer.report.progress import CountProgress

    if real:
        refuse("for simulations: real points take turns", {"--jobs": jobs, "--ray": ray_address})
    refuse("for this machine: not with --folders", {"--ray": folders and ray_address})
    asked = _load(sweep_file, settings, pictures, real)
    text = json.dumps(asked.model_dump(mode="json") | {"real": real}, indent=2)
    version = None
    if real:
        from jaxinfer.files.made_from import real_version
        from jaxinfer.runtime.stage.devices import count_cpu_devices

        count_cpu_devices(clusters(asked))
        version = real_version()
    with kept_results(out, "sweep.json", text, "points.jsonl", version) as (folder, kept):
        runs, points = folder / "runs" if folders else None, len(list(asked.candidates()))
        if (count := points * len(asked.all_seeds)) >= MANY:
            say(f"{count:,} runs: {points:,} points, {len(asked.all_seeds):,} seeds each")
        at = nullcontext((map, 1)) if real else cores(ray_address, jobs)
        with at as (map_points, _), CountProgress("points", count) as bar:
            run = run_point if real else simulate_point
            rows = sweep_rows(asked, kept, map_points, run, bar.advance, runs)
        if all(row.get("refused") for row in rows):
            raise JaxinferError(
                f"sweep file {sweep_file}: none of {len(rows)} points is valid; for example: "
                f"{one_line(rows[0]['refused'])}"
            )
        written = _write(folder, asked, rows, pictures)
    if as_json:
        print_json({"points": rows})
        return
    console = Console(width=None if sys.stdout.isatty() else 100)
    for line in [*_doubts(rows), *written]:
        console.print(line, soft_wrap=True, markup=False)


def _load(sweep_file: str, settings: tuple[str, ...], pictures: str | None, real: bool) -> "Sweep":
    """Read a sweep file; refuse one without a valid point."""
    from jaxinfer.lab.plan.problem import load_options
    from jaxinfer.lab.plan.sweep.sweep import check
    from jaxinfer.lab.plan.sweep.sweep_file import Sweep, x_axis

    asked = load_options(Sweep, "sweep file", sweep_file, settings)
    try:
        list(asked.candidates())
        if x_axis(asked) is None:
            refuse("for an axis of numbers, and axes has none", {"--pictures": pictures})
        check(asked, real)
    except JaxinferError as error:
        raise JaxinferError(f"sweep file {sweep_file}: {error}") from None
    return asked


def _doubts(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Yield lines on points that are invalid, or that have few requests."""
    if refused := [one_line(row["refused"]) for row in rows if row.get("refused")]:
        yield f"{len(refused)} of {len(rows)} points are not valid; for example: {refused[0]}"
    if few := [row["enough_requests"] for row in rows if row.get("enough_requests")]:
        yield (
            f"warning: {len(few)} of {len(rows)} points have too few requests to show whether "
            f"the queue keeps growing: enough_requests has the number needed, up to {max(few)}"
        )
    if beyond := sum(bool(row.get("beyond_measured")) for row in rows):
        yield (
            f"warning: {beyond} of {len(rows)} points have steps larger than any measured one; "
            "their times are extrapolated (column beyond_measured)"
        )


def _write(
    folder: Path, asked: "Sweep", rows: list[dict[str, Any]], pictures: str | None
) -> list[str]:
    """Write the table and pictures; return lines on their places, and on pictures left out."""
    from jaxinfer.lab.plan.result import write_table
    from jaxinfer.lab.plan.sweep.pictures import draw

    write_table(folder / "sweep.csv", rows)
    written, left_out = draw(folder, pictures or "png", asked, rows)
    made = f"{counted(len(rows), 'point')}, a table and {counted(len(written), 'picture')}"
    return [*left_out, f"{made}: {folder}{os.sep}"]
