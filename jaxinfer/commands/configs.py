"""``jaxinfer configs``: list and copy the files that ship with the code."""

import re
import shutil
from difflib import get_close_matches
from pathlib import Path

import click

from jaxinfer.errors import JaxinferError
from jaxinfer.files.shipped import SHIPPED, shipped_files


@click.group(invoke_without_command=True)
@click.pass_context
def configs(context: click.Context) -> None:
    """List or copy the run files, clusters, prompts and traces that ship with jaxinfer.

    Every command accepts these files by name, such as cronus/cronus.yaml, from any folder. Your
    own file with the same path takes precedence.
    """
    if context.invoked_subcommand:
        return
    listed = _listed()
    widest, columns = max(map(len, listed)), shutil.get_terminal_size((160, 24)).columns
    for name, about in listed.items():
        click.echo(f"{name:<{widest}}  {about}"[:columns].rstrip())


@configs.command()
@click.argument("name")
@click.argument("destination")
def copy(name: str, destination: str) -> None:
    """Copy a shipped file or folder, for you to edit.

    NAME is a file or folder in the list, such as cronus, or configs for all of them. DESTINATION
    must be new or an empty folder; for a file, it may be any folder that has no file of that name.
    """
    inner = name.strip("/").removeprefix("configs").lstrip("/")
    source, dest = SHIPPED / inner, Path(destination)
    if ".." in source.parts or not source.exists():
        known = list(shipped_files())
        names = {*known, *(str(folder) for n in known for folder in Path(n).parents)} - {"."}
        near = get_close_matches(inner, sorted(names), n=1)
        hint = f", did you mean {near[0]!r}?" if near else ""
        raise JaxinferError(f"{name}: is not among what ships (`jaxinfer configs` lists it){hint}")
    if source.is_file() and dest.is_dir():
        dest /= source.name
    if dest.exists() and not (source.is_dir() and dest.is_dir() and not any(dest.iterdir())):
        raise JaxinferError(f"{dest} exists, must be a new name")
    try:
        dest.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            unwanted = shutil.ignore_patterns("__pycache__")
            shutil.copytree(source, dest, ignore=unwanted, dirs_exist_ok=True)
        else:
            shutil.copyfile(source, dest)
    except OSError as error:
        raise JaxinferError(f"{dest}: {error.strerror or error}") from None
    count = sum(path.is_file() for path in dest.rglob("*")) if dest.is_dir() else 1
    click.echo(f"{count} {'file' if count == 1 else 'files'}: {dest}")


def _listed() -> dict[str, str]:
    """Return a line on each file, by its name; tables of operators have a line per card."""
    listed: dict[str, str] = {}
    tables: dict[str, set[str]] = {}
    for name in shipped_files():
        path = SHIPPED / name
        if path.suffix != ".npz":
            listed[name] = _about(path)
            continue
        card = path.parents[2].relative_to(SHIPPED).as_posix()
        tables.setdefault(card, set()).add(f"{path.parent.parent.name} {path.parent.name}")
        listed[card] = f"Tables of operators of {' and '.join(sorted(tables[card]))}."
    return listed


def _about(path: Path) -> str:
    """Return the first sentence of a file's comment; for a table, its columns."""
    text = path.read_text(encoding="utf-8")
    match path.suffix:
        case ".csv":
            return text.partition("\n")[0]
        case ".py":
            said = text.removeprefix('"""').partition('"""')[0]
        case ".yaml":
            comment = re.match(r"(#.*\n)+", text)
            source = re.search(r"^source: \"(.*)\"$", text, re.MULTILINE)
            said = source[1] if source else comment[0].replace("#", "") if comment else ""
        case ".md":
            return text.partition("\n")[0].lstrip("# ")
        case ".jsonl":
            return f"{len(text.splitlines())} lines"
        case _:
            return ""
    return re.split(r"(?<=[.?])\s", " ".join(said.split()))[0]
