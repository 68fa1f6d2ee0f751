"""Waiting for what other threads and processes do."""

import time
from collections.abc import Callable

# What takes so long is not to come, however busy the machine is.
HANG_S = 120.0


def wait_until(there: Callable[[], object]) -> None:
    end = time.monotonic() + HANG_S
    while not there():
        assert time.monotonic() < end, "it does not come"
        time.sleep(0.01)
