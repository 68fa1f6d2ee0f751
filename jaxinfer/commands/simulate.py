"""``jaxinfer simulate``: a workload on a modelled cluster, in virtual time."""

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.console import Console

from jaxinfer.commands.common import (
    ledger_settings,
    refuse,
    say,
    with_ledger,
    with_limit,
    with_pictures,
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
    with_bound,
)
from jaxinfer.config.run_file import RunFile

if TYPE_CHECKING:
    from jaxinfer.report.metrics import RunMetrics


@click.command()
@click.argument("run_file")
@with_workload
@with_limit
@click.option(
    "--out",
    help="New folder for tables, pictures and traces; without it, figures are only printed.",
)
@with_pictures
@with_bound
@with_settings
@with_ledger
@with_json
def simulate(
    run_file: str,
    workload: str | None,
    limit: int | None,
    out: str | None,
    pictures: str | None,
    bound: bool,
    settings: tuple[str, ...],
    ledger: bool,
    as_json: bool,
) -> None:
    """Simulate a modelled cluster that serves a workload.

    The run file's groups name GPUs by their kind.
    """
    changes = [*settings, *workload_settings(workload, limit), *ledger_settings(ledger)]
    from jaxinfer.lab.compare import load_systems
    from jaxinfer.simulate.run import simulate

    if not out:
        refuse("for --out FOLDER, where pictures are drawn", {"--pictures": pictures})
        refuse("for --out FOLDER, where the ledger is kept", {"--ledger": ledger})
    ((name, config),) = load_systems([run_file], [], changes).items()
    work = config.requests(say)
    # Before the run: a cluster without a bound is refused at once.
    most = bound_rate(config, work) if bound else None
    if out:
        runs = run_systems({name: config}, work, Path(out), rounds=0)
        figures, rate = dict(runs[name][0].run["metrics"]), runs[name][0].rate
        show_and_write(runs, Path(out), pictures, as_json)
    else:
        found = simulate(config, work)
        figures, rate = asdict(found), found.requests / found.wall_s
        if not as_json:
            _print_figures(config, found)
    if as_json:
        print_json(figures | ({"bound_requests_s": most} if bound else {}))
    elif most is not None:
        print_share(most, rate)


def _print_figures(config: RunFile, found: "RunMetrics") -> None:
    """Print the figures of a run that is not saved."""
    from jaxinfer.report.table import beyond_measured, metrics_table

    console = Console()
    console.print(metrics_table(found))
    if config.workload.arrivals.kind == "at_once" and found.requests > 1:
        console.print(
            "all requests arrive at once, so TTFT includes queueing: workload.arrivals sets other "
            "arrivals",
            soft_wrap=True,
            highlight=False,
        )
    if warning := beyond_measured(found.beyond):
        console.print(warning, soft_wrap=True, highlight=False)
    for line in _prices(found):
        console.print(line, highlight=False)
    console.print(f"{found.steps:,} steps simulated in {found.loop_s:.1f} s", highlight=False)


def _prices(found: "RunMetrics") -> Iterator[str]:
    """Yield the lines on price and energy, as far as they are known."""
    if found.usd_per_request is not None:
        usd = found.usd_per_request * found.requests
        yield (
            f"${usd * 3600 / found.wall_s:.2f} per hour: ${1000 * found.usd_per_request:.3g} per "
            f"1,000 requests, ${found.usd_per_million_output_tokens:.3g} per million output tokens"
        )
    if found.wh_per_request is not None and found.wh_per_million_output_tokens is not None:
        yield (
            f"at the GPUs' power limits: {found.wh_per_request:.3g} Wh per request, "
            f"{found.wh_per_million_output_tokens / 1000:.3g} kWh per million output tokens"
        )
