"""How a slab gets from one process to another: offered by a number in one, pulled in the other."""

import secrets
import threading
from multiprocessing.connection import Client, Connection, Listener
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Sharding

from jaxinfer.errors import JaxinferError
from jaxinfer.runtime.slab import SlabFormat


class Address(NamedTuple):
    """Where a process's slabs are to be fetched."""

    host: str
    port: int
    key: bytes


class HostCarrier:
    """By the memory of the host and a socket: for any pair of devices.

    Attributes:
        address: of this process.
    """

    def __init__(self, host: str = "127.0.0.1") -> None:
        key = secrets.token_bytes(16)
        self._listener = Listener((host, 0), backlog=16, authkey=key)
        self.address = Address(host, self._listener.address[1], key)
        self._offers: dict[int, np.ndarray] = {}
        # Of each thread that pulls, so that none waits for another's slab.
        self._sources: dict[tuple[int, Address], Connection[Any, Any]] = {}
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def num_offers(self) -> int:
        """Slabs that nobody has pulled yet."""
        return len(self._offers)

    def offer(self, number: int, array: jax.Array) -> None:
        """Have a slab ready under a number that is never used again."""
        self._offers[number] = np.asarray(array)

    def drop(self, number: int) -> None:
        """Take an offer back, if it has not been pulled."""
        self._offers.pop(number, None)

    def pull(
        self, number: int, address: Address, form: SlabFormat, sharding: Sharding, patience_s: float
    ) -> jax.Array:
        """Fetch a slab that another process has offered; each is there once.

        Raises:
            JaxinferError: nothing of that number is offered.
            OSError, EOFError: the other process cannot be reached, or sends nothing for
                ``patience_s`` seconds.
        """
        thread = threading.get_ident(), address
        if thread not in self._sources:
            host, port, key = address
            self._sources[thread] = Client((host, port), authkey=key)
        source = self._sources[thread]
        source.send(number)
        if not source.poll(patience_s):
            del self._sources[thread]  # What comes late would be taken for the next one.
            raise TimeoutError(f"no slab after {patience_s:g} s")
        data = source.recv_bytes()
        if not data:
            raise JaxinferError(f"slab {number} is not offered")
        array = np.frombuffer(data, form.dtype).reshape(form.shape)
        return jax.device_put(array, sharding)

    def close(self) -> None:
        """Accept no more."""
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                client = self._listener.accept()
            except OSError:
                return  # Closed.
            except Exception:
                continue
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: "Connection[Any, Any]") -> None:
        try:
            while True:
                found = self._offers.pop(client.recv(), None)
                if found is None:
                    client.send_bytes(b"")
                else:
                    client.send_bytes(found.view(np.uint8).reshape(-1).data)
        except (EOFError, OSError):
            client.close()  # Whoever pulled is gone.
