"""Ways to a worker's process: a child of this one, or one of a worker that listens."""

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

# The secret that a worker that listens shares with those who may use it.
KEY = "JAXINFER_KEY"
# Of messages and back, by which two clocks are compared.
ROUND_TRIPS = 20
# A process that is to end has so long for it.
END_S = 5.0


class Peer(Protocol):
    """A process at the other end of a socket.

    Attributes:
        where: it is, in words.
        clock_offset: seconds by which its ``time.perf_counter`` is ahead of this process's.
        way: addresses of this host and of its own, each as the other reaches it; None where it is
            on this host.
    """

    socket: socket.socket
    where: str
    clock_offset: float
    way: tuple[str, str] | None

    def end(self, patience_s: float) -> str:
        """Have it ended, killed if it has not by itself after so long; how it did, in words."""


class Child:
    """A process that is started here, with some variables besides those of this one."""

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
    """The last word of a worker: a process that it had started has ended, with this code."""

    code: int


class RemotePeer:
    """A process that a worker that listens starts, with some variables besides its own.

    Args:
        address: ``HOST:PORT``.
        give_back: called when it is to end.

    Raises:
        JaxinferError: no process listens there, or it has another key.
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
        """See Peer; the process that started it ends it."""
        with suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)
        self._give_back()
        return "has ended"


def shared_key() -> str:
    """The secret, from the environment.

    Raises:
        JaxinferError: there is none.
    """
    if not (key := os.environ.get(KEY)):
        raise JaxinferError(f"{KEY} is not set: a secret that workers and their jobs share")
    return key


def clock_offset(ask: Callable[[], float]) -> float:
    """Return by how many seconds another clock is ahead, by the shortest of some round trips.

    It is wrong by half of that trip at most.
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
    """A worker's process of this one, which answers at the other end of the connection."""
    # A module, not a function: what the user's script does when it is imported is not redone.
    numbers = [str(connection.fileno()), str(os.getpid())]
    # Blocked there from its start: all of a terminal's processes get Ctrl-C, which is for this one.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        return subprocess.Popen(
            # Safe: the folder where this runs comes last on its path, as it does here.
            [sys.executable, "-P", "-m", "jaxinfer.runtime.worker_process", *numbers],
            pass_fds=[connection.fileno()],
            env=os.environ | environment,
            stdin=subprocess.DEVNULL,
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def how_ended(code: int) -> str:
    """Put into words how a process ended, by its exit code."""
    return f"was ended by signal {-code}" if code < 0 else f"has ended ({code})"
