"""``jaxinfer sweep``: a grid over run files, one table and its pictures."""

import json
import os
import sys

import click
from rich.console import Console

from jaxinfer.commands.common import (
    cores,
    counted,
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
@click.option("--folders", is_flag=True, help="Keep a run folder of each point, as compare does.")
@with_ray
@with_pictures
@settings_of("sweep", "run.workload.limit=100")
def sweep(
    sweep_file: str,
    out: str,
    real: bool,
    jobs: int | None,
    folders: bool,
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
    from jaxinfer.plan.search_progress import PointBar
    from jaxinfer.plan.sweep.pictures import draw
    from jaxinfer.plan.sweep.sweep import Sweep, check, clusters, run_point, sweep_rows, x_axis

    if real:
        refuse("for simulations: real points take turns", {"--jobs": jobs, "--ray": ray_address})
    refuse("for this machine: not with --folders", {"--ray": folders and ray_address})
    asked = load_options(Sweep, "sweep file", sweep_file, settings)
    try:
        points = list(asked.candidates())
        if x_axis(asked) is None:
            refuse("for an axis of numbers, and axes has none", {"--pictures": pictures})
        check(asked, real)
    except JaxinferError as error:
        raise JaxinferError(f"sweep file {sweep_file}: {error}") from None
    text = json.dumps(asked.model_dump(mode="json") | {"real": real}, indent=2)
    version = None
    if real:
        from jaxinfer.plan.version import real_version
        from jaxinfer.runtime.stage.devices import count_cpu_devices

        count_cpu_devices(clusters(asked))
        version = real_version()
    with kept_results(out, "sweep.json", text, "points.jsonl", version) as (folder, kept):
        runs = folder / "runs" if folders else None
        with PointBar(len(points) * len(asked.all_seeds)) as bar:
            if real:
                rows = sweep_rows(asked, kept, map, run_point, bar.update, runs)
            else:
                with cores(ray_address, jobs) as (map_points, _):
                    rows = sweep_rows(asked, kept, map_points, on_point=bar.update, folders=runs)
        refused = [one_line(row["refused"]) for row in rows if row.get("refused")]
        if len(refused) == len(rows):
            raise JaxinferError(
                f"sweep file {sweep_file}: none of {len(rows)} points can be, such as: {refused[0]}"
            )
        write_table(folder / "sweep.csv", rows)
        written, left_out = draw(folder, pictures or "png", asked, rows)
    said = []
    if refused:
        said.append(f"{len(refused)} of {len(rows)} points cannot be, such as: {refused[0]}")
    if few := [row["enough_requests"] for row in rows if row.get("enough_requests")]:
        said.append(
            f"warning: {len(few)} of {len(rows)} points have too few requests to tell a load that "
            f"lasts from a queue that grows: enough_requests has how many do, up to {max(few)}"
        )
    said += left_out
    said.append(
        f"{counted(len(rows), 'point')}, a table and {counted(len(written), 'picture')}: "
        f"{folder}{os.sep}"
    )
    console = Console(width=None if sys.stdout.isatty() else 100)
    for line in said:
        console.print(line, soft_wrap=True, markup=False)
