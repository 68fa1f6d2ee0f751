"""Workers that listen, as other hosts would have them."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import psutil
from cluster_cases import Pair

KEY = "a secret of the tests"
COMMAND = (sys.executable, "-m", "jaxinfer", "worker")


@contextmanager
def listening(
    host: str = "127.0.0.1", command: tuple[str, ...] = COMMAND, key: str = KEY
) -> Iterator[tuple[str, psutil.Popen]]:
    """A worker, by its address and its process."""
    worker = psutil.Popen(
        [*command, "--listen", f"{host}:0"],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"JAXINFER_KEY": key},
    )
    try:
        said = worker.stdout.readline()
        assert said.startswith(f"listening at {host}:"), said
        yield said.split()[-1], worker
    finally:
        if worker.poll() is None:
            worker.kill()
        worker.wait()


def jobs(worker: psutil.Popen) -> list[psutil.Process]:
    """The worker's processes that are at work."""
    found = []
    for child in worker.children():
        with suppress(psutil.Error):  # It has ended meanwhile.
            if child.status() != psutil.STATUS_ZOMBIE:
                found.append(child)
    return found


def elsewhere(pair: Pair, addresses: dict[str, str]) -> dict[str, Any]:
    """Groups and instances of a run file, some groups on other hosts."""
    sections = pair.sections
    for name, address in addresses.items():
        sections["groups"][name] |= {"host": address}
    return sections
