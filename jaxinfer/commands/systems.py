"""Runs or simulates several systems for ``compare``, and prints and writes the results."""

import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from jaxinfer.commands.common import new_results
from jaxinfer.config.run_file import RunFile
from jaxinfer.errors import JaxinferError, raised
from jaxinfer.report.records import RunRecord
from jaxinfer.workload.lengths import BenchRequest

Runs = Mapping[str, Sequence[RunRecord]]


def run_systems(
    configs: Mapping[str, RunFile],
    work: Sequence[BenchRequest],
    out: Path,
    rounds: int,
    one_by_one: bool = False,
) -> Runs:
    """Run systems in turn, with results in a new folder; with 0 rounds, simulate them."""
    from jaxinfer.lab.compare import compare_systems, simulate_systems

    with new_results(out, is_kept=_has_finished_run if rounds else lambda _: False):
        if rounds:
            return compare_systems(configs, work, out, rounds, one_by_one=one_by_one)
        return simulate_systems(configs, work, out)


def _has_finished_run(out: Path) -> bool:
    """Tell whether ``out`` has a finished run, which has used a device for some time."""
    files = out.glob("runs/*/*/run.json")
    return any('"status": "finished"' in file.read_text(encoding="utf-8") for file in files)


def systems_json(runs: Runs, bounds: Mapping[str, float]) -> dict[str, Any]:
    """Return the figures and bounds of all systems, in the form of ``compare.json``."""
    from jaxinfer.report.comparison import document

    found = document(runs, command_line())
    for name, bound in bounds.items():
        found["systems"][name]["bound_requests_s"] = bound
    return found


def print_systems(runs: Runs) -> None:
    """Print a table of the systems, and name those whose steps exceeded the measured range."""
    from jaxinfer.report.comparison import comparison_table
    from jaxinfer.report.table import beyond_measured

    console = Console(width=None if sys.stdout.isatty() else 160)
    console.print(comparison_table(runs))
    for name, (first, *_) in runs.items():
        if warning := beyond_measured(first.run["metrics"].get("beyond", {})):
            console.print(f"{name}: {warning}", soft_wrap=True, highlight=False)


def show_and_write(runs: Runs, out: Path, pictures: str | None, as_json: bool) -> None:
    """Print the table of systems, unless JSON is requested, and write their files."""
    if not as_json:
        print_systems(runs)
    written = write_systems(runs, out, pictures)
    if not as_json:
        Console().print(written, soft_wrap=True)


def write_systems(runs: Runs, out: Path, pictures: str | None) -> str:
    """Write tables, pictures and traces next to the runs, and return their paths.

    Args:
        pictures: format of pictures; by default png.

    Raises:
        JaxinferError: some of them could not be made; finished runs stay.
    """
    from jaxinfer.report.comparison import write_comparison

    try:
        written = write_comparison(runs, out, command_line(), pictures or "png")
    except OSError:
        raise  # For example a full disk; the error names its file.
    except Exception as error:
        raise JaxinferError(
            f"{out}: all runs are there, under runs, but not all of their tables and pictures: "
            f"{raised(error)}"
        ) from error
    return f"tables, pictures and traces: {written[0]}"


def command_line() -> str:
    """Return the command line of the command that is running."""
    return shlex.join(["jaxinfer", *sys.argv[1:]])


def with_bound(command: Callable[..., None]) -> Callable[..., None]:
    """Add the option ``--bound`` to a command, which passes the bound to ``print_share``."""
    return click.option(
        "--bound", is_flag=True, help="Also print an upper bound on the rate of any system."
    )(command)


def bound_rate(config: RunFile, work: Sequence[BenchRequest]) -> float:
    """Return an upper bound on the requests per second of any system on the cluster.

    Raises:
        JaxinferError: the cluster has no bound.
    """
    from jaxinfer.lab.plan.bound import bound_of
    from jaxinfer.simulate.run import prepare

    return bound_of(prepare(config), work).rate


def print_share(bound: float, rate: float, name: str = "") -> None:
    """Print a rate in requests per second, and its share of the upper bound for any system."""
    what = f"{rate / bound:.3f} of {bound:.3g}, the upper bound for any system on this cluster"
    if rate > bound:
        what = f"above {bound:.3g}, the upper bound for a sustained rate: use more requests"
    Console().print(
        f"{name}{': ' if name else ''}{rate:.3g} requests/s, {what}",
        soft_wrap=True,
        highlight=False,
    )
