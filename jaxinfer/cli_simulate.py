"""Commands on modelled clusters: simulate, capacity and calibrate."""

import sys
from collections.abc import Sequence
from pathlib import Path

import click
from rich.console import Console

from jaxinfer.cli_options import (
    compare_and_write,
    refuse,
    with_limit,
    with_settings,
    workload_settings,
)
from jaxinfer.config import load_run_file
from jaxinfer.errors import JaxinferError


@click.command()
@click.argument("run_file")
@click.option("--workload", help="JSONL of prompt_token_ids, or CSV of lengths.")
@with_limit
@click.option("--slo", required=True, help="Seconds: ttft=1,tpot=0.1 (and tbt, e2e).")
@click.option("--attainment", default=0.9, help="Share of the requests that must meet them.")
@click.option("--seed", default=0, help="Of the Poisson arrivals.")
@with_settings
def capacity(
    run_file: str,
    workload: str | None,
    limit: int | None,
    slo: str,
    attainment: float,
    seed: int,
    settings: tuple[str, ...],
) -> None:
    """Find the largest rate of requests at which a modelled cluster meets its targets."""
    from jaxinfer.simulate.capacity import capacity, read_slo

    more = workload_settings(workload, limit)
    config = load_run_file(run_file, [*settings, *more])
    work = config.workload.requests()
    console = Console()
    best = capacity(
        config,
        work,
        read_slo(slo),
        attainment,
        seed=seed,
        on_load=lambda load: console.print(
            f"{load.rate:9.3f} requests/s: {load.attainment:6.1%} meet their targets"
        ),
    )
    console.print(
        f"capacity: {best.rate:.3g} requests/s at {best.attainment:.1%} attainment, "
        f"goodput {best.goodput:.3g} requests/s"
    )


@click.command()
@click.argument("run_file")
@click.option("--group", required=True, help="Of the run file; its GPU is calibrated.")
@click.option("--points", required=True, help="CSV of measured steps.")
@with_settings
def calibrate(run_file: str, group: str, points: str, settings: tuple[str, ...]) -> None:
    """Fit a modelled GPU's efficiencies to measured steps; print the run file's new `simulate`."""
    from jaxinfer.simulate.calibrate import as_yaml, calibrate_group

    config = load_run_file(run_file, settings)
    found, table = calibrate_group(config, group, points)
    Console(width=None if sys.stdout.isatty() else 120).print(table)
    Console().print(
        as_yaml(group, found, config.simulate), soft_wrap=True, markup=False, highlight=False
    )


def _replay(real: Path, out: Path) -> None:
    from jaxinfer.report.comparison import new_folder, write_comparison
    from jaxinfer.simulate.replay import fidelity, overruns, replay

    new_folder(out)
    both = replay(real, out / "runs")
    Console(width=None if sys.stdout.isatty() else 120).print(fidelity(*both))
    for hint in overruns(both[0]):
        Console().print(hint, soft_wrap=True, markup=False, highlight=False)
    command = " ".join(["jaxinfer", *sys.argv[1:]])
    written = write_comparison({run.name: [run] for run in both}, out, command)
    Console().print(f"tables, pictures and traces: {written[0]}", soft_wrap=True)


@click.command()
@click.argument("run_file", required=False)
@click.option("--workload", help="JSONL of prompt_token_ids, or CSV of lengths.")
@with_limit
@click.option("--replay", metavar="RUN_DIR", help="A finished real run: how far is the simulator?")
@click.option("--out", help="New folder for tables, pictures and traces; else figures alone.")
@with_settings
def simulate(
    run_file: str | None,
    workload: str | None,
    limit: int | None,
    replay: str | None,
    out: str | None,
    settings: tuple[str, ...],
) -> None:
    """Serve a workload on a modelled cluster, in virtual time: groups name GPUs by their kind."""
    if replay:
        why = "for a run file, not for a replay"
        given = {"--workload": workload, "--limit": limit, "--set": settings}
        refuse(why, {"RUN_FILE": run_file, **given})
        if not out:
            raise JaxinferError("a replay needs --out FOLDER")
        _replay(Path(replay), Path(out))
        return
    if not run_file:
        raise JaxinferError("give a run file, or --replay RUN_DIR")
    changes = [*settings, *workload_settings(workload, limit)]
    if out:
        compare_and_write([run_file], [], Path(out), 0, changes)
    else:
        _print_figures(run_file, changes)


def _print_figures(run_file: str, settings: Sequence[str]) -> None:
    """Of a run of which nothing is kept."""
    from jaxinfer.report.table import metrics_table
    from jaxinfer.simulate.nodes import place_groups
    from jaxinfer.simulate.run import simulate

    config = load_run_file(run_file, settings)
    found = simulate(config, config.workload.requests())
    console = Console()
    console.print(metrics_table(found))
    placement = place_groups(config.cluster(), config.simulate, config.own)
    if placement and placement.usd_per_hour is not None:
        usd = placement.usd_per_hour * found.wall_s / 3600
        console.print(
            f"${placement.usd_per_hour:.2f} per hour: ${1000 * usd / found.requests:.3g} per 1,000 "
            f"requests, ${1e6 * usd / found.output_tokens:.3g} per million output tokens",
            highlight=False,
        )
    console.print(f"{found.steps:,} steps simulated in {found.loop_s:.1f} s", highlight=False)
