"""``jaxinfer run``: answers a file of requests."""

import sys
from pathlib import Path

import click
from rich.console import Console
from rich.text import Text

from jaxinfer.commands.batch_job import BatchJob
from jaxinfer.commands.common import (
    configure,
    ledger_settings,
    ray_settings,
    refuse,
    with_ledger,
    with_model,
    with_ray_hosts,
    with_settings,
)
from jaxinfer.commands.figures import print_json, with_json
from jaxinfer.commands.signals import Interrupted
from jaxinfer.errors import JaxinferError, OnlyInstanceLost
from jaxinfer.ledger.ledger_file import NAME as LEDGER
from jaxinfer.options.validation import read_json
from jaxinfer.report.metrics import RunMetrics
from jaxinfer.report.table import metrics_table


@click.command()
@click.argument("run_file", required=False)
@with_model
@click.option("--input", "input_path", help="File of requests: JSONL (also .gz) or Parquet.")
@click.option(
    "--output",
    "output_path",
    help="File for results: JSONL, appended as requests finish, or Parquet.",
)
@with_settings
@with_ray_hosts
@with_ledger
@click.option("--force", is_flag=True, help="Overwrite an existing output and start over.")
@click.option(
    "--show",
    default=0,
    type=click.IntRange(min=0),
    metavar="N",
    help="Print the first N answers at the end.",
)
@with_json
def run(
    run_file: str | None,
    model: str | None,
    input_path: str | None,
    output_path: str | None,
    settings: tuple[str, ...],
    ray_address: str | None,
    ledger: bool,
    force: bool,
    show: int,
    as_json: bool,
) -> None:
    """Answer a file of requests. The same command continues an interrupted run.

    Exits with 0 if every line got an answer, 1 if some did not, 2 if it could not run.
    """
    more = *ray_settings(ray_address), *ledger_settings(ledger)
    config = configure(run_file, (*settings, *more), model)
    input_path = input_path or config.workload.input
    output_path = output_path or config.workload.output
    if not input_path or not output_path:
        missing = "input" if not input_path else "output"
        raise JaxinferError(
            f"no {missing}: give --{missing}, or workload.{missing} in the run file"
        )
    refuse("not for use with --json: the answers are in the output", {"--show": as_json and show})
    # With --json, notes go to stderr.
    console = Console(width=None if sys.stdout.isatty() else 100, stderr=as_json)
    with BatchJob.open(config, input_path, output_path, force, show) as job:
        if not job.num_lines:
            console.print(f"0 requests in {input_path}", soft_wrap=True)
        if job.num_resumed:
            console.print(f"continuing: {job.num_resumed} of {job.num_lines} lines are done")
        try:
            metrics = job.run()
        except Interrupted as ended:
            ended.add_note(f"{_done(job)}; the same command continues")
            raise
        except OnlyInstanceLost as error:
            raise OnlyInstanceLost(
                f"{error}: {_done(job)}; the same command continues (with restart, a group's "
                "process is started again during a run)"
            ) from None
        if as_json:
            _print_json(job, metrics)
        elif metrics:
            _print_run(console, job, metrics, is_cluster=len(config.instances) > 1)
        _print_results(console, job)
        if job.num_failed or job.lost:
            sys.exit(1)


def _done(job: BatchJob) -> str:
    return f"{job.num_lines - job.num_missing} of {job.num_lines} lines are done"


def _print_json(job: BatchJob, metrics: RunMetrics | None) -> None:
    counts = {"lines": job.num_lines, "resumed": job.num_resumed, "failed": job.num_failed}
    folder = job.newest_run() if metrics else None
    figures = {"results": job.results_file, "run_folder": folder, "metrics": metrics}
    print_json(counts | {"missing": job.num_missing} | figures)


def _print_run(console: Console, job: BatchJob, metrics: RunMetrics, is_cluster: bool) -> None:
    console.print(metrics_table(metrics))
    run_folder = job.newest_run()
    if is_cluster:
        _print_cluster(run_folder)
    _print_restarts(console, run_folder)
    _print_defaults(console, run_folder)
    files = ["run.json", "steps.jsonl", "requests.jsonl", LEDGER]
    found = [name for name in files if (run_folder / name).is_file()]
    said = f"{', '.join(found[:-1])} and {found[-1]}: {run_folder}"
    console.print(said, markup=False, soft_wrap=True)


def _print_results(console: Console, job: BatchJob) -> None:
    console.print(f"results: {job.results_file}", soft_wrap=True)
    for prompt, answer in job.answers():
        console.print()
        console.print(Text(prompt, style="bold"))
        console.print(Text(answer))
    if job.num_failed:
        console.print(
            f"{job.num_failed} of {job.num_lines} lines failed; the output has their errors"
        )
    if job.lost:
        console.print(
            f"{job.num_missing} of {job.num_lines} lines have no result; the same command adds "
            f"them: {job.lost}",
            markup=False,
            soft_wrap=True,
        )


def _print_restarts(console: Console, run_folder: Path) -> None:
    for restart in read_json(run_folder / "run.json")["restarts"]:
        ended = f"was restarted in {restart['seconds']:.1f} s"
        if error := restart["error"]:
            ended = f"could not be restarted: {error}"
        elif restart["without"]:
            ended = f"is no longer used by instance {restart['instances'][0]}"
        line = f"group {restart['group']}: {restart['why']}; it {ended}"
        console.print(line, markup=False, soft_wrap=True)


def _print_defaults(console: Console, run_folder: Path) -> None:
    if defaults := read_json(run_folder / "run.json").get("default_sampling"):
        said = ", ".join(f"{name} {value}" for name, value in defaults.items())
        console.print(
            f"default sampling options of generation_config.json: {said} "
            "(engine.generation_config: vllm turns them off)",
            markup=False,
            soft_wrap=True,
        )


def _print_cluster(run_folder: Path) -> None:
    from jaxinfer.report.comparison import comparison_table
    from jaxinfer.report.records import read_run

    run = read_run(run_folder)
    Console(width=None if sys.stdout.isatty() else 160).print(comparison_table({run.name: [run]}))
