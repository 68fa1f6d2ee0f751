"""Ends of a step or a part of it: done on this host or in another process, or failed."""

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import NamedTuple

from jaxinfer.serving.batch import Transfer
from jaxinfer.serving.world import StepDone


@dataclass(frozen=True)
class Failed:
    """An instance can do no more.

    Attributes:
        transfer: what another has found the failure by, maybe after a process that is new has taken
            the lost one's place. By then this has been given up, and so the failure is an old one.
    """

    instance: str
    error: Exception
    transfer: Transfer | None = None


class ProcessLost(Exception):
    """A process has ended, or says nothing any more."""


class SlabLost(Exception):
    """A slab did not get on, for the reason that its line gives."""


class StepEnd(NamedTuple):
    """The end of a stage's part of a step in another process, which alone can wait for it."""

    instance: str
    step: int
    stage: int


Post = Callable[[StepDone | Failed], None]
# What will be done when a stage's part of a step has ended, or what names it in another process.
End = Future[None] | StepEnd
# Called with a stage's number when it has been launched, and its end.
Launched = Callable[[int, End], None]


def join(threads: Iterable[threading.Thread]) -> None:
    """Wait for threads that have been told to end, but not for one that hangs.

    One that was still freeing arrays when the interpreter ends would crash it.
    """
    for thread in threads:
        if thread is not threading.current_thread():
            thread.join(timeout=2)
