"""Options and helpers that several commands share."""

import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from jaxinfer.config.run_file import RunFile, load_run_file
from jaxinfer.errors import JaxinferError
from jaxinfer.report.pictures import FORMATS

if TYPE_CHECKING:
    from jaxinfer.files.kept import KeptResults

with_model = click.option(
    "--model",
    help="Model: name of the demo model, .gguf file, folder (converted or from Hugging Face), or "
    "hub id.",
)


def settings_of(what: str, example: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator that adds ``--set`` to a command.

    Its help text names ``what`` kind of file the command takes, and shows the ``example``.
    """
    return click.option(
        "--set",
        "settings",
        multiple=True,
        metavar="A.B=C",
        help=f"Override a value of the {what} file, e.g. {example}; may be repeated.",
    )


with_settings = settings_of("run", "engine.max_num_seqs=16")
with_ray_hosts = click.option(
    "--ray",
    "ray_address",
    metavar="ADDRESS",
    help="Ray cluster for groups with `ray`: HOST:PORT of its head node, or auto.",
)
TRACES = "Trace file (CSV, JSONL or JSON); its columns tell the format."
with_workload = click.option("--workload", help=TRACES)
with_output = click.option(
    "--output", "output_path", required=True, help="JSON file for the figures."
)
with_limit = click.option(
    "--limit", type=click.IntRange(min=1), help="Use only the first N requests."
)
with_pictures = click.option(
    "--pictures", type=click.Choice(list(FORMATS)), help="Format of pictures (default: png)."
)
with_ledger = click.option(
    "--ledger", is_flag=True, help="Record all scheduling decisions in the run folder."
)
with_force = click.option("--force", is_flag=True, help="Overwrite an existing JSON file.")

with_ray = click.option(
    "--ray", "ray_address", help="Simulate on a Ray cluster: HOST:PORT of its head node, or auto."
)


@contextmanager
def cores(ray_address: str | None, jobs: int | None = None) -> Iterator[tuple[Any, int]]:
    """Yield a ``map`` that uses the cores of this machine or a cluster, and their number."""
    if ray_address:
        refuse("for this machine; --ray uses the cluster's cores", {"--jobs": jobs})
        from jaxinfer.ray.tasks import RayMap

        cluster = RayMap(ray_address)
        yield cluster, cluster.cores
        return
    from jaxinfer.files.process_pool import process_pool

    count = jobs or os.cpu_count() or 1
    with process_pool(count) as pool:
        yield pool.map, count


def ray_settings(address: str | None) -> list[str]:
    """Return the run file's setting for the address of a Ray cluster, if there is one."""
    return [f"ray={json.dumps(address)}"] if address else []


def ledger_settings(ledger: bool) -> list[str]:
    """Return the run file's setting that keeps a ledger if ``ledger``, otherwise none."""
    return ["ledger=true"] if ledger else []


def say(text: str) -> None:
    """Print a message on standard error."""
    click.echo(text, err=True)


def workload_settings(trace: str | None, limit: int | None) -> list[str]:
    """Return the run file's settings that replace its workload by a trace, and that set a limit."""
    settings = [f"workload.trace={json.dumps(trace)}", "workload.synthetic="] if trace else []
    return settings + ([f"workload.limit={limit}"] if limit else [])


def counted(number: int, noun: str) -> str:
    """Return the number followed by the noun, in the singular or plural."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def refuse(why: str, options: dict[str, object]) -> None:
    """Raise JaxinferError, saying ``NAME is WHY``, for the first of these options that is given."""
    for name, value in options.items():
        if value:
            raise JaxinferError(f"{name} is {why}")


@contextmanager
def new_results(out: Path, is_kept: Callable[[Path], bool] = lambda _: False) -> Iterator[None]:
    """Make a folder for results, or use an empty one; after a failure, restore its earlier state.

    Args:
        is_kept: see ``left_as_found``.

    Raises:
        JaxinferError: the folder cannot be made, or is not empty.
    """
    from jaxinfer.report.comparison import new_folder

    existed = out.exists()
    new_folder(out)
    with left_as_found(out, existed, is_kept):
        yield


@contextmanager
def left_as_found(out: Path, existed: bool, is_kept: Callable[[Path], bool]) -> Iterator[None]:
    """Restore the folder after a failure, so that a corrected command can be run again.

    Args:
        existed: whether there was a folder before (an empty one).
        is_kept: returns whether the folder's contents are worth keeping; all of it then stays.
    """
    try:
        yield
    except BaseException:
        if not is_kept(out):
            # The original error counts, and not the failure to remove a file.
            for path in list(out.iterdir()) if existed else [out]:
                if path.is_dir():
                    shutil.rmtree(path, ignore_errors=True)
                else:
                    path.unlink(missing_ok=True)
        raise


def new_file(path: str, force: bool) -> Path:
    """Return the path of a file that may be written; raise JaxinferError if it exists."""
    out = Path(path)
    if out.exists() and not force:
        raise JaxinferError(f"{out} exists; --force overwrites it")
    if not out.parent.is_dir():
        raise JaxinferError(f"{out}: there is no folder {out.parent}")
    return out


def own_folder(folder: Path, name: str, text: str) -> Path:
    """Return a new folder for results that are added one by one, or the folder to continue in.

    Args:
        name: name of the file that says what the folder is for.
        text: contents of that file.

    Raises:
        JaxinferError: the folder has other contents, or cannot be made.
    """
    path = folder / name
    try:
        if path.exists():
            if path.read_bytes() != text.encode():
                raise JaxinferError(
                    f"{folder}: {name} holds another task; choose another --out folder"
                )
            return folder
        if folder.exists() and any(folder.iterdir()):
            raise JaxinferError(
                f"{folder}: has files of something else; choose another --out folder"
            )
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise JaxinferError(f"{folder}: {error.strerror}") from None
    return folder


@contextmanager
def kept_results(
    out: str, name: str, text: str, lines: str, version: str | None = None
) -> Iterator[tuple[Path, "KeptResults"]]:
    """Open a folder for results that are added one by one, and read those already there.

    In a new folder, ``origin.json`` names the command, code and machine that began it. A new folder
    is removed if a failure occurs before the first result.

    Args:
        name, text: see ``own_folder``.
        lines: name of the file with the results.
        version: see ``KeptResults``.

    Raises:
        JaxinferError: see ``own_folder``, or a file in it cannot be read or written.
    """
    from jaxinfer.files.kept import KeptResults
    from jaxinfer.report.origin import origin

    folder = Path(out)
    existed, begun = folder.exists(), (folder / name).exists()
    own_folder(folder, name, text)
    keeps = folder / lines
    with left_as_found(
        folder, existed, lambda _: begun or (keeps.is_file() and keeps.stat().st_size > 0)
    ):
        if not begun:
            made_from = json.dumps(origin(), indent=2) + "\n"
            (folder / "origin.json").write_text(made_from, encoding="utf-8")
        kept = KeptResults(keeps, version)
        if kept.of_others:
            print(
                f"{keeps}: {kept.of_others} results come from another version of jaxinfer, its "
                "data or the machine, and are computed again",
                file=sys.stderr,
            )
        try:
            yield folder, kept
        except (IsADirectoryError, PermissionError) as error:
            raise JaxinferError(f"{error.filename}: {error.strerror}") from None
        finally:
            kept.close()


def configure(run_file: str | None, settings: tuple[str, ...], model: str | None) -> RunFile:
    """Return the run file with its settings, and with the model if one is given."""
    config = load_run_file(run_file, settings)
    return config.model_copy(update={"model": model}) if model else config
