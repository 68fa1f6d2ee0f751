"""``jaxinfer compare``: systems, or layouts, side by side."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import click
from rich.console import Console

from jaxinfer.commands.common import (
    configure,
    new_file,
    ray_settings,
    refuse,
    say,
    with_force,
    with_limit,
    with_model,
    with_pictures,
    with_ray_hosts,
    with_settings,
    with_workload,
    workload_settings,
)
from jaxinfer.commands.figures import print_json, with_json
from jaxinfer.commands.systems import (
    bound_rate,
    print_share,
    run_systems,
    show_and_write,
    systems_json,
    with_bound,
)
from jaxinfer.config.run_file import RunFile, load_run_file
from jaxinfer.errors import JaxinferError


@click.command()
@click.argument("files", nargs=-1, required=True)
@click.option(
    "--systems",
    help="Further run files in the folder of the first one: data_parallel,... (without .yaml).",
)
@click.option("--out", help="For systems: new folder for tables, pictures and traces.")
@click.option(
    "--config", "run_file", help="For layouts: run file that names the model and its options."
)
@with_pictures
@with_model
@with_workload
@click.option("--output", "output_path", help="For layouts: JSON file for the figures.")
@with_limit
@click.option(
    "--rounds",
    type=click.IntRange(min=1),
    help="Runs of each system or layout, interleaved (default: 3).",
)
@click.option(
    "--one-by-one", is_flag=True, help="Load one system at a time; runs are not interleaved."
)
@click.option("--simulate", is_flag=True, help="Simulate modelled clusters instead of running.")
@with_bound
@with_settings
@with_ray_hosts
@with_force
@with_json
def compare(
    files: tuple[str, ...],
    systems: str | None,
    out: str | None,
    pictures: str | None,
    run_file: str | None,
    model: str | None,
    workload: str | None,
    output_path: str | None,
    limit: int | None,
    rounds: int | None,
    one_by_one: bool,
    simulate: bool,
    bound: bool,
    settings: tuple[str, ...],
    ray_address: str | None,
    force: bool,
    as_json: bool,
) -> None:
    """Run one workload under several systems, or several layouts, side by side.

    FILES are run files (.yaml), of which the first one has the workload; or they are layouts,
    given by name or as Python files ("default" is megatron).
    """
    if not any(Path(file).suffix in (".yaml", ".yml") for file in files):
        only: dict[str, object] = {
            "--systems": systems,
            "--out": out,
            "--pictures": pictures,
            "--simulate": simulate,
            "--bound": bound,
            "--ray": ray_address,
            "--one-by-one": one_by_one,
        }
        refuse("for run files, not for layouts", only)
        if not output_path:
            raise JaxinferError("layouts are compared with --output FILE")
        changes = [*settings, *workload_settings(workload, limit)]
        config = configure(run_file, tuple(changes), model)
        _compare_layouts(files, config, new_file(output_path, force), rounds or 3, as_json)
        return
    refuse(
        "for layouts, not for run files",
        {"--config": run_file, "--model": model, "--output": output_path, "--force": force},
    )
    if not out:
        raise JaxinferError("systems are compared with --out FOLDER")
    more = ray_settings(ray_address) + workload_settings(workload, limit)
    names = systems.split(",") if systems else []
    if simulate:
        real: dict[str, object] = {"--rounds": rounds, "--one-by-one": one_by_one}
        refuse("for real runs; a simulation has the same result each time", real)
    else:
        refuse("for modelled clusters: add --simulate", {"--bound": bound})
    from jaxinfer.lab.compare import load_systems

    folder, changes = Path(out), [*settings, *more]
    configs = load_systems(files, names, changes)
    work = load_run_file(files[0], changes).requests(say)
    # Before the runs: a cluster without a bound is refused at once.
    bounds = {name: bound_rate(config, work) for name, config in configs.items() if bound}
    runs = run_systems(configs, work, folder, 0 if simulate else rounds or 3, one_by_one)
    show_and_write(runs, folder, pictures, as_json)
    if as_json:
        print_json(systems_json(runs, bounds))
        return
    for name, most in bounds.items():
        print_share(most, runs[name][0].rate, name)


def _compare_layouts(
    layouts: Sequence[str], config: RunFile, out: Path, rounds: int, as_json: bool
) -> None:
    from jaxinfer.lab.measure import compare_layouts
    from jaxinfer.runtime.layout_table import layouts_table

    work = config.requests(say)
    records = compare_layouts(config, layouts, work, config.workload.source, f"{out}.runs", rounds)
    if as_json:
        print_json({"layouts": records})
    else:
        Console(width=None if sys.stdout.isatty() else 160).print(layouts_table(records))
    out.write_text(json.dumps(records, indent=2) + "\n", encoding="utf-8")
