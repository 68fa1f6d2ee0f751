"""A process's ends of stage pairs: what they keep, and whom they blame."""

from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from waiting import HANG_S, wait_until

from jaxinfer import JaxinferError
from jaxinfer.runtime.kv import kv_endpoint
from jaxinfer.runtime.kv.kv_endpoint import KVEndpoint
from jaxinfer.runtime.kv.kv_messages import Drop, OpenEnd, Place, Pull, SlabFailed


@pytest.mark.parametrize("sends", [True, False])
def test_what_does_not_come_is_the_sender_s_fault(sends: bool) -> None:
    end: Any = SimpleNamespace(source=object() if sends else None)
    for error in (OSError("a"), EOFError("a"), TimeoutError("a"), JaxinferError("changed")):
        assert kv_endpoint._failed(3, 7, end, error).by_source
    found = kv_endpoint._failed(3, 7, end, RuntimeError("out of memory"))
    assert found == SlabFailed(3, 7, sends, "RuntimeError: out of memory")


def test_an_endpoint_keeps_no_slab_that_was_placed_or_dropped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        kv_endpoint, "SlabDest", lambda *args: SimpleNamespace(place=lambda *a: None)
    )
    posted: SimpleQueue[Any] = SimpleQueue()
    transport = SimpleNamespace(
        dropped=[], fetch=lambda *args: np.zeros(2).view(Array), close=lambda: None
    )
    transport.drop = transport.dropped.append
    stage: Any = SimpleNamespace(plan=None)
    dest = KVEndpoint({"b": [stage]}, posted.put, "127.0.0.1")
    dest._transports["host"] = transport  # type: ignore[assignment]
    form: Any = SimpleNamespace(sharding=lambda plan: None, shape=(2,), dtype=np.dtype("float32"))
    dest.do(OpenEnd(1, "b", 0, form, False, False))
    for slab in (4, 5):
        dest.do(Pull(1, slab, "host", "there"))
        assert posted.get(timeout=HANG_S)[:2] == (1, slab)
    assert list(dest._ends[1].arrived) == [4, 5]
    dest.do(Place(1, 4, [1], 0, 1))
    dest.do(Drop(1, 5, "host"))
    wait_until(lambda: transport.dropped == [5])
    assert dest._ends[1].arrived == {}
    dest.close()


class Array(np.ndarray):
    """A slab that is on no device."""

    def block_until_ready(self) -> "Array":
        return self
