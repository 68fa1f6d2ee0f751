"""What several commands have in common."""

import json
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import click
from rich.console import Console

from jaxinfer.config.run_file import RunFile, load_run_file
from jaxinfer.errors import JaxinferError
from jaxinfer.report.pictures import FORMATS

with_model = click.option(
    "--model", help="Demo model's name, .gguf file, folder (converted or Hugging Face), or hub id."
)
with_settings = click.option(
    "--set",
    "settings",
    multiple=True,
    metavar="A.B=C",
    help="Override a run file's value, e.g. engine.max_num_seqs=16; may be repeated.",
)
with_workload = click.option(
    "--workload", required=True, help="JSONL of prompt_token_ids, or CSV of lengths."
)
with_figures = click.option("--json", "json_path", required=True, help="File for the figures.")
with_limit = click.option(
    "--limit", type=click.IntRange(min=1), help="Take the first N requests only."
)
with_pictures = click.option(
    "--pictures", type=click.Choice(list(FORMATS)), help="Format of the pictures; png."
)
with_force = click.option("--force", is_flag=True, help="Overwrite the file of figures.")


def workload_settings(trace: str | None, limit: int | None) -> list[str]:
    """As settings of the run file, whose own workload they replace."""
    settings = [f"workload.trace={json.dumps(trace)}", "workload.synthetic="] if trace else []
    return settings + ([f"workload.limit={limit}"] if limit else [])


def refuse(why: str, options: dict[str, object]) -> None:
    """Raise JaxinferError for the first option that is given."""
    for name, value in options.items():
        if value:
            raise JaxinferError(f"{name} is {why}")


def compare_and_write(
    files: Sequence[str],
    systems: Sequence[str],
    out: Path,
    rounds: int,
    settings: Sequence[str],
    pictures: str,
) -> None:
    """Run systems in turns and write their comparison; without rounds, on modelled clusters."""
    from jaxinfer.compare import compare_systems, load_systems, simulate_systems
    from jaxinfer.report.comparison import comparison_table, new_folder, write_comparison

    configs = load_systems(files, systems, settings)
    work = load_run_file(files[0], settings).workload.requests()
    existed = out.exists()
    new_folder(out)
    with _left_as_found(out, existed, is_kept=_has_finished_run if rounds else lambda _: False):
        if rounds:
            runs = compare_systems(configs, work, out, rounds)
        else:
            runs = simulate_systems(configs, work, out)
        Console(width=None if sys.stdout.isatty() else 160).print(comparison_table(runs))
        command = " ".join(["jaxinfer", *sys.argv[1:]])
        written = write_comparison(runs, out, command, pictures)
    Console().print(f"tables, pictures and traces: {written[0]}", soft_wrap=True)


@contextmanager
def _left_as_found(out: Path, existed: bool, is_kept: Callable[[Path], bool]) -> Iterator[None]:
    """After any failure: the command put right is to find an empty folder again, or none.

    Args:
        existed: whether there was a folder, which was empty.
        is_kept: whether what is in it now is of value, so that all of it stays.
    """
    try:
        yield
    except BaseException:
        if not is_kept(out):
            # What has failed counts, and not what cannot be removed.
            for path in list(out.iterdir()) if existed else [out]:
                if path.is_dir():
                    shutil.rmtree(path, ignore_errors=True)
                else:
                    path.unlink(missing_ok=True)
        raise


def _has_finished_run(out: Path) -> bool:
    """Whether there is a run that took a device's time, and can be read."""
    files = out.glob("runs/*/*/run.json")
    return any('"status": "finished"' in file.read_text(encoding="utf-8") for file in files)


def new_file(path: str, force: bool) -> Path:
    """The path of a file that may be written; raises JaxinferError where it exists."""
    out = Path(path)
    if out.exists() and not force:
        raise JaxinferError(f"{out} exists; --force overwrites it")
    if not out.parent.is_dir():
        raise JaxinferError(f"{out}: there is no folder {out.parent}")
    return out


def configure(run_file: str | None, settings: tuple[str, ...], model: str | None) -> RunFile:
    """The run file with its settings, and the model where one is given beside it."""
    config = load_run_file(run_file, settings)
    return config.model_copy(update={"model": model}) if model else config
