"""Transports of slabs: one side offers a slab under a number, and the other fetches it."""

import secrets
import socket
import threading
import time
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any, ClassVar, Protocol

import jax
import numpy as np
from jax.experimental import transfer
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from jaxinfer.errors import JaxinferError
from jaxinfer.models.layouts import DEFAULT_AXIS
from jaxinfer.runtime.kv.kv_messages import TransportName
from jaxinfer.runtime.kv.slab import SlabFormat
from jaxinfer.runtime.kv.sockets import Address, call, join_address, let_in, listen


class Transport(Protocol):
    """One process's end of a transport.

    Attributes:
        in_place: whether the thread that offered a slab also fetches it, because a fetch need not
            wait; otherwise a thread of the destination's side fetches the slab.
        advice: what a user can do if an array arrives changed.
        address: address from which the other side fetches.
    """

    in_place: ClassVar[bool]
    advice: ClassVar[str]
    address: Any

    def offer(self, number: int, array: jax.Array, form: SlabFormat) -> None:
        """Make a slab available under a number that is never reused."""

    def drop(self, number: int) -> None:
        """Withdraw an offer that has not been fetched."""

    def fetch(
        self, number: int, address: Any, form: SlabFormat, sharding: Sharding, patience_s: float
    ) -> "np.ndarray | jax.Array":
        """Fetch an offered slab from the address; each slab can be fetched once.

        Args:
            sharding: final sharding of the slab, which the caller applies.

        Raises:
            JaxinferError: no slab with this number is offered.
            OSError, EOFError: the other process cannot be reached, or sends nothing for
                ``patience_s`` seconds.
        """

    def close(self) -> None:
        """Stop offering slabs."""


class DeviceTransport:
    """Carries slabs within a process: the array itself is offered and fetched.

    Args:
        host: not used.
    """

    in_place: ClassVar = True
    advice: ClassVar = (
        "; peer-to-peer copies between these devices do not work (with CUDA, try "
        "NCCL_P2P_DISABLE=1 or other devices)"
    )

    def __init__(self, host: str) -> None:
        self.address = None
        self._offers: dict[int, jax.Array] = {}

    def offer(self, number: int, array: jax.Array, form: SlabFormat) -> None:
        """See Transport."""
        self._offers[number] = array

    def drop(self, number: int) -> None:
        """See Transport."""
        self._offers.pop(number, None)

    def fetch(
        self, number: int, address: None, form: SlabFormat, sharding: Sharding, patience_s: float
    ) -> jax.Array:
        """See Transport."""
        if (array := self._offers.pop(number, None)) is None:
            raise JaxinferError(f"slab {number} is not offered")
        return array

    def close(self) -> None:
        """See Transport."""
        self._offers.clear()


class ArrayForm(Protocol):
    """The shape and dtype of an array, known before it arrives."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Dimensions of the slab."""

    @property
    def dtype(self) -> np.dtype:
        """Type of the slab's numbers."""


class TcpTransport:
    """Carries slabs through host memory and a socket, between any two devices.

    Args:
        host: address of this process.
        waits: let a fetch wait until a slab with its number is offered.
    """

    in_place: ClassVar = False
    advice: ClassVar = ""

    def __init__(self, host: str, waits: bool = False) -> None:
        self._listener = listen(host, 0)
        port = self._listener.getsockname()[1]
        self.address = Address(host, port, secrets.token_bytes(16))
        self._closed = False
        self._offers: dict[int, np.ndarray] = {}
        self._waits, self._is_news = waits, threading.Condition()
        # One per pulling thread, so that none waits for another's slab.
        self._sources: dict[tuple[int, Address], Connection[Any, Any]] = {}
        threading.Thread(target=self._accept, daemon=True).start()

    def offer(self, number: int, array: jax.Array, form: ArrayForm) -> None:
        """See Transport."""
        found = np.asarray(array)
        with self._is_news:
            self._offers[number] = found
            self._is_news.notify_all()

    def drop(self, number: int) -> None:
        """See Transport."""
        self._offers.pop(number, None)

    def drop_all(self) -> None:
        """Withdraw all offers that have not been fetched."""
        self._offers.clear()

    def fetch(
        self,
        number: int,
        address: Address,
        form: ArrayForm,
        sharding: Sharding,
        patience_s: float | None,
    ) -> np.ndarray:
        """See Transport; waits for ever if ``patience_s`` is None."""
        thread = threading.get_ident(), address
        if thread not in self._sources:
            self._sources[thread] = Connection(call(*address).detach())
        source = self._sources[thread]
        try:
            source.send(number)
            if not source.poll(patience_s):
                raise TimeoutError(f"no slab after {patience_s:g} s")
            data = source.recv_bytes()
        except (EOFError, OSError):
            # Closed, because late data would be taken for the next slab.
            self._sources.pop(thread).close()
            raise
        if not data:
            raise JaxinferError(f"slab {number} is not offered")
        return np.frombuffer(data, form.dtype).reshape(form.shape)

    def close(self) -> None:
        """Accept no more connections, and close those from which slabs came."""
        self._closed = True
        for source in list(self._sources.values()):
            source.close()
        # Closing a socket does not wake a thread that waits for it.
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        with self._is_news:
            self._offers.clear()
            self._is_news.notify_all()

    def _found(self, number: int) -> np.ndarray | None:
        with self._is_news:
            if self._waits:
                self._is_news.wait_for(lambda: number in self._offers or self._closed)
            return self._offers.pop(number, None)

    def _accept(self) -> None:
        while not self._closed:
            try:
                caller, _ = self._listener.accept()
            except OSError:
                time.sleep(0.01)  # The connection is gone, or this is closed.
                continue
            threading.Thread(target=self._serve, args=(caller,), daemon=True).start()
        self._listener.close()

    def _serve(self, caller: socket.socket) -> None:
        try:
            client: Connection[Any, Any] = Connection(let_in(caller, self.address.key).detach())
        except OSError:
            return  # It is not from one of our processes.
        try:
            while True:
                found = self._found(client.recv())
                if found is None:
                    client.send_bytes(b"")
                else:
                    client.send_bytes(found.view(np.uint8).reshape(-1).data)
        except (EOFError, OSError):
            client.close()  # The pulling process is gone.


# Each connection to a server takes one; servers with fewer than their peer have aborted.
ADDRESSES = 8


class JaxTransport:
    """Carries slabs by ``jax.experimental.transfer``, directly between devices if platforms can.

    An offer that is never pulled stays in memory: the server cannot withdraw it.

    Args:
        host: address of this process.
    """

    in_place: ClassVar = False
    advice: ClassVar = ""

    def __init__(self, host: str) -> None:
        client = jax.local_devices()[0].client
        port = join_address(host, 0)
        self._server = transfer.start_transfer_server(client, port, [port] * ADDRESSES)
        self.address = self._server.address()
        self._sources: dict[str, transfer.TransferConnection] = {}

    def offer(self, number: int, array: jax.Array, form: SlabFormat) -> None:
        """See Transport."""
        self._server.await_pull(number, [jax.device_put(array, _shared(array.sharding, form))])

    def drop(self, number: int) -> None:
        """Do nothing: the server cannot withdraw an offer."""

    def fetch(
        self, number: int, address: str, form: SlabFormat, sharding: Sharding, patience_s: float
    ) -> jax.Array:
        """See Transport; a slab that was never offered times out, like a lost one."""
        if address not in self._sources:
            self._sources[address] = self._server.connect(address)
        like = jax.ShapeDtypeStruct(form.shape, form.dtype, sharding=_shared(sharding, form))
        array = self._sources[address].pull(number, [like])[0]
        end = time.monotonic() + patience_s
        while not array.is_ready():
            if time.monotonic() > end:
                raise TimeoutError(f"no slab after {patience_s:g} s")
            time.sleep(2e-4)
        return array

    def close(self) -> None:
        """Do nothing: the server ends with the process."""


def _shared(sharding: Sharding, form: SlabFormat) -> NamedSharding:
    """Return the sharding with which both sides have equally many shards."""
    assert isinstance(sharding, NamedSharding)
    mesh = Mesh(sharding.mesh.devices.flat[: form.shards], (DEFAULT_AXIS,))
    return NamedSharding(mesh, PartitionSpec(*[None] * 3, DEFAULT_AXIS))


TRANSPORTS: dict[TransportName, type[DeviceTransport | TcpTransport | JaxTransport]] = {
    "device": DeviceTransport,
    "host": TcpTransport,
    "transfer_server": JaxTransport,
}
