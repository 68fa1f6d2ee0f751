"""Rate at which requests ended while the system was neither filling nor draining."""

from bisect import bisect_left

# Largest number of points; above it, every second one is dropped.
_POINTS = 2**16
# Percentages of the requests that have ended when the window starts and ends.
_BEGIN, _END = 10, 90


class SteadyRate:
    """The course of ended requests and their output tokens over time, in bounded memory."""

    def __init__(self) -> None:
        self._requests = self._tokens = 0
        self._stride = 1
        self._points: list[tuple[int, int, float]] = [(0, 0, 0.0)]

    def add(self, time: float, tokens: int) -> None:
        """Record the end of a request with ``tokens`` output tokens; times must increase."""
        self._requests += 1
        self._tokens += tokens
        if self._requests % self._stride:
            return
        self._points.append((self._requests, self._tokens, time))
        if len(self._points) > _POINTS:
            del self._points[1::2]
            self._stride *= 2

    def steady(self) -> tuple[float, float] | None:
        """Return requests and output tokens per second of a window; None if it has no length.

        The window begins when 10 % of all requests have ended, and ends when 90 % have. It counts
        the requests that end after its first moment. This leaves out the beginning of the run, when
        the system fills, and its end, when no more requests arrive. With more than 65,536 requests,
        the window's ends are rounded to the nearest of at least 32,768 points.
        """
        begin, end = (self._point(percent) for percent in (_BEGIN, _END))
        seconds = end[2] - begin[2]
        if seconds <= 0:
            return None
        return (end[0] - begin[0]) / seconds, (end[1] - begin[1]) / seconds

    def _point(self, percent: int) -> tuple[int, int, float]:
        """Return the first point at which ``percent`` of the requests have ended, or the last."""
        wanted = percent * self._requests
        found = bisect_left(self._points, wanted, key=lambda point: 100 * point[0])
        return self._points[min(found, len(self._points) - 1)]
