"""``jaxinfer worker``: lends this host's devices to jobs on other hosts."""

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
    help="Address at which other hosts reach this one; port 0 chooses a free port.",
)
def worker(listen: str) -> None:
    """Lend this host's devices to jobs on other hosts, until the command is stopped.

    A run file names the worker in groups.x.host. Both sides need the same key in JAXINFER_KEY.
    A job with the key can run any code here, and traffic is not encrypted: use it only in networks
    that you trust.
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
