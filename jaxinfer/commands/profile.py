"""``jaxinfer profile``: what the steps of each instance take."""

import sys
from pathlib import Path

import click
from rich.console import Console

from jaxinfer.commands.common import configure, with_model, with_pictures, with_settings


@click.command()
@click.argument("run_file")
@with_model
@click.option("--out", required=True, help="New folder for the pictures.")
@with_pictures
@with_settings
def profile(
    run_file: str,
    model: str | None,
    out: str,
    pictures: str | None,
    settings: tuple[str, ...],
) -> None:
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

    config = configure(run_file, settings, model)
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
            draw_profile(name, *found[name], folder / f"{name}.{pictures or 'png'}")
    Console(width=None if sys.stdout.isatty() else 140).print(profile_table(found))
    Console().print(f"pictures: {folder}", soft_wrap=True)
