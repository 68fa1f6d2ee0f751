"""Which GPUs a budget should rent: bounds of what the best groups of them carry, by dollars.

    python scripts/rent_frontier.py configs/plan/hexgen2.yaml --budgets 15,20,25,30

For a plan file of `planner: hexgen2`, whose hardware file's nodes have prices, which are those of
their GPUs: of a kind with several prices, the lowest. As if all that is rented were beside each
other: a network only lowers it.
"""

from collections.abc import Sequence
from math import inf
from typing import Any

import click
from results import show_table

from jaxinfer.errors import JaxinferError
from jaxinfer.plan.placement.certify import counts_by_kind
from jaxinfer.plan.placement.programs import best_mix, configurations
from jaxinfer.plan.planners.hexgen2 import HexGen2
from jaxinfer.plan.problem import load_problem
from jaxinfer.plan.registry import make_planner


def frontier(
    plan_file: str, budgets: Sequence[float], most: int, settings: Sequence[str] = ()
) -> list[dict[str, Any]]:
    """A row for each budget, and one for the GPUs of the file.

    Args:
        most: GPUs of a kind that there are to rent.

    Raises:
        JaxinferError: it is no plan file of this planner, or lacks a price.
    """
    problem = load_problem(plan_file, settings)
    planner = make_planner(problem.planner)
    if not isinstance(planner, HexGen2):
        raise JaxinferError(f"{plan_file}: planner.name must be hexgen2")
    capacity = planner.capacity(problem)
    site = capacity.site
    try:
        usd = site.usd_by_kind
    except JaxinferError as error:
        raise JaxinferError(f"{plan_file}: {error}") from None
    there, free = counts_by_kind(site), [inf] * len(usd)
    names = [site.nodes[site.types[site.kind_of_type.index(n)]].gpu for n in range(len(usd))]
    given = {name: value for name, value in problem.planner.items() if name != "name"}
    of_one = HexGen2.Options.model_validate(given).most_gpus
    to_rent = [most] * len(usd)
    options = configurations(capacity.as_local(), to_rent, of_one)
    mixes = [("rented", best_mix(options, to_rent, free, usd, budget)) for budget in budgets]
    mixes.append(("of the file", best_mix(options, there, free)))
    return [
        {
            "GPUs": name,
            "$/h": round(sum(n * each for n, each in zip(mix.gpus, usd, strict=True)), 2),
            **dict(zip(names, mix.gpus, strict=True)),
            "requests/s": round(mix.flow, 3),
            "at most": round(mix.bound, 3),
        }
        for name, mix in mixes
    ]


@click.command()
@click.argument("plan_file")
@click.option("--budgets", required=True, help="Dollars per hour, with commas between.")
@click.option("--most", default=32, help="GPUs of a kind that there are to rent.")
def main(plan_file: str, budgets: str, most: int) -> None:
    """Print the frontier, and the GPUs of the file beside it."""
    show_table(frontier(plan_file, [float(text) for text in budgets.split(",")], most))


if __name__ == "__main__":
    main()
