"""Processes that work for this process, and always end with it."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import BrokenExecutor, ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import active_children, get_context

from jaxinfer.errors import JaxinferError

# Seconds after which a worker checks again that its parent exists.
_LOOKS_S = 0.5


@contextmanager
def process_pool(count: int | None = None) -> Iterator[ProcessPoolExecutor]:
    """Yield a pool of processes; by default one for each core.

    If the code inside fails, the processes end at once, and their work is dropped.

    Raises:
        JaxinferError: one of the processes was killed.
    """
    # Not forked, because the caller may have threads, as JAX does.
    workers = count or os.cpu_count() or 1
    pool = ProcessPoolExecutor(workers, get_context("spawn"), _begin, (os.getpid(),))
    before = set(active_children())
    try:
        yield pool
    except BaseException as error:
        for child in set(active_children()) - before:
            child.kill()
        if isinstance(error, BrokenExecutor):
            raise JaxinferError(
                f"one of {workers} processes that simulate was killed, perhaps for lack "
                "of memory: run the same command again, with fewer --jobs where it has them"
            ) from None
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def _begin(parent: int) -> None:
    """Prepare a worker: leave Ctrl-C to the parent, and end when the parent does."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_LOOKS_S)
    os._exit(1)
