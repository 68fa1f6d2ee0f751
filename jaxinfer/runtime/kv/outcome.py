"""The end of a step or of a part of it: done on this host or in another process, or failed."""

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import NamedTuple

from jaxinfer.serving.batch import Transfer
from jaxinfer.serving.world import StepDone


@dataclass(frozen=True)
class Failed:
    """An instance has failed.

    Attributes:
        transfer: transfer in which another instance noticed the failure, perhaps after a new
            process had replaced the lost one. If the transfer has been given up by then, the
            failure is an old one.
    """

    instance: str
    error: Exception
    transfer: Transfer | None = None


class ProcessLost(Exception):
    """A process has ended, or no longer answers."""


class SlabLost(Exception):
    """A slab failed, for the reason in its message."""


class StepEnd(NamedTuple):
    """The end of a stage's part of a step in another process; only that process can wait for it."""

    instance: str
    step: int
    stage: int


Post = Callable[[StepDone | Failed], None]
# The future result of a stage's part of a step, or its name in another process.
End = Future[None] | StepEnd
# Called with a stage's number and its end, once it has been launched.
Launched = Callable[[int, End], None]


def join(threads: Iterable[threading.Thread]) -> None:
    """Wait for threads that were told to end, but not for a thread that hangs.

    A thread that still frees arrays when the interpreter ends would crash the interpreter.
    """
    for thread in threads:
        if thread is not threading.current_thread():
            thread.join(timeout=2)
