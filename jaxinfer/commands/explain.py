"""``jaxinfer explain``: shows how a model would be placed on its devices."""

import sys

import click
from rich.console import Console
from rich.text import Text

from jaxinfer.commands.common import configure, say, with_model, with_settings
from jaxinfer.commands.figures import print_json, with_json


@click.command()
@click.argument("run_file", required=False)
@with_model
@with_settings
@with_json
def explain(
    run_file: str | None, model: str | None, settings: tuple[str, ...], as_json: bool
) -> None:
    """Show how a model would be placed on its devices, and what its largest steps cost.

    No weights are loaded. The largest steps are compiled, which may take a minute.
    """
    from jaxinfer.checkpoints.checkpoint import open_checkpoint
    from jaxinfer.report.progress import LoadProgress
    from jaxinfer.runtime.explain import step_costs
    from jaxinfer.runtime.layout_table import plan_figures, plan_tables
    from jaxinfer.runtime.processes.gpu_shares import GpuShares, on_same_gpus
    from jaxinfer.runtime.stage.cluster_plan import plan_cluster

    config = configure(run_file, settings, model)
    cluster = config.cluster()
    checkpoint = open_checkpoint(config.require_model(), cluster.load_format)
    for name, group in cluster.groups.items():
        if group.environment:
            given = ", ".join(f"{key}={value}" for key, value in group.environment.items())
            say(
                f"group {name}: explain starts no process, so environment ({given}) has no effect: "
                "steps are compiled for the devices of this process"
            )
    for line in GpuShares(cluster).lines():
        say(line)
    planned = plan_cluster(checkpoint.config, on_same_gpus(cluster))
    plans = [(name, plan) for name, of_one in planned.items() for plan in of_one]
    costs = []
    with LoadProgress(True) as bar:
        part = "compiling the largest steps, to see what they cost"
        bar.update(part, len(plans))
        for _, plan in plans:
            costs.append(step_costs(plan))
            bar.update(part, len(plans) - len(costs))
    if as_json:
        stages = [
            {"instance": name if config.instances else None} | plan_figures(plan, cost)
            for (name, plan), cost in zip(plans, costs, strict=True)
        ]
        print_json({"stages": stages})
        return
    console = Console(width=None if sys.stdout.isatty() else 120)
    for (name, plan), cost in zip(plans, costs, strict=True):
        if config.instances:
            layers = f"layers {plan.layers.start} to {plan.layers.stop - 1}"
            console.print(Text(f"Instance {name}, {layers}", style="bold"))
        for table in plan_tables(plan, cost):
            console.print(table)
            console.print()
