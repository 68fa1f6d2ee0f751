"""TCP between processes that share a key; connections break when the other host is gone."""

import ipaddress
import os
import pickle
import socket
import struct
from collections.abc import Callable
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import Any, NamedTuple

LOOPBACK = "127.0.0.1"
# Time limit to accept a connection, and for a new connection to identify itself.
CONNECT_S = 5.0
# A host that does not answer for this long counts as gone.
VANISHED_S = 10


class Address(NamedTuple):
    """The address of a process, and the key that it asks for."""

    host: str
    port: int
    key: bytes


def listen(host: str, port: int) -> socket.socket:
    """Listen for connections; ``port`` 0 takes any free port.

    Raises:
        OSError: the port is not available, or the address is not of this host.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=16)


def call(host: str, port: int, key: bytes, patience: float | None = None) -> socket.socket:
    """Connect to the process that listens at this address.

    Args:
        patience: seconds to wait for an answer, by default ``CONNECT_S``.

    Raises:
        OSError: no process listens at the address, or the process has another key.
    """
    patience = patience or CONNECT_S
    called = socket.create_connection((host, port), patience)
    called.settimeout(None)
    return _introduced(called, key, (answer_challenge, deliver_challenge), patience)


def let_in(caller: socket.socket, key: bytes) -> socket.socket:
    """Authenticate an incoming connection, and return it ready for use.

    Raises:
        OSError: the caller has another key, or does not identify itself.
    """
    return _introduced(caller, key, (deliver_challenge, answer_challenge), CONNECT_S)


Introduction = Callable[["Connection[Any, Any]", bytes], None]


def _introduced(
    there: socket.socket,
    key: bytes,
    steps: tuple[Introduction, Introduction],
    patience: float,
) -> socket.socket:
    try:
        _keep_watch(there)
        set_patience(there, patience)
        with Connection(os.dup(there.fileno())) as connection:
            for step in steps:
                step(connection, key)
        set_patience(there, 0)
    except BaseException as error:
        there.close()
        match error:
            case BlockingIOError():
                raise TimeoutError(f"said nothing for {patience:g} s") from None
            case AuthenticationError():
                raise PermissionError("has another key") from None
            case EOFError() | AssertionError():
                raise ConnectionError("broke off, or is none of jaxinfer's") from None
        raise
    return there


def send(there: "Connection[Any, Any]", message: object) -> None:
    """Pickle and send a message for the other side's ``recv``, faster than ``Connection.send``.

    It takes half of the time, since ``Connection.send`` uses a pickler that also handles sockets,
    which no message has.

    Raises:
        OSError: the other end is closed.
    """
    there.send_bytes(pickle.dumps(message, pickle.HIGHEST_PROTOCOL))


class Torn(OSError):
    """Raised when the sender of a message was interrupted after sending only a part of it."""


class Sender:
    """Sends as ``send`` does, but may be interrupted at any moment (for example by Ctrl-C).

    A message is then either sent or not sent. If the other side has received only half of it,
    nothing more can be sent.

    Args:
        there: socket that only this sender writes to.
    """

    def __init__(self, there: "Connection[Any, Any]") -> None:
        self._there = there
        # State of the last message: sent parts, and its size.
        self._sent: list[int] = []
        self._size = 0

    def send(self, message: object) -> None:
        """Send a message.

        Raises:
            OSError: the other end is closed.
            Torn: the message is incomplete and cannot be read.
        """
        if 0 < sum(self._sent) < self._size:
            raise Torn("a message to it was interrupted in its middle")
        data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        long = len(data) >= 2**31
        size = struct.pack("!iQ", -1, len(data)) if long else struct.pack("!i", len(data))
        parts = [memoryview(size), memoryview(data)]
        self._sent, self._size = [], len(size) + len(data)
        while parts:
            # A single call in C, so that no interrupt comes between a write and its count.
            self._sent.extend(map(os.writev, (self._there.fileno(),), (parts,)))
            parts = _rest(parts, self._sent[-1])


def _rest(parts: list[memoryview], sent: int) -> list[memoryview]:
    """Return the rest of some parts after ``sent`` bytes were sent."""
    while parts and sent >= len(parts[0]):
        sent -= len(parts.pop(0))
    return [parts[0][sent:], *parts[1:]] if parts else []


def set_patience(there: socket.socket, seconds: float) -> None:
    """Set how many seconds to wait for each part of incoming data; 0 means for ever."""
    patience = struct.pack("ll", *divmod(round(seconds * 1e6), 10**6))
    there.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, patience)


def _keep_watch(there: socket.socket) -> None:
    """Break the connection when the other host is gone, and send small messages at once."""
    there.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        (socket.TCP_NODELAY, 1),
        (socket.TCP_KEEPIDLE, VANISHED_S // 2),
        (socket.TCP_KEEPINTVL, 1),
        (socket.TCP_KEEPCNT, VANISHED_S // 2),
    ):
        there.setsockopt(socket.IPPROTO_TCP, option, value)


def be_acknowledged(there: socket.socket) -> None:
    """Also break the connection if the other host accepts no data for ``VANISHED_S`` seconds.

    Do not use it for slabs: a process that is stopped for a while (for example by Ctrl-Z) accepts
    nothing once its buffers are full. Small messages every second take about twenty minutes to fill
    them.
    """
    there.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * VANISHED_S)


def join_address(host: str, port: int) -> str:
    """Return an address as ``HOST:PORT``."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback(host: str) -> bool:
    """Tell whether a numeric address is one that other hosts cannot reach."""
    return ipaddress.ip_address(host.partition("%")[0]).is_loopback
