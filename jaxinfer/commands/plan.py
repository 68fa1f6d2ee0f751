"""``jaxinfer plan``: the best placement for a goal."""

import json
import os
import sys

import click
from rich.console import Console

from jaxinfer.commands.common import cores, kept_results, with_pictures, with_ray, with_settings
from jaxinfer.errors import JaxinferError


@click.command()
@click.argument("plan_file")
@click.option("--out", required=True, help="Folder of the results; the same command goes on there.")
@click.option("--jobs", type=click.IntRange(min=1), help="Processes; by default all cores.")
@with_ray
@with_pictures
@click.option("--force", is_flag=True, help="Overwrite a run.yaml that is another than is found.")
@with_settings
def plan(
    plan_file: str,
    out: str,
    jobs: int | None,
    ray_address: str | None,
    pictures: str | None,
    force: bool,
    settings: tuple[str, ...],
) -> None:
    """Search for the best placement of a model, and write a run file of it.

    PLAN_FILE has a planner, a goal, and what the run files of all candidates have in common.
    """
    from jaxinfer.plan.problem import load_problem
    from jaxinfer.plan.registry import make_planner
    from jaxinfer.plan.result import draw, head, rows, value_in_words, write_run_file, write_table
    from jaxinfer.plan.run import choose
    from jaxinfer.plan.search import DrivenSearch
    from jaxinfer.plan.watch import SearchBar

    problem = load_problem(plan_file, settings)
    try:
        planner = make_planner(problem.planner)
        assert problem.targets  # Read before there is a folder.
    except JaxinferError as error:
        raise JaxinferError(f"plan file {plan_file}: {error}") from None
    text = json.dumps(problem.model_dump(mode="json"), indent=2)
    with kept_results(out, "plan.json", text, "evaluations.jsonl") as (folder, kept):
        with cores(ray_address, jobs) as (map_scores, _), SearchBar() as bar:
            search = DrivenSearch(problem, map_scores, kept, bar.update)
            try:
                choice = choose(planner, search)
            except JaxinferError as error:
                raise JaxinferError(f"plan file {plan_file}: {error}") from error
            finally:
                if search.tried:
                    write_table(folder / "plan.csv", rows(search))
        run_file = folder / "run.yaml"
        lines = head(search, choice, str(run_file))
        write_run_file(run_file, problem, choice.candidate, lines, force)
        draw(folder / f"rates.{pictures or 'png'}", search, choice.candidate)
    console = Console(width=None if sys.stdout.isatty() else 100)
    console.print(f"best: {choice.candidate}", soft_wrap=True)
    console.print(value_in_words(problem.goal, search.value(choice.score)), soft_wrap=True)
    for line in lines[2:]:
        console.print(line, soft_wrap=True)
    console.print(f"run file, all candidates and a picture: {folder}{os.sep}", soft_wrap=True)
