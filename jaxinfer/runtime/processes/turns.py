"""Two threads that take turns to read messages and to carry them out."""

import threading
from collections import deque
from collections.abc import Callable
from typing import Any


class Turns:
    """Carries out messages in order, and reads the next ones meanwhile.

    The thread that has read a message carries it out, together with all messages that the other
    thread reads during that time. Only one thread therefore has to wake up between a message's
    arrival and its execution, and no message is left unread.

    Args:
        read: waits for a message and returns it.
        do: carries out a message, and never raises.
    """

    def __init__(self, read: Callable[[], Any], do: Callable[[Any], None]) -> None:
        self._read, self._do = read, do
        self._reading, self._doing = threading.Lock(), threading.Lock()
        self._to_do: deque[Any] = deque()

    def run(self) -> None:
        """Take turns with a second thread for ever."""
        threading.Thread(target=self._take, daemon=True).start()
        self._take()

    def _take(self) -> None:
        while True:
            with self._reading:
                self._to_do.append(self._read())
            # Look once more, because the other thread may have read during the last look.
            while self._to_do and self._doing.acquire(blocking=False):
                try:
                    while self._to_do:
                        self._do(self._to_do.popleft())
                finally:
                    self._doing.release()
