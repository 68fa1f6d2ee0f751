"""``jaxinfer bench``: offline throughput of one model on one workload."""

import json
from dataclasses import asdict

import click
from rich.console import Console

from jaxinfer.commands.common import (
    configure,
    ledger_settings,
    new_file,
    say,
    with_force,
    with_ledger,
    with_limit,
    with_model,
    with_output,
    with_settings,
    with_workload,
    workload_settings,
)
from jaxinfer.commands.figures import print_json, with_json
from jaxinfer.report.table import metrics_table


@click.command()
@click.argument("run_file", required=False)
@with_model
@with_workload
@with_output
@with_limit
@click.option("--repeat", default=1, type=click.IntRange(min=1), help="Number of runs.")
@with_settings
@with_ledger
@with_force
@with_json
def bench(
    run_file: str | None,
    model: str | None,
    workload: str | None,
    output_path: str,
    limit: int | None,
    repeat: int,
    settings: tuple[str, ...],
    ledger: bool,
    force: bool,
    as_json: bool,
) -> None:
    """Measure the offline throughput of a model on a workload.

    Sampling is greedy, and EOS is ignored, so each request gets the workload's number of output
    tokens. All requests arrive at once, unless the run file has other arrivals. Times exclude
    loading and compilation. The output file holds a list with one entry per run.
    """
    from jaxinfer.lab.measure import measure
    from jaxinfer.llm import LLM

    more = *workload_settings(workload, limit), *ledger_settings(ledger)
    config = configure(run_file, (*settings, *more), model)
    out = new_file(output_path, force)
    work = config.requests(say)
    source = config.workload.source
    llm = LLM.from_config(config)
    console = Console()
    figures = []
    for _ in range(repeat):
        metrics = measure(llm, work, source, run_dir=f"{out}.runs")
        if not as_json:
            console.print(metrics_table(metrics))
        figures.append(llm.describe() | {"workload": source} | asdict(metrics))
    if as_json:
        print_json({"runs": figures})
    out.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
