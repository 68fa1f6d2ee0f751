"""Connections to a worker's process: a child of this one, or one started by a listening worker."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any, NamedTuple, Protocol

from jaxinfer.errors import JaxinferError, one_line
from jaxinfer.options.validation import split_address
from jaxinfer.runtime.kv.sockets import (
    CONNECT_S,
    be_acknowledged,
    call,
    is_loopback,
    set_patience,
)

# The secret that a listening worker shares with those who may use it.
KEY = "JAXINFER_KEY"
# Number of messages and answers to compare two clocks.
ROUND_TRIPS = 20
# Seconds that a process has to end.
END_S = 5.0


class Peer(Protocol):
    """A process at the other end of a socket.

    Attributes:
        where: where the process runs, in words.
        clock_offset: seconds by which the peer's ``time.perf_counter`` is ahead of this process's.
        way: addresses of this host and of the other one, each as seen from the other; None if the
            process is on this host.
    """

    socket: socket.socket
    where: str
    clock_offset: float
    way: tuple[str, str] | None

    def end(self, patience_s: float) -> str:
        """End the process, or kill it after ``patience_s``; return in words how it ended."""


class Child:
    """A process started on this host, with additional environment variables."""

    clock_offset = 0.0
    way: tuple[str, str] | None = None

    def __init__(self, environment: Mapping[str, str]) -> None:
        self.socket, theirs = socket.socketpair()
        with theirs:
            self._process = start_worker(theirs, environment)
        self.pid = self._process.pid
        self.where = f"pid {self.pid}"

    def end(self, patience_s: float) -> str:
        """See Peer."""
        try:
            code = self._process.wait(patience_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            code = self._process.wait()
        return how_ended(code)


class Greeting(NamedTuple):
    """The answer of a listening worker to a request for its clock."""

    clock: float
    host: str


class Ended(NamedTuple):
    """A listening worker's last message: a process that it started has ended with this code."""

    code: int


class RemotePeer:
    """A process that a listening worker starts, with additional environment variables.

    Args:
        address: ``HOST:PORT``.
        give_back: called when the process should end.

    Raises:
        JaxinferError: no process listens at the address, or the process has another key.
    """

    def __init__(
        self,
        address: str,
        key: str,
        environment: Mapping[str, str],
        give_back: Callable[[], None] = lambda: None,
    ) -> None:
        self._give_back = give_back
        self.where = f"at {address}"
        try:
            self.socket = call(*split_address(address), key.encode())
            try:
                self._greet(environment)
            except BaseException:
                self.socket.close()
                raise
        except PermissionError as error:
            raise JaxinferError(f"{address}: {error}: {KEY} differs there") from None
        except (OSError, EOFError) as error:
            why = getattr(error, "strerror", None) or one_line(error) or "broke off"
            if isinstance(error, BlockingIOError):
                why = f"said nothing for {CONNECT_S:g} s"
            raise JaxinferError(f"{address}: {why}: no jaxinfer worker listens there") from None

    def _greet(self, environment: Mapping[str, str]) -> None:
        be_acknowledged(self.socket)
        set_patience(self.socket, CONNECT_S)
        connection: Connection[Any, Any]
        with Connection(os.dup(self.socket.fileno())) as connection:

            def ask() -> Greeting:
                connection.send(None)
                return connection.recv()

            there = ask().host
            self.clock_offset = clock_offset(lambda: ask().clock)
            connection.send(dict(environment))
        self.way = None if is_loopback(there) else (self.socket.getsockname()[0], there)

    def end(self, patience_s: float) -> str:
        """See Peer; the listening worker ends the process."""
        with suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)
        self._give_back()
        return "has ended"


def shared_key() -> str:
    """Return the key that processes share, from the environment.

    Raises:
        JaxinferError: the environment has no key.
    """
    if not (key := os.environ.get(KEY)):
        raise JaxinferError(f"{KEY} is not set: a secret that workers and their jobs share")
    return key


def clock_offset(ask: Callable[[], float]) -> float:
    """Return by how many seconds another clock is ahead, from the shortest of several round trips.

    The error is at most half of that round trip.
    """
    found = []
    for _ in range(ROUND_TRIPS):
        start = time.perf_counter()
        there = ask()
        end = time.perf_counter()
        found.append((end - start, there - (start + end) / 2))
    return min(found)[1]


def start_worker(
    connection: socket.socket, environment: Mapping[str, str]
) -> "subprocess.Popen[bytes]":
    """Start a worker as a child process, which answers at the other end of the connection."""
    # Started as a module, so that the user's script is not imported again.
    numbers = [str(connection.fileno()), str(os.getpid())]
    # Blocked from its start, because Ctrl-C reaches all processes of a terminal, but is for this
    # one.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        return subprocess.Popen(
            # Safe, because the current folder comes last on its path, as it does here.
            [sys.executable, "-P", "-m", "jaxinfer.runtime.worker_process", *numbers],
            pass_fds=[connection.fileno()],
            env=os.environ | environment,
            stdin=subprocess.DEVNULL,
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def how_ended(code: int) -> str:
    """Return in words how a process ended, given its exit code."""
    return f"was ended by signal {-code}" if code < 0 else f"has ended ({code})"
