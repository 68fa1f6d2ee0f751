"""Messages to and from a process that lends a pool: their order, and when they break off."""

import secrets
import threading
import time
from contextlib import ExitStack, suppress
from socket import socket
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from jaxinfer import JaxinferError
from jaxinfer.runtime.kv.sockets import LOOPBACK, Address, call, listen
from jaxinfer.runtime.spread.pool_client import Attend, Begin, PoolClient, Put, Take
from jaxinfer.runtime.spread.pool_server import PoolServer
from jaxinfer.steps.shapes import StepShape

GONE = r"^attention group a has broken off: (EOF|ConnectionReset)Error: "


class Lender(PoolServer):
    """Notes what it is asked for, which it does none of; breaks off where it is to write."""

    def __init__(self, breaks: bool = False) -> None:
        self.breaks = breaks
        self._listener = listen(LOOPBACK, 0)
        self.address = Address(LOOPBACK, self._listener.getsockname()[1], secrets.token_bytes(9))
        self.done: list[Any] = []
        self._begun = {}
        self._pool: Any = SimpleNamespace(sharding=None)
        self.go = threading.Event()
        threading.Thread(target=self._serve, daemon=True).start()

    def _do(self, message: Any) -> Any:
        self.done.append(message)
        match message:
            case Begin():
                return super()._do(message)
            case Attend(step, layer):
                if isinstance(self._begun[step], Exception):
                    return super()._do(message)
                return np.full(2, layer)
            case Take():
                assert self.go.wait(20)
                raise ValueError("no\nsuch page")
            case Put():
                if self.breaks:
                    assert self.go.wait(20)
                    raise EOFError
                return 0


def test_answers_come_in_the_order_of_what_was_asked() -> None:
    lender = Lender()
    with pytest.raises(PermissionError):
        call(*lender.address._replace(key=b"another"))
    pool = PoolClient(lender.address, "a")
    pairs, tables, page_C = StepShape(1, 2, 0), np.arange(3), np.zeros(2, np.int32)
    one, two = pool.begin(pairs, tables, 2), pool.begin(pairs, tables, 1)
    assert one != two
    piece: Any = np.arange(24.0).reshape(2, 3, 4)
    found = [pool.attend(step, layer, piece) for layer in (0, 1) for step in (one, two)]
    lender.go.set()
    taken, put = pool.take(page_C), pool.put([piece], page_C[:1])
    assert [answer.result(20)[0] for answer in found] == [0, 0, 1, 1]
    assert put.result(20) == 0
    with pytest.raises(RuntimeError, match=r"^attention group a: ValueError: no such page$"):
        taken.result(20)
    assert [type(each) for each in lender.done] == [Begin] * 2 + [Attend] * 4 + [Take, Put]
    begun = [each.step for each in lender.done[:2]]
    attends = lender.done[2:6]
    assert [(each.step, each.layer) for each in attends] == [
        (step, layer) for layer in (0, 1) for step in begun
    ]
    # Pairs and pages that are padding do not travel.
    for each, count in zip(attends, [2, 1, 2, 1], strict=True):
        np.testing.assert_array_equal(each.piece_RXH, piece[:count])
    (pages,), there_C = lender.done[-1]
    np.testing.assert_array_equal(pages, piece[:1])
    assert there_C.tolist() == [0]


def test_tables_that_cannot_be_had_are_told_of_by_their_step() -> None:
    """``begin`` is not answered: an answer to it would be taken for one to what comes next."""
    lender = Lender()
    pool = PoolClient(lender.address, "a")
    pairs, page_C = StepShape(1, 2, 0), np.zeros(2, np.int32)
    bad, good = (pool.begin(pairs, np.array([each]), 2) for each in (object(), 1))
    piece: Any = np.zeros((2, 3, 4))
    asked = [(step, pool.attend(step, layer, piece)) for layer in (5, 6) for step in (bad, good)]
    put = pool.put([piece], page_C)
    found = []
    for step, answer in asked:
        if step == good:
            found.append(answer.result(20)[0])
            continue
        with pytest.raises(RuntimeError, match=r"^attention group a: TypeError: .*object"):
            answer.result(20)
    assert found == [5, 6]
    assert put.result(20) == 0


def test_who_waits_for_a_process_that_has_gone_hears_of_it() -> None:
    lender = Lender(breaks=True)
    pool = PoolClient(lender.address, "a")
    page_C = np.zeros(2, np.int32)
    waits = [pool.put([page_C], page_C), pool.take(page_C)]
    lender.go.set()
    for each in waits:
        with pytest.raises(EOFError, match=GONE):
            each.result(20)
    with pytest.raises(EOFError, match=GONE):
        pool.take(page_C)
    pool.close()


def test_who_waits_for_one_that_is_silent_hears_when_it_is_given_up() -> None:
    """The other side is as silent as a vanished host: nothing breaks off by itself."""
    lender = Lender(breaks=True)
    pool = PoolClient(lender.address, "a")
    waits = pool.take(np.zeros(2, np.int32))
    pool.close()
    with pytest.raises(EOFError, match=GONE):
        waits.result(20)
    pool.close()
    lender.go.set()


def test_who_cannot_be_reached_is_named() -> None:
    with listen(LOOPBACK, 0) as listener:
        port = listener.getsockname()[1]
    with pytest.raises(
        JaxinferError, match=rf"^attention group a cannot be .* 127\.0\.0\.1:{port}: "
    ):
        PoolClient(Address(LOOPBACK, port, b"key"), "a")


def test_one_that_is_silent_is_waited_for_as_long_as_is_said() -> None:
    """It listens and takes nobody in, as when it is stopped; and breaks off when it is ended."""
    listener = listen(LOOPBACK, 0)
    address = Address(LOOPBACK, listener.getsockname()[1], b"key")
    for patience, why in ((0.2, r"said nothing for 0\.2 s"), (60.0, "")):
        pool = PoolClient(address, "a", patience)
        end = threading.Timer(0.2, listener.close)
        if patience > 1:
            end.start()
        found = pool.take(np.zeros(2, np.int32))
        with pytest.raises(EOFError, match=rf"^attention group a cannot be reached at .*: {why}"):
            found.result(20)


def test_a_host_that_has_vanished_is_given_up_by_whoever_knows() -> None:
    """It takes no connection. Nobody but those who ask waits, until the pool is closed."""
    with socket() as listener, ExitStack() as callers:
        listener.bind((LOOPBACK, 0))
        listener.listen(0)
        for _ in range(4):  # There is room for one or two.
            caller = callers.enter_context(socket())
            caller.setblocking(False)
            with suppress(BlockingIOError):
                caller.connect(listener.getsockname())
        begin = time.monotonic()
        pool = PoolClient(Address(LOOPBACK, listener.getsockname()[1], b"key"), "a", 60.0)
        found: list[str] = []

        def ask() -> None:
            page_C = np.zeros(2, np.int32)
            for _ in range(2):
                with pytest.raises(EOFError) as lost:
                    pool.take(page_C).result()
                found.append(str(lost.value))

        asks = threading.Thread(target=ask)
        asks.start()
        asks.join(0.3)
        assert not found
        pool.close()
        pool.close()
        asks.join(20)
        assert found == ["attention group a has broken off before it could be reached"] * 2
        assert time.monotonic() - begin < 20
