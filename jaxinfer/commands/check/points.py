"""``jaxinfer check points``: compare measured points of real engines with the simulator's."""

import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console

from jaxinfer.commands.check.experiments import ABOUT, validate_experiments
from jaxinfer.commands.common import (
    cores,
    counted,
    kept_results,
    left_as_found,
    own_folder,
    say,
    with_pictures,
)
from jaxinfer.commands.figures import print_json, with_json
from jaxinfer.config.run_file import apply_setting
from jaxinfer.errors import JaxinferError
from jaxinfer.files.shipped import OPERATORS_NAME, data_path

if TYPE_CHECKING:
    from jaxinfer.files.kept import KeptResults
    from jaxinfer.lab.validate.campaigns import PointSetup
    from jaxinfer.lab.validate.points import Point
    from jaxinfer.lab.validate.table import Compared

# The file that keeps the figures of a folder.
FOUND = "found.jsonl"


@click.command()
@click.argument("points", metavar="POINTS")
@click.option("--operators", help="Folder of measured operator times, such as configs/operators.")
@click.option("--out", required=True, help="Folder for results; a killed run continues there.")
@click.option(
    "--run", "run_file", metavar="RUNFILE", help="Run file of the engine that wrote the log."
)
@click.option(
    "--campaigns",
    help="File on how points were measured (default: campaigns.yaml, or experiments.yaml).",
)
@click.option("--without", multiple=True, metavar="RULE", help="Leave a rule out; may be repeated.")
@click.option(
    "--known",
    metavar="FOLDER",
    help="Reuse results from this folder where run files are identical.",
)
@click.option(
    "--jobs", type=click.IntRange(min=1), help="Number of processes (default: one per core)."
)
@with_pictures
@click.option(
    "--set",
    "settings",
    multiple=True,
    metavar="A.B=C",
    help="Override a value of every run file, e.g. simulate.sequence_s=2.0e-5; may be repeated.",
)
@with_json
def points(
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
    as_json: bool,
) -> None:
    """Simulate points measured on real engines, and report the errors of the predictions.

    POINTS is a CSV file with aiconfigurator's columns, a CSV file of experiments with several load
    stages, or a log of vLLM's requests (.jsonl). A log needs --run.
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
            raise JaxinferError(f"{unused[0]} has no effect on a log of requests: leave it out")
        _validate_log(Path(points), run_file, operators, out, settings, pictures or "png", as_json)
        return
    if run_file:
        raise JaxinferError(
            f"--run is only for a log (.jsonl); run files for {points} come from --campaigns"
        )
    folder_of_tables = _tables_folder(operators)
    from jaxinfer.lab.validate.experiments import is_experiments

    if is_experiments(Path(points)):
        if unused := [
            name for name, value in (("--without", without), ("--known", known)) if value
        ]:
            raise JaxinferError(f"{unused[0]} has no effect on experiments: leave it out")
        about = campaigns or ABOUT
        validate_experiments(
            Path(points), folder_of_tables, out, about, jobs, _settings(settings), as_json
        )
        return
    from jaxinfer.files.contents import contents
    from jaxinfer.files.kept import KeptResults
    from jaxinfer.lab.validate.campaigns import launch, read_campaigns
    from jaxinfer.lab.validate.pictures import draw
    from jaxinfer.lab.validate.points import read_points
    from jaxinfer.lab.validate.table import show, summarise

    rules = read_campaigns(campaigns or "campaigns.yaml", without)
    given = read_points(Path(points))
    try:
        rules.check_columns(given[0].row)
    except JaxinferError as error:
        raise JaxinferError(f"campaigns {campaigns or 'campaigns.yaml'}: {error}") from None
    others = KeptResults(Path(known) / FOUND) if known else None
    own, said = _settings(settings), rules.model_dump(mode="json")
    # Files that rules and settings name are part of what results are made from.
    tables = contents({"folder": folder_of_tables, "rules": said, "set": own})
    files = contents({"trace": points}) | tables
    asked = {"rules": said, "set": list(settings), "files": files}
    with kept_results(out, "validate.json", json.dumps(asked, indent=2), FOUND) as (folder, kept):
        compared = _compare(
            given,
            lambda point: launch(rules, point, folder_of_tables, own),
            Known(kept, others, tables),
            jobs,
        )
        if not any(each.is_predicted for each in compared):
            for line in _left_out_lines(compared):
                say(line)
            say(f"jaxinfer: {points}: none of {counted(len(given), 'point')} can be simulated")
            sys.exit(1)
        _write(folder, compared)
        summary = summarise(compared)
        left_out = {why: len(several) for why, several in _left_out(compared).items()}
        figures = summary | {"left_out": left_out}
        text = json.dumps(figures, indent=2)
        (folder / "summary.json").write_text(text + "\n", encoding="utf-8")
        drawn = draw(folder, pictures or "png", compared)
    if as_json:
        print_json(figures)
        return
    console = Console(width=None if sys.stdout.isatty() else 170)
    console.print(show(summary))
    for line in _notes(summary, given[0].row, compared):
        console.print(line, soft_wrap=True, markup=False, highlight=False)
    console.print(f"{counted(len(drawn), 'picture')} and points: {folder}{os.sep}", markup=False)


def _validate_log(
    log: Path,
    run_file: str | None,
    operators: str | None,
    out: str,
    settings: Sequence[str],
    ending: str,
    as_json: bool,
) -> None:
    """Simulate the requests of a log; write and print both sides."""
    from jaxinfer.config.run_file import load_run_file
    from jaxinfer.files.contents import contents
    from jaxinfer.lab.plan.result import write_table
    from jaxinfer.lab.validate.pictures import draw_requests
    from jaxinfer.lab.validate.request_log import figures, read_requests, request_rows, simulated

    if run_file is None:
        raise JaxinferError("--run is missing, must be a run file of the engine that wrote the log")
    tables = [f"simulate.tables={operators}"] if operators else []
    real, config = read_requests(log), load_run_file(run_file, [*tables, *settings])
    files = contents({"trace": str(log), "run": run_file, "folder": operators or ""})
    asked = {"log": str(log), "run": run_file, "set": [*tables, *settings], "files": files}
    folder = Path(out)
    existed = folder.exists()
    own_folder(folder, "validate.json", json.dumps(asked, indent=2))
    with left_as_found(folder, existed, lambda _: existed):
        ours = simulated(config, real, folder).requests
        rows = request_rows(real, ours)
        write_table(folder / "points.csv", rows)
        found = figures(rows, real, ours)
        summary: dict[str, Any] = {
            each.name: {
                "measured_s": each.measured,
                "simulated_s": each.simulated,
                "off": each.error,
            }
            for each in found
        }
        summary = {"requests": len(rows)} | summary
        text = json.dumps(summary, indent=2)
        (folder / "summary.json").write_text(text + "\n", encoding="utf-8")
        draw_requests(folder / f"scatter-requests.{ending}", rows)
    if as_json:
        print_json(summary)
        return
    for each in found:
        print(each.line)
    print(f"{counted(len(rows), 'request')}, picture and run: {folder}{os.sep}")


def _compare(
    points: "Sequence[Point]",
    make: "Callable[[Point], PointSetup]",
    kept: "Known",
    jobs: int | None,
) -> "list[Compared]":
    """Simulate points without known results, the longest first."""
    from jaxinfer.lab.validate.points import uses
    from jaxinfer.lab.validate.predict import predict
    from jaxinfer.lab.validate.table import Compared
    from jaxinfer.report.progress import CountProgress

    compared: list[Compared] = []
    todo: list[tuple[int, PointSetup]] = []
    for point, use in zip(points, uses(points), strict=True):
        found, as_what = None, ""
        if use.tpot:
            try:
                launch = make(point)
                as_what = launch.simulated_as
                found = kept.find(launch)
                if found is None:
                    todo.append((len(compared), launch))
            except JaxinferError as error:
                found = {"refused": str(error)}
        compared.append(Compared(point, use, found, as_what))
    todo.sort(key=lambda each: -points[each[0]].osl * points[each[0]].concurrency)
    if todo:
        at = nullcontext((map, 1)) if jobs == 1 else cores(None, jobs)
        with at as (map_points, _), CountProgress("points", len(todo)) as bar:
            launches = [launch for _, launch in todo]
            for (number, launch), found in zip(todo, map_points(predict, launches), strict=True):
                if "refused" not in found:
                    kept.add(launch, found)
                compared[number] = replace(compared[number], found=found)
                bar.advance(points[number].id)
    return compared


class Known:
    """Results that are already known, so that points need not be simulated again.

    Args:
        kept: results of this folder.
        others: results of another folder, if there is one.
        files: digests of the files that run files name.
    """

    def __init__(
        self, kept: "KeptResults", others: "KeptResults | None", files: Mapping[str, str]
    ) -> None:
        self._kept, self._others, self._files = kept, others, files

    def find(self, launch: "PointSetup") -> Any:
        """Return a point's results; None if they are not known."""
        key = self._key(launch)
        found = self._kept.get(key)
        return self._others.get(key) if found is None and self._others else found

    def add(self, launch: "PointSetup", found: Any) -> None:
        """Store a point's results."""
        self._kept.add(self._key(launch), found)

    def _key(self, launch: "PointSetup") -> str:
        from jaxinfer.files.kept import key_of

        return key_of(launch.data, launch.first_wave, self._files)


def _settings(settings: Sequence[str]) -> dict[str, Any]:
    """Return a mapping of dotted keys to values."""
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


def _left_out(compared: "Sequence[Compared]") -> "dict[str, list[Compared]]":
    """Return the points without results, or without a valid TTFT, by the reason."""
    found: dict[str, list[Compared]] = {}
    for each in compared:
        if each.why:
            found.setdefault(each.why, []).append(each)
    return found


def _left_out_lines(compared: "Sequence[Compared]") -> Iterator[str]:
    for why, several in _left_out(compared).items():
        what = "without a TTFT that counts" if several[0].is_predicted else "left out"
        where = f"line {several[0].point.line}" + " on" * (len(several) > 1)
        yield f"{counted(len(several), 'point')} {what}, {where}: {why}"


def _notes(
    summary: Mapping[str, Any], columns: Mapping[str, str], compared: "Sequence[Compared]"
) -> Iterator[str]:
    """Yield notes on substituted versions, on points left out, and on renamed columns."""
    from jaxinfer.lab.validate.table import OURS

    for group, found in summary.items():
        for simulated_as in found.get("simulated_as", ()):
            yield f"{group}: simulated with {simulated_as}"
    yield from _left_out_lines(compared)
    if own := [name for name in columns if name in OURS]:
        yield f"columns with the names of ours are own_NAME in points.csv: {', '.join(own)}"


def _tables_folder(operators: str | None) -> str:
    """Return the folder of measured operators; raise JaxinferError if it has no cards."""
    if operators is None:
        raise JaxinferError(
            f"--operators is missing, must be the folder of measured operators; {OPERATORS_NAME} "
            "ships"
        )
    folder = data_path(operators)
    if not folder.is_dir():
        raise JaxinferError(
            f"--operators {operators}: no such folder; {OPERATORS_NAME} ships, with all its cards"
        )
    if folder.with_suffix(".yaml").is_file():
        raise JaxinferError(
            f"--operators {operators}: is of one card; rows name theirs, so give the folder with "
            f"all: {Path(operators).parent}"
        )
    return str(folder)


def _write(folder: Path, compared: "Sequence[Compared]") -> None:
    from jaxinfer.lab.plan.result import write_table

    write_table(folder / "points.csv", [each.row for each in compared])
