"""How a stage's process uses another process that computes a part of its layers.

Data travels from process to process through host memory and a socket.
"""

import os
import threading
from collections import deque
from concurrent.futures import CancelledError, Future, InvalidStateError
from contextlib import suppress
from multiprocessing.connection import Connection
from socket import SHUT_RDWR, socket
from typing import Any, NamedTuple

import numpy as np

from jaxinfer.errors import JaxinferError
from jaxinfer.runtime.kv.sockets import Address, call, join_address
from jaxinfer.runtime.spread.array_messages import receive_arrays, send_arrays


class RequestFailed(NamedTuple):
    """An answer that says that a request has failed, and why."""

    line: str


def padded(some: np.ndarray, size: int) -> np.ndarray:
    """Return ``size`` rows: the given rows, followed by zeros."""
    found = np.zeros((size, *some.shape[1:]), some.dtype)
    found[: len(some)] = some
    return found


class LenderClient:
    """Sends requests to another process, which carries them out in order.

    One thread sends requests; another one connects and reads the answers.

    Args:
        group: group of the other process.
        patience: see ``call``; by default, the process is ready, and this waits for its answer.

    Attributes:
        part: the kind of part, in a word.

    Raises:
        JaxinferError: that process cannot be reached.
    """

    part: str

    def __init__(self, address: Address, group: str, patience: float | None = None) -> None:
        self._who = f"{self.part} group {group}"
        self._there: Future[Connection[Any, Any]] = Future()
        self._asked: deque[Future[Any]] = deque()
        self._lock = threading.Lock()
        self._lost: str | None = None
        threading.Thread(target=self._hear, args=(address, patience), daemon=True).start()
        if patience is None:
            self._there.result()

    def close(self) -> None:
        """Stop sending requests, from any thread. Threads that wait for an answer get an error.

        Otherwise, a host that has vanished or a process that was stopped would keep these threads
        waiting for long.
        """
        if self._there.cancel():  # Callers that are still waiting no longer need it.
            self._lose(f"{self._who} has broken off before it could be reached")
        elif not self._there.exception():
            connection = self._there.result()
            with suppress(OSError), socket(fileno=os.dup(connection.fileno())) as there:
                there.shutdown(SHUT_RDWR)

    def _ask(self, message: Any) -> "Future[Any]":
        future: Future[Any] = Future()
        with self._lock:
            if self._lost:
                raise EOFError(self._lost)
            self._asked.append(future)
        self._send(message)
        return future

    def _send(self, message: Any) -> None:
        try:
            send_arrays(self._there.result(), message)
        except OSError:
            self.close()  # The thread that reads learns of it, and reports it.
        except (CancelledError, JaxinferError):
            pass  # All waiting callers are told.

    def _call(self, address: Address, patience: float | None) -> "Connection[Any, Any]":
        try:
            connection: Connection[Any, Any] = Connection(call(*address, patience).detach())
        except OSError as error:
            where = join_address(address.host, address.port)
            lost = JaxinferError(f"{self._who} cannot be reached at {where}: {error}")
            self._there.set_exception(lost)
            raise lost from None
        self._there.set_result(connection)
        return connection

    def _hear(self, address: Address, patience: float | None) -> None:
        try:
            connection = self._call(address, patience)
            while True:
                answer = receive_arrays(connection)
                future = self._asked.popleft()
                if isinstance(answer, RequestFailed):
                    future.set_exception(RuntimeError(f"{self._who}: {answer.line}"))
                else:
                    future.set_result(answer)
                del answer, future
        except InvalidStateError:
            pass  # It has been closed since then.
        except JaxinferError as error:
            self._lose(str(error))
        except Exception as error:
            self._lose(f"{self._who} has broken off: {type(error).__name__}: {error}")

    def _lose(self, why: str) -> None:
        with self._lock:
            if self._lost:
                return
            self._lost = why
        for future in self._asked:
            future.set_exception(EOFError(why))
