"""``jaxinfer rerun``: repeats a run from its folder."""

import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import click
from rich.console import Console

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
def rerun(folder: str, out: str | None) -> None:
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
        same = _run(recorded, Path(out).absolute())
    else:
        with TemporaryDirectory() as temporary:
            after = Path(out).absolute() if out else Path(temporary)
            new_folder(after)
            simulate_again(before, after)
            same = _tell(differing(before, after))
    if recorded and not same and (other := made_by_another(recorded.run)):
        click.echo(other)
    if not same:
        sys.exit(1)


def _tell(names: list[str]) -> bool:
    """Print which files differ; return True if none does."""
    if names:
        click.echo(f"these files differ: {', '.join(names)}")
    else:
        click.echo("all files are the same, apart from times of day and the machine in run.json")
    return not names


def _run(recorded: Recorded, out: Path) -> bool:
    """Repeat a real run; return True if its recorded answers are the same."""
    with where_it_ran(recorded.run):
        config = recorded.config()
        if "sha256" in recorded.run["workload"]:
            from jaxinfer.lab.measure import measure
            from jaxinfer.llm import LLM

            work = recorded.work(config)
            _print(measure(LLM.from_config(config), work, str(recorded.folder), str(out)))
            return _tell_tokens(recorded.folder, out)
        from jaxinfer.commands.batch_job import BatchJob, lines_of

        source, output = config.workload.input, config.workload.output
        assert source
        assert output
        answers = out / "answers.jsonl"
        started = recorded.run.get("job_started")
        with BatchJob.open(config, source, str(answers), False, started=started) as job:
            _print(job.run())
        click.echo(f"results: {answers}")
        lines = lines_of(output)
        there = lines.is_file()
        before = set(lines.read_bytes().splitlines()) if there else set()
        after = set(answers.read_bytes().splitlines())
    if not there:
        click.echo(f"cannot compare answers: {lines} no longer exists")
        return _tell_tokens(recorded.folder, Path(f"{answers}.runs"))
    click.echo(f"{len(after & before)} of {len(after)} answers are the same as in {lines}")
    return after == before


def _tell_tokens(before: Path, parent: Path) -> bool:
    """Print whether the newest run in a folder has the same tokens; return True if unknown."""
    found = same_tokens(before, run_folders(parent)[-1])
    if found is None:
        click.echo(f"nothing was compared: {before} does not record its tokens")
        return True
    same, count = found
    click.echo(f"{same} of {count} answers have the same tokens as in {before}")
    return same == count


def _print(metrics: "RunMetrics | None") -> None:
    if metrics:
        Console().print(metrics_table(metrics))
