"""``jaxinfer validate``: measured points of real engines beside the simulator's."""

import json
import os
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console

from jaxinfer.commands.common import cores, counted, kept_results, with_pictures
from jaxinfer.config.run_file import apply_setting
from jaxinfer.errors import JaxinferError

if TYPE_CHECKING:
    from jaxinfer.plan.evaluation_cache import EvaluationCache
    from jaxinfer.validate.campaigns import Campaigns
    from jaxinfer.validate.points import Point, Use
    from jaxinfer.validate.table import Compared


@click.command()
@click.argument("points")
@click.option("--operators", required=True, help="Folder of measured operators.")
@click.option("--out", required=True, help="Folder of the results; the same command goes on there.")
@click.option("--campaigns", default="campaigns.yaml", help="How the points were measured.")
@click.option("--without", multiple=True, metavar="RULE", help="Leave a rule out; repeatable.")
@click.option("--jobs", type=click.IntRange(min=1), help="Processes; by default all cores.")
@with_pictures
@click.option(
    "--set",
    "settings",
    multiple=True,
    metavar="A.B=C",
    help="Override a value of all run files, e.g. simulate.sequence_s=2.0e-5; may be repeated.",
)
def validate(
    points: str,
    operators: str,
    out: str,
    campaigns: str,
    without: tuple[str, ...],
    jobs: int | None,
    pictures: str | None,
    settings: tuple[str, ...],
) -> None:
    """Simulate measured points of real engines, and say how far off the predictions are.

    POINTS is a CSV with aiconfigurator's columns.
    """
    from jaxinfer.files.contents import contents
    from jaxinfer.validate.campaigns import read_campaigns
    from jaxinfer.validate.pictures import draw
    from jaxinfer.validate.points import read_points, uses
    from jaxinfer.validate.table import show, summarise

    rules, given = read_campaigns(campaigns, without), read_points(Path(points))
    if not Path(operators).is_dir():
        raise JaxinferError(f"--operators {operators}: no such folder")
    files = contents({"trace": points, "folder": operators})
    asked = {"rules": rules.model_dump(mode="json"), "set": list(settings), "files": files}
    with kept_results(out, "validate.json", json.dumps(asked, indent=2), "found.jsonl") as (
        folder,
        kept,
    ):
        compared = _compare(given, uses(given), rules, operators, settings, kept, jobs)
        _write(folder, compared)
        summary = summarise(compared)
        text = json.dumps(summary | {"left_out": _left_out(compared)}, indent=2)
        (folder / "summary.json").write_text(text + "\n", encoding="utf-8")
        drawn = draw(folder, pictures or "png", compared)
    console = Console(width=None if sys.stdout.isatty() else 170)
    console.print(show(summary))
    for why, count in _left_out(compared).items():
        console.print(f"{counted(count, 'point')} left out: {why}", soft_wrap=True, markup=False)
    console.print(f"{counted(len(drawn), 'picture')} and points: {folder}{os.sep}", markup=False)


def _compare(
    points: "Sequence[Point]",
    found_uses: "Sequence[Use]",
    rules: "Campaigns",
    operators: str,
    settings: Sequence[str],
    kept: "EvaluationCache",
    jobs: int | None,
) -> "list[Compared]":
    """Simulate what is not there yet, the longest first."""
    from jaxinfer.plan.evaluation_cache import key_of
    from jaxinfer.plan.search_progress import Bar
    from jaxinfer.validate.predict import Asked, predict
    from jaxinfer.validate.table import Compared

    own = _settings(settings)
    wanted = [each for each, use in zip(points, found_uses, strict=True) if use.tpot]
    todo = sorted(
        (each for each in wanted if kept.get(key_of(dict(each.row))) is None),
        key=lambda each: -each.osl * each.concurrency,
    )
    if todo:
        at = nullcontext((map, 1)) if jobs == 1 else cores(None, jobs)
        with at as (map_points, _), Bar(len(todo)) as bar:
            found = map_points(predict, [Asked(rules, each, operators, own) for each in todo])
            for point, figures in zip(todo, found, strict=True):
                kept.add(key_of(dict(point.row)), figures)
                bar.advance(point.id)
    return [
        Compared(point, use, kept.get(key_of(dict(point.row))) if use.tpot else None)
        for point, use in zip(points, found_uses, strict=True)
    ]


def _settings(settings: Sequence[str]) -> dict[str, Any]:
    """Dotted keys and their values."""
    found = {}
    for setting in settings:
        data: dict[str, Any] = {}
        apply_setting(data, setting)
        key = setting.partition("=")[0]
        value: Any = data
        for name in key.split("."):
            value = value[name]
        found[key] = value
    return found


def _left_out(compared: "Sequence[Compared]") -> dict[str, int]:
    """Count the points without figures, or without a TTFT that counts, by the reason."""
    found: dict[str, int] = {}
    for each in compared:
        if why := each.row["why"]:
            found[why] = found.get(why, 0) + 1
    return found


def _write(folder: Path, compared: "Sequence[Compared]") -> None:
    from jaxinfer.plan.result import write_table

    write_table(folder / "points.csv", [each.row for each in compared])
