"""Two threads that take turns at reading messages and at doing what they say."""

import threading
from collections import deque
from collections.abc import Callable
from typing import Any


class Turns:
    """Messages are done in order, and read meanwhile.

    Who has read a message does it, and all that the other thread reads while that takes. So one
    thread wakes up between a message's arrival and what it says, and none is left unread.

    Args:
        read: waits for a message and returns it.
        do: does what one says, and raises nothing.
    """

    def __init__(self, read: Callable[[], Any], do: Callable[[Any], None]) -> None:
        self._read, self._do = read, do
        self._reading, self._doing = threading.Lock(), threading.Lock()
        self._to_do: deque[Any] = deque()

    def run(self) -> None:
        """Take turns with a thread of its own, for ever."""
        threading.Thread(target=self._take, daemon=True).start()
        self._take()

    def _take(self) -> None:
        while True:
            with self._reading:
                self._to_do.append(self._read())
            # Once more: the other one may have read as this one looked for the last time.
            while self._to_do and self._doing.acquire(blocking=False):
                try:
                    while self._to_do:
                        self._do(self._to_do.popleft())
                finally:
                    self._doing.release()
