"""A pool of KV heads that another process lends to a stage, as the stage's process sees it.

What a step asks of it goes by the hosts' memory and a socket, from process to process: tables once
a step; each layer's pairs, and what attention finds.
"""

import os
import threading
from collections import deque
from concurrent.futures import CancelledError, Future, InvalidStateError
from contextlib import suppress
from multiprocessing.connection import Connection
from socket import SHUT_RDWR, socket
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxinfer.errors import JaxinferError
from jaxinfer.runtime.kv.sockets import Address, call, join_address
from jaxinfer.runtime.spread.array_messages import receive_arrays, send_arrays
from jaxinfer.steps.shapes import StepShape

# Steps, or halves of steps, that are under way at once, and a few more.
MOST_BEGUN = 8


class Begin(NamedTuple):
    """Have a step's tables, see ``spread_inputs.pack``. Not answered."""

    step: int
    pairs: StepShape
    tables: np.ndarray


class BegunStep(NamedTuple):
    """A step whose tables have been told: its number from here on, and its pairs that count."""

    step: int
    num_pairs: int


class Attend(NamedTuple):
    """Do one layer's attention. Answered with the results [R, G, H] of as many pairs.

    Attributes:
        piece_RXH: the pairs that count; padding does not travel.
    """

    step: int
    layer: int
    piece_RXH: np.ndarray


class Take(NamedTuple):
    """Read pages. Answered with all layers' ``KVPages``, see ``slice_move.take``."""

    page_C: np.ndarray


class Put(NamedTuple):
    """Write pages. Answered with 0 when they are there."""

    pages: Any
    page_C: np.ndarray


class PoolFailed(NamedTuple):
    """An answer: it could not be done."""

    line: str


def padded(some: np.ndarray, size: int) -> np.ndarray:
    """So many rows, those that there are first, then zeros."""
    found = np.zeros((size, *some.shape[1:]), some.dtype)
    found[: len(some)] = some
    return found


class PoolClient:
    """Asks for what is to be done in another process, which does it in this order.

    One thread asks; another one calls that process, and hears the answers.

    Args:
        group: the one whose process that is.
        patience: see ``call``; by default the process is there, and has answered when this returns.

    Raises:
        JaxinferError: that process cannot be reached.
    """

    def __init__(self, address: Address, group: str, patience: float | None = None) -> None:
        self._who = f"attention group {group}"
        self._there: Future[Connection[Any, Any]] = Future()
        self._asked: deque[Future[Any]] = deque()
        self._lock = threading.Lock()
        self._lost: str | None = None
        self._steps = 0
        threading.Thread(target=self._hear, args=(address, patience), daemon=True).start()
        if patience is None:
            self._there.result()

    def begin(self, pairs: StepShape, tables: np.ndarray, num_pairs: int) -> BegunStep:
        """Send a step's tables; ``num_pairs`` of its pairs are not padding."""
        self._steps += 1
        self._send(Begin(self._steps, pairs, tables))
        return BegunStep(self._steps, num_pairs)

    def attend(self, begun: BegunStep, layer: int, piece_RXH: jax.Array) -> "Future[np.ndarray]":
        """Ask for one layer's attention; waits until there is something to attend to.

        Returns:
            The results [R, G, H] of the pairs that count.
        """
        return self._ask(Attend(begun.step, layer, np.asarray(piece_RXH)[: begun.num_pairs]))

    def take(self, page_C: np.ndarray) -> "Future[Any]":
        """Ask for pages, of a chunk at most."""
        return self._ask(Take(page_C))

    def put(self, pages: Any, page_C: np.ndarray) -> "Future[int]":
        """Have pages written, which may be on a device here; waits until they are there.

        Args:
            page_C: their places; pages behind as many are padding, and do not travel.
        """
        return self._ask(Put(jax.tree.map(lambda x: np.asarray(x)[: len(page_C)], pages), page_C))

    def close(self) -> None:
        """Ask for nothing any more; in any thread. Who waits for an answer hears of it.

        A host that has vanished, or a process that is stopped, would have them wait for long.
        """
        if self._there.cancel():  # Who still calls it does so for nobody.
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
            self.close()  # The thread that hears learns of it, and tells.
        except (CancelledError, JaxinferError):
            pass  # All who ask are told.

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
                if isinstance(answer, PoolFailed):
                    future.set_exception(RuntimeError(f"{self._who}: {answer.line}"))
                else:
                    future.set_result(answer)
                del answer, future
        except InvalidStateError:
            pass  # It was closed meanwhile.
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
