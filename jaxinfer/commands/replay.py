"""``jaxinfer replay``: a real run once more, in virtual time."""

import sys
from pathlib import Path

import click
from rich.console import Console

from jaxinfer.commands.common import new_results, refuse, with_pictures
from jaxinfer.commands.figures import print_json, with_json
from jaxinfer.commands.systems import write_systems
from jaxinfer.errors import JaxinferError


@click.command()
@click.argument("run_dir")
@click.option("--check", is_flag=True, help="Check that the simulator makes the same decisions.")
@click.option("--out", help="New folder for tables, pictures and traces of both runs.")
@with_pictures
@with_json
def replay(run_dir: str, check: bool, out: str | None, pictures: str | None, as_json: bool) -> None:
    """Repeat a finished real run in the simulator.

    With --check, the run must have a ledger (see --ledger of the other commands). The simulator
    gets the events of the run at their recorded times, and must make the same decisions. If it
    does not, the command prints the first difference and exits with 1.
    """
    if check:
        refuse("for a replay without --check", {"--out": out, "--pictures": pictures})
        _check(run_dir, as_json)
    elif out:
        _replay(Path(run_dir), Path(out), pictures, as_json)
    else:
        raise JaxinferError("give --out FOLDER, or --check")


def _check(run_dir: str, as_json: bool) -> None:
    from jaxinfer.lab.validate.same_decisions import check_decisions

    found = check_decisions(Path(run_dir))
    if as_json:
        print_json({"same": not found.difference} | found._asdict())
        sys.exit(bool(found.difference))
    if found.difference:
        click.echo(f"{run_dir}: the simulator decides differently: {found.difference}")
        sys.exit(1)
    said = (
        f"{run_dir}: run and simulator have the same {found.entries:,} entries, hash {found.hash}"
    )
    click.echo(said if found.finished else f"{said}; the run had not finished")


def _replay(real: Path, out: Path, pictures: str | None, as_json: bool) -> None:
    from jaxinfer.lab.validate.replay import fidelity, furthest_apart, overruns, replay
    from jaxinfer.report.summary import figures

    with new_results(out):
        both = replay(real, out / "runs")
    if not as_json:
        Console(width=None if sys.stdout.isatty() else 120).print(fidelity(*both))
        for hint in overruns(both[0]):
            Console().print(hint, soft_wrap=True, markup=False, highlight=False)
    written = write_systems({run.name: [run] for run in both}, out, pictures)
    if as_json:
        sides = {run.name: figures(run) for run in both}
        print_json(sides | {"output_tokens_furthest_apart": furthest_apart(*both)})
    else:
        Console().print(written, soft_wrap=True)
