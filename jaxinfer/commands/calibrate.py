"""``jaxinfer calibrate``: a modelled GPU's efficiencies from measured steps."""

import sys

import click
from rich.console import Console

from jaxinfer.commands.common import with_settings
from jaxinfer.commands.figures import print_json, with_json
from jaxinfer.config.run_file import load_run_file


@click.command()
@click.argument("run_file")
@click.option("--group", required=True, help="Group of the run file whose GPU is calibrated.")
@click.option("--points", required=True, help="CSV file of measured steps.")
@with_settings
@with_json
def calibrate(
    run_file: str, group: str, points: str, settings: tuple[str, ...], as_json: bool
) -> None:
    """Fit the efficiencies of a modelled GPU to measured steps.

    Prints the section `simulate` for the run file.
    """
    from jaxinfer.lab.validate.calibrate import as_yaml, calibrate_group

    config = load_run_file(run_file, settings)
    found, table = calibrate_group(config, group, points)
    if as_json:
        print_json(found)
        return
    Console(width=None if sys.stdout.isatty() else 120).print(table)
    Console().print(
        as_yaml(group, found, config.simulate), soft_wrap=True, markup=False, highlight=False
    )
