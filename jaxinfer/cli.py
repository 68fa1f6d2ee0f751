"""The command line: run, bench, compare, explain, profile, convert; `cli_simulate` has more."""

import errno
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import click
from rich.console import Console
from rich.text import Text

from jaxinfer import cli_simulate
from jaxinfer.batch_job import BatchJob
from jaxinfer.cli_options import (
    compare_and_write,
    refuse,
    with_figures,
    with_force,
    with_limit,
    with_model,
    with_settings,
    with_workload,
    workload_settings,
)
from jaxinfer.config import RunFile, load_run_file
from jaxinfer.errors import JaxinferError
from jaxinfer.report.table import metrics_table
from jaxinfer.signals import Interrupted, leave
from jaxinfer.workload.arrivals import Arrivals, with_arrivals
from jaxinfer.workload.lengths import read_workload

# What files, pipes and terminals that take a command's output may fail with.
_OF_OUTPUT = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EPIPE, errno.EIO)


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="jaxinfer")
def cli() -> None:
    """Run and study LLM inference in JAX."""


for command in (cli_simulate.simulate, cli_simulate.capacity, cli_simulate.calibrate):
    cli.add_command(command)


@cli.command()
@click.argument("run_file", required=False)
@with_model
@click.option("--input", "input_path", help="JSONL of requests: OpenAI batch or plain lines.")
@click.option("--output", "output_path", help="JSONL of results, appended as requests finish.")
@with_settings
@click.option("--force", is_flag=True, help="Start over where the output exists.")
@click.option(
    "--show",
    default=0,
    type=click.IntRange(min=0),
    metavar="N",
    help="Print the first N answers at the end.",
)
def run(
    run_file: str | None,
    model: str | None,
    input_path: str | None,
    output_path: str | None,
    settings: tuple[str, ...],
    force: bool,
    show: int,
) -> None:
    """Answer a file of requests. The same command continues an interrupted run.

    Exits with 0 if every line got an answer, 1 if some did not, 2 if it could not run.
    """
    config = _configure(run_file, settings, model)
    input_path = input_path or config.workload.input
    output_path = output_path or config.workload.output
    if not input_path or not output_path:
        missing = "input" if not input_path else "output"
        raise JaxinferError(
            f"no {missing}: give --{missing}, or workload.{missing} in the run file"
        )
    console = Console(width=None if sys.stdout.isatty() else 100)
    with BatchJob.open(config, input_path, output_path, force) as job:
        if not job.num_lines:
            console.print(f"0 requests in {input_path}", soft_wrap=True)
        if job.num_resumed:
            console.print(f"continuing: {job.num_resumed} of {job.num_lines} lines are done")
        try:
            metrics = job.run()
        except Interrupted as ended:
            ended.add_note("the same command continues")
            raise
        if metrics:
            console.print(metrics_table(metrics))
            if len(config.instances) > 1:
                _print_cluster(job.newest_run())
            console.print(
                f"run.json, steps.jsonl and requests.jsonl: {job.run_folder}", soft_wrap=True
            )
        console.print(f"results: {output_path}", soft_wrap=True)
        for prompt, answer in job.answers(show):
            console.print()
            console.print(Text(prompt, style="bold"))
            console.print(Text(answer))
        if job.num_failed:
            console.print(f"{job.num_failed} of {job.num_lines} lines failed; see their error")
        if job.lost:
            console.print(
                f"{job.num_missing} of {job.num_lines} lines have no result, the same command goes "
                f"on with them: {job.lost}",
                markup=False,
                soft_wrap=True,
            )
        if job.num_failed or job.lost:
            sys.exit(1)


def _print_cluster(run_folder: Path) -> None:
    from jaxinfer.report.comparison import comparison_table
    from jaxinfer.report.records import read_run

    run = read_run(run_folder)
    Console(width=None if sys.stdout.isatty() else 160).print(comparison_table({run.name: [run]}))


@cli.command()
@click.argument("run_file", required=False)
@with_model
@with_workload
@with_figures
@with_limit
@click.option("--repeat", default=1, type=click.IntRange(min=1), help="Runs to measure.")
@with_settings
@with_force
def bench(
    run_file: str | None,
    model: str | None,
    workload: str,
    json_path: str,
    limit: int | None,
    repeat: int,
    settings: tuple[str, ...],
    force: bool,
) -> None:
    """Measure offline throughput: all requests at once, greedy, EOS ignored.

    Times exclude loading and compiling ahead. The figures are a list, one entry per run.
    """
    from jaxinfer.llm import LLM
    from jaxinfer.measure import measure

    config = _configure(run_file, settings, model)
    out = _new_file(json_path, force)
    work = with_arrivals(read_workload(workload)[:limit], Arrivals())
    llm = LLM.from_config(config)
    console = Console()
    figures = []
    for _ in range(repeat):
        metrics = measure(llm, work, workload, run_dir=f"{out}.runs")
        console.print(metrics_table(metrics))
        figures.append(llm.describe() | {"workload": workload} | asdict(metrics))
    out.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


@cli.command()
@click.argument("files", nargs=-1, required=True)
@click.option(
    "--systems", help="More run files of FILE's folder: data_parallel,...; FILE itself runs, too."
)
@click.option("--out", help="New folder for tables, pictures and traces of systems.")
@click.option("--config", "run_file", help="Of tables: run file with the model and its options.")
@with_model
@click.option("--workload", help="JSONL of prompt_token_ids, or CSV of lengths.")
@click.option("--json", "json_path", help="Of tables: file for the figures.")
@with_limit
@click.option("--rounds", type=click.IntRange(min=1), help="Runs of each, in turns; 3.")
@click.option("--simulate", is_flag=True, help="On modelled clusters, in virtual time.")
@with_settings
@with_force
def compare(
    files: tuple[str, ...],
    systems: str | None,
    out: str | None,
    run_file: str | None,
    model: str | None,
    workload: str | None,
    json_path: str | None,
    limit: int | None,
    rounds: int | None,
    simulate: bool,
    settings: tuple[str, ...],
    force: bool,
) -> None:
    """Run one workload under several systems, or several tables of sharding rules, side by side.

    FILES are run files (.yaml), whose first one has the workload; or Python files that define
    RULES ("default" is the built-in table).
    """
    if not any(Path(file).suffix in (".yaml", ".yml") for file in files):
        only: dict[str, object] = {"--systems": systems, "--out": out, "--simulate": simulate}
        refuse("for run files, not for tables of rules", only)
        if not json_path or not workload:
            raise JaxinferError("tables of rules are compared with --workload and --json")
        _compare_rules(
            files, run_file, model, workload, json_path, limit, rounds or 3, settings, force
        )
        return
    refuse(
        "for tables of rules, not for run files",
        {"--config": run_file, "--model": model, "--json": json_path, "--force": force},
    )
    if not out:
        raise JaxinferError("systems are compared with --out FOLDER")
    more = workload_settings(workload, limit)
    names = systems.split(",") if systems else []
    if simulate:
        refuse("for real runs: a simulation is the same each time", {"--rounds": rounds})
    count = 0 if simulate else rounds or 3
    compare_and_write(files, names, Path(out), count, [*settings, *more])


def _compare_rules(
    tables: Sequence[str],
    run_file: str | None,
    model: str | None,
    workload: str,
    json_path: str,
    limit: int | None,
    rounds: int,
    settings: tuple[str, ...],
    force: bool,
) -> None:
    from jaxinfer.measure import compare_rules
    from jaxinfer.report.plan_table import comparison_table

    config = _configure(run_file, settings, model)
    out = _new_file(json_path, force)
    work = with_arrivals(read_workload(workload)[:limit], Arrivals())
    records = compare_rules(config, tables, work, workload, f"{out}.runs", rounds)
    Console(width=None if sys.stdout.isatty() else 160).print(comparison_table(records))
    out.write_text(json.dumps(records, indent=2) + "\n", encoding="utf-8")


@cli.command()
@click.argument("run_file", required=False)
@with_model
@with_settings
def explain(run_file: str | None, model: str | None, settings: tuple[str, ...]) -> None:
    """Say how a model would lie on its devices and what its steps cost.

    No weights are loaded, but the largest steps are compiled, which may take a minute.
    """
    from jaxinfer.report.plan_table import plan_tables
    from jaxinfer.report.progress import LoadProgress
    from jaxinfer.runtime.checkpoint import open_checkpoint
    from jaxinfer.runtime.engine import plan_cluster
    from jaxinfer.runtime.explain import step_costs

    config = _configure(run_file, settings, model)
    cluster = config.cluster()
    checkpoint = open_checkpoint(config.require_model(), cluster.load_format)
    stages = plan_cluster(checkpoint.config, cluster)
    plans = [(name, plan) for name, of_one in stages.items() for plan in of_one]
    costs = []
    with LoadProgress(True) as bar:
        part = "compiling the largest steps, to see what they cost"
        bar.update(part, len(plans))
        for _, plan in plans:
            costs.append(step_costs(plan))
            bar.update(part, len(plans) - len(costs))
    console = Console(width=None if sys.stdout.isatty() else 120)
    for (name, plan), cost in zip(plans, costs, strict=True):
        if config.instances:
            layers = f"layers {plan.layers.start} to {plan.layers.stop - 1}"
            console.print(Text(f"Instance {name}, {layers}", style="bold"))
        for table in plan_tables(plan, cost):
            console.print(table)
            console.print()


@cli.command()
@click.argument("run_file")
@with_model
@click.option("--out", required=True, help="New folder for the pictures.")
@with_settings
def profile(run_file: str, model: str | None, out: str, settings: tuple[str, ...]) -> None:
    """Measure the steps of each instance, fit Cronus' eqs. 2 and 3, and keep them for later runs.

    Nothing else should run on the machine meanwhile.
    """
    from jaxinfer.report.comparison import new_folder
    from jaxinfer.report.profile_plot import draw_profile, profile_table
    from jaxinfer.report.progress import LoadProgress
    from jaxinfer.runtime.checkpoint import open_checkpoint
    from jaxinfer.runtime.engine import load_cluster
    from jaxinfer.runtime.profile import profile_engines
    from jaxinfer.steps.profile import store_profile

    config = _configure(run_file, settings, model)
    folder = Path(out)
    new_folder(folder)
    found = {}
    with LoadProgress(True) as bar:
        model, groups = config.require_model(), config.cluster()
        checkpoint = open_checkpoint(model, groups.load_format)
        cluster = load_cluster(checkpoint, groups, bar.update)
        engines = {name: (engine, model) for name, engine in cluster.engines.items()}
        for name, measured in profile_engines(engines, bar.update).items():
            store_profile(measured)
            found[name] = measured, cluster.slowdowns(name)
            draw_profile(name, *found[name], folder / f"{name}.png")
    Console(width=None if sys.stdout.isatty() else 140).print(profile_table(found))
    Console().print(f"pictures: {folder}", soft_wrap=True)


@cli.command()
@click.argument("source")
@click.argument("destination")
@click.option(
    "--dtype", type=click.Choice(["float32", "bfloat16"]), help="Of the weights; else as stored."
)
@click.option("--force", is_flag=True, help="Overwrite a converted folder.")
def convert(source: str, destination: str, dtype: str | None, force: bool) -> None:
    """Write model SOURCE to folder DESTINATION, from which each device reads its shards only."""
    from jaxinfer.convert import convert

    folder = convert(source, destination, dtype, force)
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    Console().print(f"{folder}: {size / 2**20:.0f} MiB", soft_wrap=True, highlight=False)


def _new_file(path: str, force: bool) -> Path:
    out = Path(path)
    if out.exists() and not force:
        raise JaxinferError(f"{out} exists; --force overwrites it")
    if not out.parent.is_dir():
        raise JaxinferError(f"{out}: there is no folder {out.parent}")
    return out


def _configure(run_file: str | None, settings: tuple[str, ...], model: str | None) -> RunFile:
    config = load_run_file(run_file, settings)
    return config.model_copy(update={"model": model}) if model else config


def main() -> None:
    """Run one command: a user's mistake is one line on stderr and exit code 2."""
    sys.path.insert(0, os.getcwd())  # For a system of the user's own.
    try:
        code = cli(standalone_mode=False)
    except click.ClickException as error:
        leave(error.format_message(), 2)
    except JaxinferError as error:
        leave(str(error), 2)
    except OSError as error:
        if error.errno not in _OF_OUTPUT:
            raise
        leave(f"cannot write {error.filename or 'the output'}: {error.strerror}", 2)
    sys.exit(code or 0)
