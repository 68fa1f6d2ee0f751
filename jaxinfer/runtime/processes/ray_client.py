"""Connects to a Ray cluster as a client."""

import logging
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from jaxinfer.errors import JaxinferError, one_line

# A head that does not accept a connection in this time never will; Ray itself tries for much
# longer.
CONNECT_S = 5.0


def connect(address: str) -> Any:
    """Return Ray's package, connected to a cluster; later calls ignore their address.

    Args:
        address: ``HOST:PORT`` of the cluster's head, ``auto`` for the cluster of this host, or
            ``local`` for a new one on this host, which ends with this process.

    Raises:
        JaxinferError: Ray is not installed, or there is no cluster.
    """
    ray = import_ray()
    if ray.is_initialized():
        return ray
    host, colon, port = address.rpartition(":")
    if colon and port.isdecimal() and "/" not in host:
        try:
            socket.create_connection((host.strip("[]"), int(port)), CONNECT_S).close()
        except OSError as error:
            raise JaxinferError(f"no Ray cluster at {address}: {one_line(error)}") from None
    try:
        with _signals_kept():
            ray.init(address, log_to_driver=False, logging_level=logging.ERROR)
    except Exception as error:
        raise JaxinferError(f"no Ray cluster at {address}: {one_line(error)}") from None
    return ray


def import_ray() -> Any:
    """Import Ray's package.

    Raises:
        JaxinferError: Ray is not installed.
    """
    try:
        import ray
        from ray import is_initialized  # noqa: F401 - a folder of the name ray has none.
    except ImportError as error:
        raise JaxinferError(f"{error}: Ray is an extra, pip install -e '.[ray]'") from None
    return ray


@contextmanager
def _signals_kept() -> Iterator[None]:
    """Restore the handler of SIGTERM, which Ray replaces by one that ends a command."""
    kept = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, kept)
