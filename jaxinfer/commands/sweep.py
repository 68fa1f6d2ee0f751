"""``jaxinfer sweep``: a grid over run files, one table and its pictures."""

import json
import os
import sys

import click
from rich.console import Console

from jaxinfer.commands.common import (
    cores,
    kept_results,
    refuse,
    settings_of,
    with_pictures,
    with_ray,
)
from jaxinfer.errors import JaxinferError, one_line


@click.command()
@click.argument("sweep_file")
@click.option("--out", required=True, help="Folder of the results; the same command goes on there.")
@click.option("--real", is_flag=True, help="Run the points, in turns, not simulate them.")
@click.option("--jobs", type=click.IntRange(min=1), help="Processes; by default all cores.")
@with_ray
@with_pictures
@settings_of("sweep", "run.workload.limit=100")
def sweep(
    sweep_file: str,
    out: str,
    real: bool,
    jobs: int | None,
    ray_address: str | None,
    pictures: str | None,
    settings: tuple[str, ...],
) -> None:
    """Run or simulate all points of a grid, or a list of them, over run files.

    SWEEP_FILE has files, their axes (dotted keys and lists of values) or a list of points, and what
    all have in common.
    """
    from jaxinfer.plan.problem import load_options
    from jaxinfer.plan.result import write_table
    from jaxinfer.plan.sweep import Sweep, clusters, draw, run_point, sweep_rows, x_axis
    from jaxinfer.plan.watch import PointBar

    if real:
        refuse("for simulations: real points take turns", {"--jobs": jobs, "--ray": ray_address})
    asked = load_options(Sweep, "sweep file", sweep_file, settings)
    try:
        points = list(asked.candidates())
    except JaxinferError as error:
        raise JaxinferError(f"sweep file {sweep_file}: {error}") from None
    if x_axis(asked) is None:
        refuse("for an axis of numbers, and axes has none", {"--pictures": pictures})
    text = json.dumps(asked.model_dump(mode="json") | {"real": real}, indent=2)
    version = None
    if real:
        from jaxinfer.plan.version import real_version
        from jaxinfer.runtime.devices import count_cpu_devices

        count_cpu_devices(clusters(asked))
        version = real_version()
    with kept_results(out, "sweep.json", text, "points.jsonl", version) as (folder, kept):
        with PointBar(len(points)) as bar:
            if real:
                rows = sweep_rows(asked, kept, map, run_point, bar.update)
            else:
                with cores(ray_address, jobs) as (map_points, _):
                    rows = sweep_rows(asked, kept, map_points, on_point=bar.update)
        write_table(folder / "sweep.csv", rows)
        written = draw(folder, pictures or "png", asked, rows)
    console = Console(width=None if sys.stdout.isatty() else 100)
    refused = [row["refused"] for row in rows if row.get("refused")]
    if refused:
        console.print(
            f"{len(refused)} of {len(rows)} points cannot be, such as: {one_line(refused[0])}",
            soft_wrap=True,
            markup=False,
        )
    said = f"{len(rows)} points, a table and {len(written)} pictures: {folder}{os.sep}"
    console.print(said, soft_wrap=True, markup=False)
