"""``jaxinfer check replay``: repeats a real run in virtual time."""

import sys
from pathlib import Path

import click
from rich.console import Console

from jaxinfer.commands.common import new_results, with_pictures
from jaxinfer.commands.figures import print_json, with_json
from jaxinfer.commands.systems import write_systems


@click.command()
@click.argument("run_dir")
@click.option(
    "--out", required=True, help="New folder for tables, pictures and traces of both runs."
)
@with_pictures
@with_json
def replay(run_dir: str, out: str, pictures: str | None, as_json: bool) -> None:
    """Repeat a finished real run in the simulator, and compare the figures of both."""
    from jaxinfer.lab.validate.replay import fidelity, furthest_apart, overruns, replay
    from jaxinfer.report.summary import figures

    folder = Path(out)
    with new_results(folder):
        both = replay(Path(run_dir), folder / "runs")
    if not as_json:
        Console(width=None if sys.stdout.isatty() else 120).print(fidelity(*both))
        for hint in overruns(both[0]):
            Console().print(hint, soft_wrap=True, markup=False, highlight=False)
    written = write_systems({run.name: [run] for run in both}, folder, pictures)
    if as_json:
        sides = {run.name: figures(run) for run in both}
        print_json(sides | {"output_tokens_furthest_apart": furthest_apart(*both)})
    else:
        Console().print(written, soft_wrap=True)
