"""``jaxinfer check rerun``: repeats a run from the records in its folder."""

import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, NamedTuple

import click
from rich.console import Console

from jaxinfer.commands.figures import print_json, with_json
from jaxinfer.errors import JaxinferError
from jaxinfer.lab.rerun import Recorded, differing, same_tokens, simulate_again, where_it_ran
from jaxinfer.report.comparison import new_folder
from jaxinfer.report.origin import made_by_another
from jaxinfer.report.run_folder import run_folders
from jaxinfer.report.table import metrics_table

if TYPE_CHECKING:
    from jaxinfer.report.metrics import RunMetrics


@click.command()
@click.argument("folder")
@click.option("--out", help="New folder for the files of the new run; optional for simulations.")
@with_json
def rerun(folder: str, out: str | None, as_json: bool) -> None:
    """Repeat a run from its folder, and compare the results.

    FOLDER holds run.json, or was written by simulate --out or compare --simulate. A simulation is
    expected to give the same files, byte for byte, apart from times of day and the machine; a real
    run is expected to give the same tokens, as far as they were recorded.

    Exits with 0 if the results are the same, or if nothing could be compared (which is printed);
    1 if they differ; 2 if the run cannot be repeated.
    """
    before = Path(folder).absolute()
    recorded = Recorded.read(before) if (before / "run.json").exists() else None
    if recorded and not recorded.is_simulated:
        if not out:
            raise JaxinferError("a real run needs --out FOLDER")
        new_folder(Path(out))
        found = _run(recorded, Path(out).absolute(), as_json)
    else:
        with TemporaryDirectory() as temporary:
            after = Path(out).absolute() if out else Path(temporary)
            new_folder(after)
            simulate_again(before, after)
            found = _files(differing(before, after))
    other = "" if found.same or not recorded else made_by_another(recorded.run)
    if as_json:
        print_json({"same": found.same} | found.figures | ({"reason": other} if other else {}))
    else:
        click.echo("\n".join([*found.lines, other] if other else found.lines))
    if not found.same:
        sys.exit(1)


class RerunResult(NamedTuple):
    """The outcome of a second run; ``same`` is also True if nothing could be compared."""

    same: bool
    lines: list[str]
    figures: dict[str, Any]


def _files(names: list[str]) -> RerunResult:
    said = "all files are the same, apart from times of day and the machine in run.json"
    if names:
        said = f"these files differ: {', '.join(names)}"
    return RerunResult(not names, [said], {"differing_files": names})


def _run(recorded: Recorded, out: Path, as_json: bool) -> RerunResult:
    """Run a real one again, and compare its answers with the recorded ones."""
    with where_it_ran(recorded.run):
        config = recorded.config()
        if "sha256" in recorded.run["workload"]:
            from jaxinfer.lab.measure import measure
            from jaxinfer.llm import LLM

            work = recorded.work(config)
            metrics = measure(LLM.from_config(config), work, str(recorded.folder), str(out))
            _print(metrics, as_json)
            return _tokens(recorded.folder, out)
        from jaxinfer.commands.batch_job import BatchJob, lines_of

        source, output = config.workload.input, config.workload.output
        assert source
        assert output
        answers = out / "answers.jsonl"
        started = recorded.run.get("job_started")
        with BatchJob.open(config, source, str(answers), False, started=started) as job:
            _print(job.run(), as_json)
        said = f"results: {answers}"
        lines = lines_of(output)
        there = lines.is_file()
        before = set(lines.read_bytes().splitlines()) if there else set()
        after = set(answers.read_bytes().splitlines())
    if not there:
        found = _tokens(recorded.folder, Path(f"{answers}.runs"))
        gone = f"cannot compare answers: {lines} no longer exists"
        return found._replace(lines=[said, gone, *found.lines])
    same = len(after & before)
    compared = f"{same} of {len(after)} answers are the same as in {lines}"
    figures = {"same_answers": same, "answers": len(after)}
    return RerunResult(after == before, [said, compared], figures)


def _tokens(before: Path, parent: Path) -> RerunResult:
    """Compare the newest run in a folder with another by their tokens."""
    found = same_tokens(before, run_folders(parent)[-1])
    if found is None:
        said = f"nothing was compared: {before} does not record its tokens"
        return RerunResult(True, [said], {"same_answers": None, "answers": None})
    same, count = found
    said = f"{same} of {count} answers have the same tokens as in {before}"
    return RerunResult(same == count, [said], {"same_answers": same, "answers": count})


def _print(metrics: "RunMetrics | None", as_json: bool) -> None:
    if metrics and not as_json:
        Console().print(metrics_table(metrics))
