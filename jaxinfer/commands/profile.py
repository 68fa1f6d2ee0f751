"""``jaxinfer profile``: measures the step times of each instance."""

import sys
from pathlib import Path

import click
from rich.console import Console

from jaxinfer.commands.common import (
    configure,
    refuse,
    with_model,
    with_pictures,
    with_settings,
)
from jaxinfer.commands.figures import print_json, with_json
from jaxinfer.config.run_file import RunFile
from jaxinfer.errors import JaxinferError


class Numbers(click.ParamType):  # type: ignore[type-arg]
    """Whole numbers from 1 on, separated by commas."""

    name = "numbers"

    def convert(
        self, value: str, param: click.Parameter | None, ctx: click.Context | None
    ) -> list[int]:
        """Return the numbers as a list."""
        parts = value.split(",")
        if not all(part.strip().isdecimal() and int(part) for part in parts):
            self.fail(f"{value!r} must be whole numbers from 1 on, such as 1,2", param, ctx)
        return [int(part) for part in parts]


@click.command()
@click.argument("run_file")
@with_model
@click.option("--out", required=True, help="New folder for pictures or tables.")
@click.option("--operators", is_flag=True, help="Measure the parts of steps, for simulate.tables.")
@click.option(
    "--tensor-parallel",
    type=Numbers(),
    help="With --operators: degrees, such as 1,2,4 (default: 1).",
)
@click.option(
    "--layers",
    type=Numbers(),
    help="With --operators: layers of the two models that are measured, such as 2,6 (default: a "
    "third of the layers, and all).",
)
@with_pictures
@with_settings
@with_json
def profile(
    run_file: str,
    model: str | None,
    out: str,
    operators: bool,
    tensor_parallel: list[int] | None,
    layers: list[int] | None,
    pictures: str | None,
    settings: tuple[str, ...],
    as_json: bool,
) -> None:
    """Measure the step times of each instance, and store them for later runs.

    The command also fits equations 2 and 3 of Cronus. Where KV heads are spread over several
    groups, it measures their attention too, and fits equations 3 and 4 of Hetis.

    With --operators, it measures layers, attention, head and host time of one instance instead,
    with random weights, and writes tables and run files for `jaxinfer simulate`.

    Run nothing else on the machine meanwhile.
    """
    config = configure(run_file, settings, model)
    if operators:
        from jaxinfer.lab.operators.tables import (
            operator_figures,
            profile_operators,
            show_operators,
        )

        refuse("for a profile of whole steps, not for --operators", {"--pictures": pictures})
        if layers is not None and len(layers) != 2:
            raise JaxinferError(f"--layers has {len(layers)} numbers, must have two, such as 2,6")
        depths = (layers[0], layers[1]) if layers else None
        degrees = sorted(set(tensor_parallel or [1]))
        found = profile_operators(config, degrees, depths, Path(out))
        if as_json:
            print_json(operator_figures(found))
        else:
            show_operators(found, out)
        return
    refuse("for --operators", {"--tensor-parallel": tensor_parallel, "--layers": layers})
    _profile_steps(config, Path(out), pictures or "png", as_json)


def _profile_steps(config: RunFile, folder: Path, pictures: str, as_json: bool) -> None:
    from jaxinfer.checkpoints.checkpoint import open_checkpoint
    from jaxinfer.report.comparison import new_folder
    from jaxinfer.report.profile_plot import (
        attention_table,
        draw_profile,
        profile_figures,
        profile_table,
    )
    from jaxinfer.report.progress import LoadProgress
    from jaxinfer.runtime.cluster import load_cluster
    from jaxinfer.runtime.profiling.profile import profile_engines, profile_name
    from jaxinfer.runtime.profiling.profile_attention import profile_attention
    from jaxinfer.steps.attention_profile import store_attention
    from jaxinfer.steps.profile import store_profile

    new_folder(folder)
    found, attention = {}, {}
    with LoadProgress(True) as bar:
        model, groups = config.require_model(), config.cluster()
        checkpoint = open_checkpoint(model, groups.load_format)
        cluster = load_cluster(checkpoint, groups, bar.update)
        files = {name: profile_name(each, model) for name, each in cluster.engines.items()}
        # Of equal instances, one is measured.
        one = {file: name for name, file in files.items()}
        engines = {name: (cluster.engines[name], model) for name in one.values()}
        measured = profile_engines(engines, bar.update)
        stored = {name: store_profile(profile) for name, profile in measured.items()}
        for name, file in files.items():
            found[name] = measured[one[file]], cluster.slowdowns(name)
            draw_profile(name, *found[name], folder / f"{name}.{pictures}")
        for name, instance in groups.instances.items():
            if instance.is_spread:
                engine = cluster.engines[name]
                attention[name] = profile_attention(name, engine, model, bar.update)
                store_attention(attention[name])
    if as_json:
        print_json(profile_figures(found, attention))
        return
    console = Console(width=None if sys.stdout.isatty() else 140)
    console.print(profile_table(found))
    if attention:
        console.print(attention_table(attention))
    for name, file in files.items():
        Console().print(f"profile of {name}: {stored[one[file]]}", soft_wrap=True)
    Console().print(f"pictures: {folder}", soft_wrap=True)
