"""``jaxinfer plan``: searches for the best placement."""

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console

from jaxinfer.commands.common import (
    cores,
    kept_results,
    settings_of,
    with_pictures,
    with_ray,
)
from jaxinfer.commands.figures import print_json, with_json
from jaxinfer.errors import JaxinferError

if TYPE_CHECKING:
    from jaxinfer.files.kept import KeptResults
    from jaxinfer.lab.plan.candidate import Planner
    from jaxinfer.lab.plan.problem import Problem

# Number of candidates in the printed table; ``plan.csv`` has all.
SHOWN = 8


@click.command()
@click.argument("plan_file")
@click.option("--out", required=True, help="Folder for results; a killed search continues there.")
@click.option(
    "--jobs", type=click.IntRange(min=1), help="Number of processes (default: one per core)."
)
@with_ray
@with_pictures
@click.option("--force", is_flag=True, help="Overwrite run files that you have edited.")
@settings_of("plan", "goal.seeds=3")
@with_json
def plan(
    plan_file: str,
    out: str,
    jobs: int | None,
    ray_address: str | None,
    pictures: str | None,
    force: bool,
    settings: tuple[str, ...],
    as_json: bool,
) -> None:
    """Search for the best placement of a model, and write it as a run file.

    PLAN_FILE names a planner, a goal, and the options that all candidates share. With a section
    `replan`, the command plans again whenever the load shifts, and compares the result with one
    fixed plan.
    """
    from jaxinfer.lab.plan.problem import load_problem
    from jaxinfer.lab.plan.registry import make_planner
    from jaxinfer.lab.plan.replan.replan import beside, windows_of

    problem = load_problem(plan_file, settings)
    try:
        planner = make_planner(problem.planner)
        assert problem.targets  # It is read before the folder is made.
        if problem.replan:
            windows_of(problem)
            beside(problem)
    except JaxinferError as error:
        raise JaxinferError(f"plan file {plan_file}: {error}") from None
    text = json.dumps(problem.model_dump(mode="json"), indent=2)
    kind = pictures or "png"
    with (
        kept_results(out, "plan.json", text, "evaluations.jsonl") as (folder, kept),
        cores(ray_address, jobs) as (map_calls, _),
    ):
        try:
            if problem.replan:
                figures, lines = _follow(problem, folder, kept, map_calls, kind, force)
            else:
                figures, lines = _search(problem, planner, folder, kept, map_calls, kind, force)
        except JaxinferError as error:
            raise JaxinferError(f"plan file {plan_file}: {error}") from error
    if as_json:
        print_json(figures)
        return
    console = Console(width=None if sys.stdout.isatty() else 100)
    for line in lines:
        console.print(line, soft_wrap=True, markup=False)


def _search(
    problem: "Problem",
    planner: "Planner",
    folder: Path,
    kept: "KeptResults",
    map_calls: Any,
    kind: str,
    force: bool,
) -> tuple[dict[str, Any], list[Any]]:
    """Search and write; returns the figures, and what the terminal shows."""
    from jaxinfer.lab.plan.choose import choose
    from jaxinfer.lab.plan.pictures import draw_latencies, draw_rates
    from jaxinfer.lab.plan.result import (
        best_few,
        head,
        refusals,
        rows,
        value_in_words,
        write_run_file,
        write_table,
    )
    from jaxinfer.lab.plan.search import DrivenSearch
    from jaxinfer.lab.plan.search_progress import SearchProgress

    with SearchProgress() as bar:
        search = DrivenSearch(problem, map_calls, kept, bar)
        try:
            choice = choose(planner, search)
        finally:
            if search.tried:
                write_table(folder / "plan.csv", rows(search))
    run_file = folder / "run.yaml"
    lines = head(search, choice, str(run_file))
    write_run_file(run_file, problem, choice.candidate, lines, force)
    draw_rates(folder / f"rates.{kind}", search, choice.candidate)
    draw_latencies(folder / f"latencies.{kind}", search, choice.candidate)
    refused = refusals(search)
    candidates = rows(search)
    best = list(search.tried).index(choice.candidate.key)
    figures = {
        "run_file": run_file,
        "best": candidates[best],
        "fresh_requests_s": choice.fresh,
        "interval_95": choice.interval and choice.interval[1:],
        "candidates": candidates,
    }
    return figures, [
        best_few(search, max(SHOWN, problem.goal.top)),
        "<: misses the targets at this rate; *: on the Pareto front of rate and cost.",
        *([refused] if refused else []),
        f"best: {choice.candidate}",
        value_in_words(problem.goal, search.value(choice.score)),
        *lines[2:],
        f"run file, all candidates and pictures: {folder}{os.sep}",
    ]


def _follow(
    problem: "Problem",
    folder: Path,
    kept: "KeptResults",
    map_calls: Any,
    kind: str,
    force: bool,
) -> tuple[dict[str, Any], list[Any]]:
    """Plan as the load shifts and write; returns the figures, and what the terminal shows."""
    from jaxinfer.lab.plan.replan.replan import follow
    from jaxinfer.lab.plan.replan.result import rows as replan_rows
    from jaxinfer.lab.plan.replan.result import table, window_rows, write
    from jaxinfer.lab.plan.search import DrivenSearch
    from jaxinfer.lab.plan.search_progress import SearchProgress

    with SearchProgress() as bar:

        def new_search(part: "Problem") -> DrivenSearch:
            return DrivenSearch(part, map_calls, kept, bar)

        followed = follow(problem, new_search, map_calls)
    write(folder, problem, followed, kind, force)
    figures = {"ways": replan_rows(followed.served), "windows": window_rows(followed)}
    return figures, [
        table(followed.served),
        *followed.warnings,
        f"tables, run files and a picture: {folder}{os.sep}",
    ]
