"""Ends a command on Ctrl-C (SIGINT) and SIGTERM with one line, and quickly.

This module is loaded before all slow imports, so it needs none of them.
"""

import os
import signal
import sys
import threading
import time
from contextlib import suppress
from types import FrameType
from typing import NoReturn

# For commands that clean up; then the command ends, whatever it is doing.
GRACE_S = 3.0
_WORDS = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated"}


class Interrupted(BaseException):
    """A signal has arrived. ``code`` is the exit code that shells expect."""

    def __init__(self, number: int) -> None:
        super().__init__(_WORDS[signal.Signals(number)])
        self.code = 128 + number


def end_on_signals() -> None:
    """Raise ``Interrupted`` in the main thread on a signal; after ``GRACE_S``, end the process.

    The exception alone is not enough: it waits until a call into C++ ends, such as a long
    compilation, and it is lost if C++ has called Python.
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    for number in _WORDS:
        signal.signal(number, _interrupt)
    sys.unraisablehook = _report
    threading.Thread(target=_end, args=(reader,), daemon=True).start()


def leave(message: str, code: int) -> NoReturn:
    """End the process at once, with one line on stderr.

    ``sys.exit`` would shut down the interpreter under XLA's threads, which then abort.
    """
    if multiprocessing := sys.modules.get("multiprocessing"):
        for child in multiprocessing.active_children():
            child.kill()
    with suppress(OSError):  # Its output is full or closed, and so may be the next one's.
        sys.stdout.flush()
    with suppress(OSError):
        print(f"jaxinfer: {' '.join(message.split())}", file=sys.stderr, flush=True)
    os._exit(code)


def _interrupt(number: int, frame: FrameType | None) -> NoReturn:
    for other in _WORDS:
        signal.signal(other, signal.SIG_IGN)  # A second signal would stop the clean-up.
    raise Interrupted(number)


def _report(lost: "sys.UnraisableHookArgs") -> None:
    """Report an unhandled exception; leave a signal's to the thread that ends the process."""
    if not isinstance(lost.exc_value, Interrupted):
        sys.__unraisablehook__(lost)


def _end(reader: int) -> None:
    while (number := os.read(reader, 1)[0]) not in _WORDS:
        pass  # It belongs to another handler.
    time.sleep(GRACE_S)
    if sys.stderr.isatty():
        print("\x1b[?25h", file=sys.stderr)  # Show the cursor, which progress bars hide.
    ended = Interrupted(number)
    leave(str(ended), ended.code)
