"""``jaxinfer bench``: offline throughput of one model on one workload."""

import json
from dataclasses import asdict

import click
from rich.console import Console

from jaxinfer.commands.common import (
    at_once,
    configure,
    new_file,
    with_figures,
    with_force,
    with_limit,
    with_model,
    with_settings,
    with_workload,
)
from jaxinfer.report.table import metrics_table


@click.command()
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

    config = at_once(configure(run_file, settings, model), workload, limit)
    out = new_file(json_path, force)
    work = config.workload.requests()
    llm = LLM.from_config(config)
    console = Console()
    figures = []
    for _ in range(repeat):
        metrics = measure(llm, work, workload, run_dir=f"{out}.runs")
        console.print(metrics_table(metrics))
        figures.append(llm.describe() | {"workload": workload} | asdict(metrics))
    out.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
