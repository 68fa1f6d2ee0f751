"""The time of a device group that several pipeline stages share."""


class SharedDevice:
    """Divides a device's time among pipeline stages, first come, first served.

    A step can be interrupted between any two layers. Its work therefore fills the free time from
    its start on, between times that were given to other steps.
    """

    def __init__(self) -> None:
        # Taken intervals, sorted by time; they do not overlap.
        self._taken: list[tuple[float, float]] = []

    def take(self, start: float, seconds: float, now: float) -> float:
        """Take the first free time from ``start`` on.

        Later calls do not ask for time before ``now``.

        Returns:
            The time at which ``seconds`` of work are done.
        """
        taken = [interval for interval in self._taken if interval[1] > now]
        pieces = []
        at, left = start, seconds
        for begin, end in taken:
            if begin - at >= left:
                break
            if begin > at:
                pieces.append((at, begin))
                left -= begin - at
            at = max(at, end)
        self._taken = sorted([*taken, *pieces, (at, at + left)] if seconds else taken)
        return at + left if seconds else start
