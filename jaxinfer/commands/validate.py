"""``jaxinfer validate``: measured points of real engines beside the simulator's."""

import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console

from jaxinfer.commands.common import cores, counted, kept_results, with_pictures
from jaxinfer.config.run_file import apply_setting
from jaxinfer.errors import JaxinferError

if TYPE_CHECKING:
    from jaxinfer.plan.evaluation_cache import EvaluationCache
    from jaxinfer.validate.campaigns import PointSetup
    from jaxinfer.validate.points import Point
    from jaxinfer.validate.table import Compared

# What keeps the figures of a folder.
FOUND = "found.jsonl"


@click.command()
@click.argument("points")
@click.option("--operators", help="Folder of measured operators.")
@click.option("--out", required=True, help="Folder of the results; the same command goes on there.")
@click.option("--run", "run_file", metavar="RUNFILE", help="Of the engine that wrote a log.")
@click.option("--campaigns", help="How the points were measured; by default campaigns.yaml.")
@click.option("--without", multiple=True, metavar="RULE", help="Leave a rule out; repeatable.")
@click.option("--known", metavar="FOLDER", help="Results whose run files are the same count, too.")
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
    operators: str | None,
    out: str,
    run_file: str | None,
    campaigns: str | None,
    without: tuple[str, ...],
    known: str | None,
    jobs: int | None,
    pictures: str | None,
    settings: tuple[str, ...],
) -> None:
    """Simulate measured points of real engines, and say how far off the predictions are.

    POINTS is a CSV with aiconfigurator's columns, or a log of vLLM's requests (.jsonl), which takes
    --run.
    """
    if points.endswith(".jsonl"):
        if unused := [
            name
            for name, value in (
                ("--campaigns", campaigns),
                ("--without", without),
                ("--known", known),
                ("--jobs", jobs),
            )
            if value
        ]:
            raise JaxinferError(f"{unused[0]} has no use beside a log of requests: leave it out")
        _validate_log(Path(points), run_file, operators, out, settings, pictures or "png")
        return
    if run_file:
        raise JaxinferError(f"--run has no use beside {points}: campaigns make its run files")
    if operators is None:
        raise JaxinferError("--operators is missing, must be the folder of measured operators")
    from jaxinfer.files.contents import contents
    from jaxinfer.plan.evaluation_cache import EvaluationCache
    from jaxinfer.validate.campaigns import launch, read_campaigns
    from jaxinfer.validate.pictures import draw
    from jaxinfer.validate.points import read_points
    from jaxinfer.validate.table import show, summarise

    rules = read_campaigns(campaigns or "campaigns.yaml", without)
    given = read_points(Path(points))
    others = EvaluationCache(Path(known) / FOUND) if known else None
    if not Path(operators).is_dir():
        raise JaxinferError(f"--operators {operators}: no such folder")
    tables, own = contents({"folder": operators}), _settings(settings)
    files = contents({"trace": points}) | tables
    asked = {"rules": rules.model_dump(mode="json"), "set": list(settings), "files": files}
    with kept_results(out, "validate.json", json.dumps(asked, indent=2), FOUND) as (folder, kept):
        compared = _compare(
            given,
            lambda point: launch(rules, point, operators, own),
            Known(kept, others, tables),
            jobs,
        )
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


def _validate_log(
    log: Path,
    run_file: str | None,
    operators: str | None,
    out: str,
    settings: Sequence[str],
    ending: str,
) -> None:
    """Simulate the requests of a log, and write and print both sides."""
    from jaxinfer.commands.common import own_folder
    from jaxinfer.config.run_file import load_run_file
    from jaxinfer.files.contents import contents
    from jaxinfer.plan.result import write_table
    from jaxinfer.validate.pictures import draw_requests
    from jaxinfer.validate.request_log import figures, read_requests, request_rows, simulated

    if run_file is None:
        raise JaxinferError("--run is missing, must be a run file of the engine that wrote the log")
    tables = [f"simulate.tables={operators}"] if operators else []
    real, config = read_requests(log), load_run_file(run_file, [*tables, *settings])
    files = contents({"trace": str(log), "run": run_file, "folder": operators or ""})
    asked = {"log": str(log), "run": run_file, "set": [*tables, *settings], "files": files}
    own_folder(Path(out), "validate.json", json.dumps(asked, indent=2))
    folder = Path(out)
    ours = simulated(config, real, folder).requests
    rows = request_rows(real, ours)
    write_table(folder / "points.csv", rows)
    found = figures(rows, real, ours)
    summary = {
        each.name: {"measured_s": each.measured, "simulated_s": each.simulated, "off": each.error}
        for each in found
    }
    text = json.dumps({"requests": len(rows)} | summary, indent=2)
    (folder / "summary.json").write_text(text + "\n", encoding="utf-8")
    draw_requests(folder / f"scatter-requests.{ending}", rows)
    for each in found:
        print(each.line)
    print(f"{counted(len(rows), 'request')}, picture and run: {folder}{os.sep}")


def _compare(
    points: "Sequence[Point]",
    make: "Callable[[Point], PointSetup]",
    kept: "Known",
    jobs: int | None,
) -> "list[Compared]":
    """Simulate what is not known yet, the longest first."""
    from jaxinfer.plan.search_progress import Bar
    from jaxinfer.validate.points import uses
    from jaxinfer.validate.predict import predict
    from jaxinfer.validate.table import Compared

    compared: list[Compared] = []
    todo: list[tuple[int, PointSetup]] = []
    for point, use in zip(points, uses(points), strict=True):
        found: Any = None
        if use.tpot:
            try:
                launch = make(point)
                found = kept.find(launch)
                if found is None:
                    todo.append((len(compared), launch))
            except JaxinferError as error:
                found = {"refused": str(error)}
        compared.append(Compared(point, use, found))
    todo.sort(key=lambda each: -points[each[0]].osl * points[each[0]].concurrency)
    if todo:
        at = nullcontext((map, 1)) if jobs == 1 else cores(None, jobs)
        with at as (map_points, _), Bar(len(todo)) as bar:
            launches = [launch for _, launch in todo]
            for (number, launch), found in zip(todo, map_points(predict, launches), strict=True):
                kept.add(launch, found)
                compared[number] = replace(compared[number], found=found)
                bar.advance(points[number].id)
    return compared


class Known:
    """Figures that are known, by run file and operators.

    Args:
        kept: of this folder; ``others``: of another one, if there is one.
        files: digests of what the run files name.
    """

    def __init__(
        self, kept: "EvaluationCache", others: "EvaluationCache | None", files: Mapping[str, str]
    ) -> None:
        self._kept, self._others, self._files = kept, others, files

    def find(self, launch: "PointSetup") -> Any:
        """A point's figures, or None."""
        key = self._key(launch)
        found = self._kept.get(key)
        return self._others.get(key) if found is None and self._others else found

    def add(self, launch: "PointSetup", found: Any) -> None:
        """Keep a point's figures."""
        self._kept.add(self._key(launch), found)

    def _key(self, launch: "PointSetup") -> str:
        from jaxinfer.plan.evaluation_cache import key_of

        return key_of(launch.data, launch.first_wave, self._files)


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
