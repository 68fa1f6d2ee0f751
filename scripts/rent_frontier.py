"""Which GPUs a budget should rent: bounds of what the best groups of them carry, by dollars.

    python scripts/rent_frontier.py configs/plan/hexgen2.yaml --budgets 15,20,25,30

For a plan file of `planner: hexgen2`, whose hardware file's nodes have prices, which are those of
their GPUs. As if all that is rented were beside each other: a network only lowers it.
"""

from math import inf

import click
from results import show_table

from jaxinfer.errors import JaxinferError
from jaxinfer.plan.placement.certify import counts_by_kind
from jaxinfer.plan.placement.programs import best_mix, configurations
from jaxinfer.plan.planners.hexgen2 import HexGen2
from jaxinfer.plan.problem import load_problem
from jaxinfer.plan.registry import make_planner


@click.command()
@click.argument("plan_file")
@click.option("--budgets", required=True, help="Dollars per hour, with commas between.")
@click.option("--most", default=32, help="GPUs of a kind that there are to rent.")
def main(plan_file: str, budgets: str, most: int) -> None:
    """Print the frontier, and the GPUs of the file beside it."""
    problem = load_problem(plan_file)
    planner = make_planner(problem.planner)
    if not isinstance(planner, HexGen2):
        raise JaxinferError(f"{plan_file}: planner.name must be hexgen2")
    capacity = planner.capacity(problem)
    site, prices = capacity.site, capacity.site.usd_per_gpu
    if prices is None:
        raise JaxinferError(f"{plan_file}: a node of its hardware file has no usd_per_hour")
    there = counts_by_kind(site)
    kinds = range(len(there))
    nodes = [site.types[site.kind_of_type.index(kind)] for kind in kinds]
    usd, free = [prices[node] for node in nodes], [inf] * len(there)
    given = {name: value for name, value in problem.planner.items() if name != "name"}
    of_one = HexGen2.Options.model_validate(given).most_gpus
    options = configurations(capacity.as_local(), [most] * len(there), of_one)
    rows = []
    for budget in [float(text) for text in budgets.split(",")]:
        mix = best_mix(options, [most] * len(there), free, usd, budget)
        rows.append(("rented", mix))
    rows.append(("of the file", best_mix(options, there, free)))
    show_table(
        [
            {
                "GPUs": name,
                "$/h": round(sum(n * each for n, each in zip(mix.gpus, usd, strict=True)), 2),
                **{site.nodes[node].gpu: n for node, n in zip(nodes, mix.gpus, strict=True)},
                "requests/s": round(mix.flow, 3),
                "at most": round(mix.bound, 3),
            }
            for name, mix in rows
        ]
    )


if __name__ == "__main__":
    main()
