"""``jaxinfer convert``: converts a checkpoint to a folder that devices read shard by shard."""

import click
from rich.console import Console


@click.command()
@click.argument("source")
@click.argument("destination")
@click.option(
    "--dtype",
    type=click.Choice(["float32", "bfloat16"]),
    help="Format of the weights (default: as stored).",
)
@click.option("--force", is_flag=True, help="Overwrite a converted folder.")
def convert(source: str, destination: str, dtype: str | None, force: bool) -> None:
    """Convert a model to a folder from which each device reads only its shards.

    SOURCE is a model as for --model; DESTINATION is the folder to write.
    """
    from jaxinfer.convert import convert

    folder = convert(source, destination, dtype, force)
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    Console().print(f"{folder}: {size / 2**20:.0f} MiB", soft_wrap=True, highlight=False)
