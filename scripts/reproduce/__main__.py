"""The command that makes the results of a paper, in parts: ``python -m scripts.reproduce``."""

from importlib import import_module
from pathlib import Path

import click

PAPERS = sorted(path.parent.name for path in Path(__file__).parent.glob("*/__init__.py"))


@click.command()
@click.argument("paper", type=click.Choice(PAPERS))
@click.option(
    "--data",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    help="Folder with the inputs, under the names that --list shows.",
)
@click.option("--part", "parts", multiple=True, metavar="NAME", help="Only this one; repeatable.")
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    help="Folder for tables, pictures and targets.csv.  [default: runs/reproduce/PAPER]",
)
@click.option("--jobs", type=click.IntRange(min=1), help="Processes; by default one a core.")
@click.option("--overwrite", is_flag=True, help="Make parts again that other code or data made.")
@click.option("--list", "listed", is_flag=True, help="Show inputs and parts, and make nothing.")
def main(
    paper: str,
    data: Path | None,
    parts: tuple[str, ...],
    out: Path | None,
    jobs: int | None,
    overwrite: bool,
    listed: bool,
) -> None:
    """Make a paper's tables, pictures and claims, and print them.

    Parts that the same code has made from the same data are kept. If a command was killed, the same
    command therefore continues it.
    """
    from jaxinfer.errors import JaxinferError
    from scripts.reproduce.making import Maker, summary
    from scripts.reproduce.reproduction import Reproduction

    found: Reproduction = import_module(f"scripts.reproduce.{paper}").REPRODUCTION
    if listed:
        click.echo(f"{found.paper}\n\ninputs, in --data:")
        for name, words in found.inputs.items():
            click.echo(f"  {name}: {words}")
        click.echo("\nparts:")
        for name, make in found.parts.items():
            alone = " (only where --part names it)" if name in found.by_name else ""
            click.echo(f"  {name}: {summary(make)}{alone}")
        return
    for part in parts:
        if part not in found.parts:
            raise click.UsageError(f"--part {part}: must be one of {', '.join(found.parts)}")
    folder = out or Path("runs", "reproduce", paper)
    try:
        Maker(paper, found, folder, data, jobs, overwrite).make(parts)
    except JaxinferError as error:
        raise click.ClickException(str(error)) from None


if __name__ == "__main__":
    main()
