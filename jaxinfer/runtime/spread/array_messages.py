"""Messages with arrays between processes, without copying large arrays."""

import io
import os
import pickle
import struct
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

# Number of buffers that the system takes at once.
MOST_PARTS = os.sysconf("SC_IOV_MAX")


def send_arrays(there: "Connection[Any, Any]", message: object) -> None:
    """Send a message for ``receive_arrays``; do not copy contiguous arrays.

    Raises:
        OSError: the other end is closed.
    """
    head, buffers = io.BytesIO(), list[pickle.PickleBuffer]()
    _ArrayPickler(head, pickle.HIGHEST_PROTOCOL, buffer_callback=buffers.append).dump(message)
    parts = [head.getbuffer(), *(buffer.raw() for buffer in buffers)]
    sizes = struct.pack(f"!{1 + len(parts)}Q", len(parts), *map(len, parts))
    parts.insert(0, memoryview(sizes))
    while parts:
        sent = os.writev(there.fileno(), parts[:MOST_PARTS])
        while parts and sent >= len(parts[0]):
            sent -= len(parts.pop(0))
        if sent:
            parts[0] = parts[0][sent:]


class _ArrayPickler(pickle.Pickler):
    """Pickles arrays with types that NumPy lacks, such as bfloat16, as bytes, with a copy."""

    def reducer_override(self, found: Any) -> Any:
        """Pickle only such arrays in another way."""
        if isinstance(found, np.ndarray) and found.dtype.kind == "V" and found.ndim:
            return _typed, (np.ascontiguousarray(found).view(np.uint8), found.dtype)
        return NotImplemented


def _typed(found: np.ndarray, dtype: np.dtype) -> np.ndarray:
    return found.view(dtype)


def receive_arrays(there: "Connection[Any, Any]") -> Any:
    """Wait for a message from ``send_arrays``, and return it.

    Raises:
        EOFError: the other side has closed the connection.
        OSError: the connection is broken.
    """
    (count,) = struct.unpack("!Q", _read(there, 8))
    sizes = struct.unpack(f"!{count}Q", _read(there, 8 * count))
    head, *buffers = [_read(there, size) for size in sizes]
    return pickle.loads(head, buffers=buffers)


def _read(there: "Connection[Any, Any]", size: int) -> memoryview:
    left = found = np.empty(size, np.uint8).data  # A bytearray would be filled with zeros first.
    while left:
        if not (got := os.readv(there.fileno(), [left])):
            raise EOFError
        left = left[got:]
    return found
