"""Find the GPUs that a budget should rent: upper bounds on their requests per second, by dollars.

    python -m scripts.reproduce.hexgen2.frontier configs/plan/hexgen2.yaml --budgets 15,20,25,30 \
        [--hardware configs/clusters/hexgen2_heterogeneous_5.yaml] [--out DIR]

The plan file must have `planner: hexgen2`, and the nodes of its hardware file must have prices. The
price of a GPU is that of its node; of several prices for a kind, the lowest counts. The bound
assumes that all rented GPUs are in one node, because a network only lowers the rate. Each hardware
file adds a point: the bound for its own GPUs, and the planned rate on their nodes and network.
"""

from collections.abc import Sequence
from math import inf
from pathlib import Path

import click
from matplotlib.figure import Figure

from jaxinfer.errors import JaxinferError
from jaxinfer.lab.plan.problem import Problem, load_problem
from jaxinfer.lab.plan.registry import make_planner
from jaxinfer.papers.hexgen2.capacity import Modelled
from jaxinfer.papers.hexgen2.certify import counts_by_kind
from jaxinfer.papers.hexgen2.integer_programs import PooledPlan, best_mix, configurations
from jaxinfer.papers.hexgen2.planner import HexGen2Planner
from jaxinfer.report.pictures import save_picture
from jaxinfer.report.plots import COLOURS
from scripts.tables import Row, show_table, write_csv

_LAST = ("requests/s", "at most", "planned")


def frontier(
    plan_file: str, budgets: Sequence[float], most: int, settings: Sequence[str] = ()
) -> list[Row]:
    """Return a row for each budget, and one for the GPUs of the file.

    Args:
        most: largest number of GPUs of a kind to rent.

    Raises:
        JaxinferError: it is no plan file of this planner, or lacks a price.
    """
    asked = FrontierPlan(plan_file, settings)
    usd = asked.usd
    to_rent, free = [most] * len(usd), [inf] * len(usd)
    options = configurations(asked.capacity.as_local(), to_rent, asked.most_gpus)
    mixes = [best_mix(options, to_rent, free, usd, budget) for budget in budgets]
    return [*(asked.row("rented", mix) for mix in mixes), asked.row("of the file", asked.mix())]


def points(plan_file: str, hardware: Sequence[str]) -> list[Row]:
    """Return a row for each hardware file, with the planned rate on its network.

    Raises:
        JaxinferError: see ``frontier``; or the model fits on none of its groups.
    """
    rows = []
    for path in hardware:
        asked = FrontierPlan(plan_file, [f"run.simulate.hardware={path}"])
        planned = asked.planner.certified(asked.problem).flow.total
        rows.append(asked.row(Path(path).stem, asked.mix()) | {"planned": round(planned, 3)})
    return rows


class FrontierPlan:
    """A plan file's planner, and its GPUs.

    Raises:
        JaxinferError: it is no plan file of this planner, or lacks a price.
    """

    def __init__(self, plan_file: str, settings: Sequence[str]) -> None:
        self.problem: Problem = load_problem(plan_file, settings)
        planner = make_planner(self.problem.planner)
        if not isinstance(planner, HexGen2Planner):
            raise JaxinferError(f"{plan_file}: planner.name must be hexgen2")
        self.planner: HexGen2Planner = planner
        self.capacity: Modelled = planner.capacity(self.problem)
        given = {name: value for name, value in self.problem.planner.items() if name != "name"}
        self.most_gpus: int = HexGen2Planner.Options.model_validate(given).most_gpus
        try:
            self.usd: Sequence[float] = self.capacity.site.usd_by_kind
        except JaxinferError as error:
            raise JaxinferError(f"{plan_file}: {error}") from None

    def mix(self) -> PooledPlan:
        """Return the best mix of all its GPUs, as if they were in one node."""
        there = counts_by_kind(self.capacity.site)
        options = configurations(self.capacity.as_local(), there, self.most_gpus)
        return best_mix(options, there, [inf] * len(there))

    def row(self, name: str, mix: PooledPlan) -> Row:
        """Return a row: GPUs, their cost, and their requests per second."""
        site = self.capacity.site
        kinds = range(len(self.usd))
        names = [site.nodes[site.types[site.kind_of_type.index(kind)]].gpu for kind in kinds]
        return {
            "GPUs": name,
            "$/h": round(sum(n * each for n, each in zip(mix.gpus, self.usd, strict=True)), 2),
            **dict(zip(names, mix.gpus, strict=True)),
            "requests/s": round(mix.flow, 3),
            "at most": round(mix.bound, 3),
        }


def together(rented: Sequence[Row], files: Sequence[Row]) -> list[Row]:
    """Join both tables; a missing kind of GPU counts as 0, and rented GPUs have no planned rate."""
    columns = [name for name in rented[0] if name not in ("requests/s", "at most")]
    columns += [name for row in files for name in row if name not in (*columns, *_LAST)]
    return [
        {name: row.get(name, 0) for name in columns} | {name: row.get(name, "") for name in _LAST}
        for row in (*rented, *files)
    ]


def draw(rows: Sequence[Row]) -> Figure:
    """Draw the frontier, and the files below it."""
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    ax = figure.subplots()
    rented = [row for row in rows if row["GPUs"] == "rented"]
    ax.plot(
        [row["$/h"] for row in rented],
        [row["requests/s"] for row in rented],
        "o-",
        color=COLOURS[0],
        label="rented for a budget",
    )
    files = [row for row in rows if row["planned"] != ""]
    for number, (what, label) in enumerate(
        {
            "requests/s": "a file's GPUs, beside each other",
            "planned": "the same on their network",
        }.items(),
        1,
    ):
        ax.plot(
            [row["$/h"] for row in files],
            [row[what] for row in files],
            "sv"[number - 1],
            color=COLOURS[number],
            label=label,
        )
    for place, row in enumerate(sorted(files, key=lambda row: float(row["$/h"]))):
        # Labels of files with nearly the same price are above and below their marks in turn.
        up = place % 2 == 0
        top = max(float(row["planned"]), float(row["requests/s"]))
        ax.annotate(
            row["GPUs"].split("_")[-1],
            (row["$/h"], top if up else row["planned"]),
            fontsize=8,
            xytext=(0, 5 if up else -5),
            textcoords="offset points",
            ha="center",
            va="bottom" if up else "top",
        )
    ax.set_xlabel("dollars per hour")
    ax.set_ylabel("requests/s")
    ax.set_ylim(bottom=0)
    ax.grid(alpha=0.3)
    ax.legend(fontsize=8, loc="upper left")
    return figure


@click.command()
@click.argument("plan_file")
@click.option("--budgets", required=True, help="Dollars per hour, with commas between.")
@click.option("--most", default=32, help="GPUs of a kind that there are to rent.")
@click.option("--hardware", multiple=True, help="Hardware files, as points beside the frontier.")
@click.option("--out", type=click.Path(path_type=Path), help="For frontier.csv and frontier.png.")
def main(
    plan_file: str, budgets: str, most: int, hardware: Sequence[str], out: Path | None
) -> None:
    """Print the frontier, and the points of the hardware files."""
    rented = frontier(plan_file, [float(text) for text in budgets.split(",")], most)
    rows = together(rented, points(plan_file, hardware))
    show_table(rows)
    if out:
        out.mkdir(parents=True, exist_ok=True)
        write_csv(out / "frontier.csv", rows)
        save_picture(draw(rows), out / "frontier.png")


if __name__ == "__main__":
    main()
