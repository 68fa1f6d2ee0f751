"""Messages with arrays from process to process: what arrives is what was sent, however it came."""

import os
import threading
from collections.abc import Sequence
from multiprocessing.connection import Connection
from socket import socketpair
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from waiting import HANG_S

from jaxinfer.runtime.spread.array_messages import MOST_PARTS, receive_arrays, send_arrays

TYPES = [np.float32, np.int8, np.bool_, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn]


def connected() -> list["Connection[Any, Any]"]:
    return [Connection(end.detach()) for end in socketpair()]


def sent(messages: list[Any]) -> list[Any]:
    """Return what arrives of messages that another thread sends."""
    there, here = connected()

    def send() -> None:
        with there:
            for each in messages:
                send_arrays(there, each)

    with here:
        sender = threading.Thread(target=send)
        sender.start()
        found = [receive_arrays(here) for _ in messages]
        with pytest.raises(EOFError):  # Nothing is left over.
            receive_arrays(here)
        sender.join(HANG_S)
    return found


@st.composite
def arrays(draw: st.DrawFn) -> np.ndarray:
    """Some, of few bytes or more than the system holds, that lie as they may."""
    shape = draw(st.sampled_from([(), (0, 3), (5,), (3, 4, 2), (70, 3, 64)]))
    array = np.arange(np.prod(shape, dtype=int)).reshape(shape).astype(draw(st.sampled_from(TYPES)))
    match draw(st.sampled_from(["plain", "turned", "some", "backwards"])):
        case "turned":
            return array.T
        case "some":
            return array[::2] if array.ndim else array
        case "backwards":
            return array[::-1] if array.ndim else array
    return array


@given(st.lists(st.lists(arrays(), max_size=4), min_size=1, max_size=4), st.integers(1, 9000))
@settings(max_examples=60, deadline=None)
def test_arrays_arrive_as_they_were_sent(messages: list[list[np.ndarray]], most: int) -> None:
    """The operating system accepts at most this number of bytes at a time."""
    write = os.writev

    def write_some(number: int, parts: Sequence[memoryview]) -> int:
        left, some = max(most, sum(map(len, parts)) // 50), []
        for part in parts:
            some.append(part[:left])
            left -= len(some[-1])
        return write(number, some)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "writev", write_some)
        found = sent(messages)
    for then, now in zip(messages, found, strict=True):
        for one, other in zip(then, now, strict=True):
            assert (one.dtype, one.shape) == (other.dtype, other.shape)
            assert one.tobytes() == other.tobytes()


def test_more_arrays_arrive_than_the_system_takes_at_once() -> None:
    many = [np.full(3, number, np.int32) for number in range(2 * MOST_PARTS + 3)]
    (found,) = sent([many])
    np.testing.assert_array_equal(found, many)


def test_an_array_is_sent_as_it_lies_when_it_is_sent() -> None:
    """Whoever has sent one may write to it again."""
    array = np.zeros(4)
    there, here = connected()
    with there, here:
        for value in (1.0, 2.0):
            array[:] = value
            send_arrays(there, ("x", array))
        array[:] = 3
        assert [receive_arrays(here)[1].tolist() for _ in range(2)] == [[1.0] * 4, [2.0] * 4]


@pytest.mark.parametrize("count", [0, 4, 20, 60, -1])
def test_a_message_that_breaks_off_is_the_end(count: int) -> None:
    there, here = connected()
    with there, here:
        send_arrays(there, np.arange(9))
        whole = here._recv(8 + 2 * 8).getvalue()  # type: ignore[attr-defined]
        size = sum(np.frombuffer(whole, ">u8")[1:])
        whole += here._recv(int(size)).getvalue()  # type: ignore[attr-defined]
        there._send(whole[:count])  # type: ignore[attr-defined]
        there.close()
        with pytest.raises(EOFError):
            receive_arrays(here)


def test_nobody_there_is_told() -> None:
    there, here = connected()
    here.close()
    with there, pytest.raises(OSError, match="Broken pipe"):
        send_arrays(there, np.arange(9))
