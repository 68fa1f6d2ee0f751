"""``jaxinfer check decisions``: compares the simulator's decisions with those of a real run."""

import sys
from pathlib import Path

import click

from jaxinfer.commands.figures import print_json, with_json


@click.command()
@click.argument("run_dir")
@with_json
def decisions(run_dir: str, as_json: bool) -> None:
    """Check that the simulator makes the same decisions as a finished real run.

    The run must have a ledger (see --ledger of `jaxinfer run`). The simulator gets the events of
    the run at their recorded times. If it decides differently, the command prints the first
    difference and exits with 1.
    """
    from jaxinfer.lab.validate.same_decisions import check_decisions

    found = check_decisions(Path(run_dir))
    if as_json:
        print_json({"same": not found.difference} | found._asdict())
    elif found.difference:
        click.echo(f"{run_dir}: the simulator decides differently: {found.difference}")
    else:
        same = f"the same {found.entries:,} entries, hash {found.hash}"
        unfinished = "" if found.finished else "; the run had not finished"
        click.echo(f"{run_dir}: run and simulator have {same}{unfinished}")
    if found.difference:
        sys.exit(1)
