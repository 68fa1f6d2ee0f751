"""Repeats a run from the records in its ``run.json``, for ``jaxinfer check rerun``."""

import json
import os
import shutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from jaxinfer.config.run_file import RunFile, as_run_file
from jaxinfer.errors import JaxinferError
from jaxinfer.files.contents import contents
from jaxinfer.options.validation import read_json
from jaxinfer.report.comparison import write_comparison
from jaxinfer.report.origin import digest, recorded_path
from jaxinfer.report.pictures import FORMATS
from jaxinfer.report.records import read_lines, read_run, read_run_json
from jaxinfer.report.run_folder import run_folders
from jaxinfer.simulate.run import simulate
from jaxinfer.workload.lengths import BenchRequest

# Parts of run.json that differ between any two runs: time, place and duration.
OF_THE_MOMENT = (
    "started",
    "folder",
    "commit",
    "uncommitted_changes",
    "versions",
    "python",
    "machine",
)
# Files of a run's own folder.
OWN_FILES = "run.json", "steps.jsonl", "requests.jsonl", "ledger.jsonl"
_OF_THE_HOST = ("loop_s", "launching_s", "peak_rss_mib")


@dataclass(frozen=True)
class Recorded:
    """The record of a finished run, from which the run can be repeated.

    Attributes:
        folder: folder with ``run.json``.
        run: contents of ``run.json``.
    """

    folder: Path
    run: Mapping[str, Any]

    @classmethod
    def read(cls, folder: Path) -> "Recorded":
        """Read the record in a run's folder.

        Raises:
            JaxinferError: the run did not finish, or its command is not recorded.
        """
        run = read_run_json(folder)
        if run.get("status") != "finished":
            raise JaxinferError(f"{folder}: the run is {run.get('status')!r}, must be finished")
        if "files" not in run:
            raise JaxinferError(
                f"{folder}: run.json does not record the run's inputs: a Python program gave them, "
                "or an older version ran it"
            )
        return cls(folder, run)

    @property
    def is_simulated(self) -> bool:
        """True if the run was simulated."""
        return "simulate" in self.run

    def config(self) -> RunFile:
        """Return the run file with all settings resolved.

        Raises:
            JaxinferError: this version does not accept the run file, or a file that it names has
                changed.
        """
        for name, sha256 in self.run["files"].items():
            path = recorded_path(name)
            if not path.is_file():
                raise JaxinferError(f"{self.folder}: {name} is gone, which the run was made from")
            if contents(str(path)) != {str(path): sha256}:
                raise JaxinferError(
                    f"{self.folder}: {name} has changed since the run was made from it"
                )
        try:
            return as_run_file(self.run["run_file"])
        except JaxinferError as error:
            raise JaxinferError(f"{self.folder / 'run.json'}: run_file: {error}") from None

    def work(self, config: RunFile) -> list[BenchRequest]:
        """Return the requests of the run.

        Raises:
            JaxinferError: the run had other requests.
        """
        try:
            work = config.requests()
        except JaxinferError as error:
            raise JaxinferError(f"{self.folder}: its requests: {error}") from None
        then = self.run["workload"]
        if digest(work) != (then.get("requests"), then.get("sha256")):
            raise JaxinferError(
                f"{self.folder}: its {then.get('requests')} requests are not those of its run "
                "file: a Python program gave them, it is a replay, or the drawing has changed"
            )
        return work


@contextmanager
def where_it_ran(run: Mapping[str, Any]) -> Iterator[None]:
    """Change to the folder in which a run was started, if the folder still exists."""
    here, there = os.getcwd(), str(run.get("folder"))
    if not os.path.isdir(there):
        yield
        return
    os.chdir(there)
    sys.path.append(there)  # A system of the user's own, which hides no other module.
    try:
        yield
    finally:
        os.chdir(here)
        sys.path.remove(there)


def simulate_again(folder: Path, out: Path) -> None:
    """Simulate a run, or all runs of a comparison, again.

    Args:
        folder: folder of a run, of ``simulate --out`` or of ``compare --simulate``.
        out: new folder, which gets the same files.

    Raises:
        JaxinferError: see ``Recorded``; or the comparison contains a real run.
    """
    if (folder / "run.json").exists() or not (folder / "compare.json").exists():
        _simulate(Recorded.read(folder), out)
        return
    compared = read_json(folder / "compare.json")
    runs = {}
    for name in compared["systems"]:
        inner = Path("runs", name, "1")
        recorded = Recorded.read(folder / inner)
        if not recorded.is_simulated:
            raise JaxinferError(
                f"{folder}: its runs are real ones, which are run again one by one: give the "
                f"folder of one, such as {folder / inner}"
            )
        _simulate(recorded, out / inner)
        runs[name] = [read_run(out / inner, name)]
    kind = next((kind for kind in FORMATS if (folder / f"throughput.{kind}").exists()), "png")
    write_comparison(runs, out, compared["command"], kind)


def _simulate(recorded: Recorded, out: Path) -> None:
    with where_it_ran(recorded.run), TemporaryDirectory() as made:
        config = recorded.config()
        command = {"command": recorded.run["command"]}
        simulate(config, recorded.work(config), made, about=command)
        shutil.copytree(run_folders(Path(made))[-1], out, dirs_exist_ok=True)


def same_tokens(before: Path, after: Path) -> tuple[int, int] | None:
    """Return how many answers have the same tokens in two real runs, and how many there are.

    Returns:
        None if the first run, from an older version, did not record its tokens.
    """
    then, now = (
        {line["id"]: line.get("tokens_sha256") for line in read_lines(folder).requests}
        for folder in (before, after)
    )
    if None in then.values():
        return None
    return sum(now.get(name) == found for name, found in then.items()), len(then)


def differing(before: Path, after: Path) -> list[str]:
    """Return the names of a repeated run's files that differ from the original's.

    Other files in the folder, such as a user's notes or a repeated run, are ignored. Of
    ``run.json``, entries that always differ are ignored, too: see ``OF_THE_MOMENT``.
    """
    made = {str(path.relative_to(after)) for path in after.rglob("*") if path.is_file()}
    names = made | {name for name in OWN_FILES if (before / name).is_file()}
    return sorted(name for name in names if _content(before / name) != _content(after / name))


def _content(path: Path) -> object:
    if not path.is_file():
        return None
    if path.name != "run.json":
        return path.read_bytes()
    run = {name: value for name, value in read_json(path).items() if name not in OF_THE_MOMENT}
    metrics = run.get("metrics", {})
    kept = {name: value for name, value in metrics.items() if name not in _OF_THE_HOST}
    return json.dumps(run | {"metrics": kept})
