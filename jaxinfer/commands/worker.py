"""``jaxinfer worker``: device groups of this host for jobs of another."""

import click

from jaxinfer.errors import JaxinferError
from jaxinfer.options.validation import split_address
from jaxinfer.runtime.processes.peers import shared_key
from jaxinfer.runtime.processes.worker_server import WorkerServer


@click.command()
@click.option(
    "--listen",
    required=True,
    metavar="HOST:PORT",
    help="This host's address as others reach it; port 0 is any that is free, and printed.",
)
def worker(listen: str) -> None:
    """Start a process for each job that connects, with the key in JAXINFER_KEY, until it is ended.

    A run file's groups.x.host names it. Whoever has the key may run anything here, and what is said
    can be overheard: for networks that are trusted.
    """
    try:
        host, port = split_address(listen)
    except JaxinferError as error:
        raise JaxinferError(f"--listen {error}") from None
    key = shared_key()
    try:
        server = WorkerServer(host, port, key, click.echo)
    except OSError as error:
        why = str(error.strerror).partition(" (")[0]
        raise JaxinferError(f"--listen {listen}: {why}") from None
    click.echo(f"listening at {server.address}")
    server.serve()
