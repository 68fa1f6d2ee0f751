"""Shows the progress of a search on stderr."""

import time
from collections import Counter
from datetime import timedelta
from threading import Lock

from jaxinfer.lab.plan.candidate import Candidate, Score
from jaxinfer.lab.plan.search import Watcher
from jaxinfer.report.progress import Progress
from jaxinfer.simulate.capacity import AT_ONCE, TriedRate

# Assumed number of simulations of a candidate, until one is known.
SIMULATIONS = 10


def _load(rate: float) -> str:
    if not rate:
        return "one request at a time"
    return "all requests at once" if rate == AT_ONCE else f"at {rate:.3g} requests/s"


class SearchProgress(Progress, Watcher):
    """Shows a search's progress: the share done, the time left, the best and current candidates."""

    def __init__(self) -> None:
        super().__init__(True)
        self._lock = Lock()
        self._began = time.monotonic()
        self._expected, self._simulations = 0, 0
        # Numbers of simulations by candidate, of those that are done and of the others. Several
        # searches may have the same candidates.
        self._done: list[int] = []
        self._running: Counter[object] = Counter()
        self._best = "none keeps the targets yet"
        self._now = ""

    def expect(self, count: int) -> None:
        """Expect ``count`` candidates in addition to earlier ones."""
        with self._lock:
            self._expected += count
            self._tell()

    def simulated(self, candidate: Candidate, tried: TriedRate) -> None:
        """Record that one rate of a candidate was simulated."""
        with self._lock:
            self._simulations += 1
            self._running[candidate.key] += 1
            kept = "kept" if tried.verdict.met else "missed"
            self._now = f"{candidate}: {kept} {_load(tried.rate)}"
            self._tell()

    def scored(self, candidate: Candidate, score: Score, best: Candidate | None) -> None:
        """Record that one more candidate is done."""
        with self._lock:
            self._done.append(self._running.pop(candidate.key, 0))
            self._expected = max(self._expected, len(self._done))  # One may be evaluated again.
            if best:
                self._best = f"best: {best}"
            self._tell()

    def left_s(self) -> float | None:
        """Estimate the seconds left, as if all candidates took equally many simulations."""
        full = [count for count in self._done if count]
        each = sum(full) / len(full) if full else float(SIMULATIONS)
        running = sum(min(count / each, 0.9) for count in self._running.values())
        share = (len(self._done) + running) / max(self._expected, 1)
        # A candidate that is evaluated again at the end would exceed the total.
        return (time.monotonic() - self._began) * max(1 / share - 1, 0.0) if share else None

    def _tell(self) -> None:
        self._show("candidates", len(self._done), self._expected)

    def _text(self) -> str:
        left, last = self.left_s(), len(self._done) == self._expected
        said = f"{self._simulations} simulations"
        if left is not None and not last:
            said += f", about {timedelta(seconds=round(left))} left"
        return f"{said}; {self._best}" + (f"; {self._now}" if self._now and not last else "")
