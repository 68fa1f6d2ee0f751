"""Transports of slabs: what is there once, what is broken, what is left when they are closed."""

import gc
import os
import socket
import threading
import weakref
from multiprocessing.connection import Client
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from waiting import wait_until

from jaxinfer import JaxinferError
from jaxinfer.runtime.kv.transports import DeviceTransport, TcpTransport


def test_a_transport_that_is_closed_leaves_no_thread_and_no_port() -> None:
    before = threading.active_count()
    transport = TcpTransport("127.0.0.1")
    host, port, key = transport.address
    # Whoever is no part of the job, or goes away while it introduces itself, stops nobody else.
    socket.create_connection((host, port)).close()
    form: Any = SimpleNamespace()
    transport.offer(7, jax.numpy.arange(6.0), form)
    with Client((host, port), authkey=key) as client:
        client.send(7)
        assert np.frombuffer(client.recv_bytes(), np.float32).tolist() == [0, 1, 2, 3, 4, 5]
        client.send(7)
        assert client.recv_bytes() == b""  # Each is there once.
    transport.close()
    wait_until(lambda: threading.active_count() <= before)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((host, port))
    kept = weakref.ref(transport)
    del transport

    def is_gone() -> bool:
        gc.collect()
        return kept() is None

    wait_until(is_gone)  # Threads of other tests may have ended in place of its own.


def test_a_connection_that_is_broken_is_not_kept() -> None:
    """The next slab comes by a new one; and a transport that is closed has none."""
    form: Any = SimpleNamespace(dtype=np.dtype("float32"), shape=(2,))
    on = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    here, there = TcpTransport("127.0.0.1"), TcpTransport("127.0.0.1")
    for number in range(3):
        there.offer(number, jax.numpy.full(2, number, "float32"), form)
    assert here.fetch(0, there.address, form, on, 9)[0] == 0
    (broken,) = here._sources.values()
    server = socket.socket(fileno=os.dup(broken.fileno()))
    server.shutdown(socket.SHUT_RDWR)
    server.close()
    with pytest.raises((EOFError, OSError)):
        here.fetch(1, there.address, form, on, 9)
    assert broken.closed
    assert here._sources == {}
    assert here.fetch(2, there.address, form, on, 9)[0] == 2
    (left,) = here._sources.values()
    here.close()
    there.close()
    assert left.closed


def test_within_a_process_the_array_itself_is_there_once() -> None:
    form: Any = None
    on = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    transport = DeviceTransport("127.0.0.1")
    arrays = [jax.numpy.zeros(2) for _ in range(2)]
    for number, array in enumerate(arrays):
        transport.offer(number, array, form)
    assert transport.fetch(0, None, form, on, 9) is arrays[0]
    transport.drop(1)
    for number in range(2):
        with pytest.raises(JaxinferError, match=f"slab {number} is not offered"):
            transport.fetch(number, None, form, on, 9)
