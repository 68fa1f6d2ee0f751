"""A part of a stage's layers that this process computes for a stage in another process."""

import secrets
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

from jaxinfer.errors import one_line
from jaxinfer.runtime.kv.sockets import Address, let_in, listen
from jaxinfer.runtime.spread.array_messages import receive_arrays, send_arrays
from jaxinfer.runtime.spread.lender_client import RequestFailed


class Lender(ABC):
    """Carries out the requests of the stage's process, in order, until that process ends.

    Args:
        host: address of this process.

    Attributes:
        part: the kind of part, in a word.
        address: address that the stage's process connects to.
    """

    part: str

    def __init__(self, host: str) -> None:
        self._listener = listen(host, 0)
        self.address = Address(host, self._listener.getsockname()[1], secrets.token_bytes(16))

    @abstractmethod
    def compile_ahead(self) -> Iterator[int]:
        """Compile and try all programs, then accept connections; yield the number left."""

    def open(self) -> None:
        """Accept a connection from the stage's process, and serve that process from a thread."""
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        connection: Connection[Any, Any] | None = None
        while not connection:
            with suppress(OSError):  # It is not from one of our processes.
                caller, _ = self._listener.accept()
                connection = Connection(let_in(caller, self.address.key).detach())
        self._listener.close()
        with suppress(EOFError, OSError), connection:
            while True:
                message = receive_arrays(connection)
                try:
                    answer = self._do(message)
                except (EOFError, OSError):
                    raise
                except Exception as error:
                    answer = RequestFailed(f"{type(error).__name__}: {one_line(error)}")
                if answer is not None:
                    send_arrays(connection, answer)

    @abstractmethod
    def _do(self, message: Any) -> Any:
        """Carry out a request; return its answer, or None if it has none."""
