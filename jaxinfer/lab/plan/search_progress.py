"""Progress of a search on stderr."""

import math
import sys
import time
from collections import Counter
from collections.abc import Mapping
from datetime import timedelta
from threading import Lock
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from jaxinfer.lab.plan.candidate import Candidate, Score
from jaxinfer.lab.plan.search import Watcher
from jaxinfer.simulate.capacity import AT_ONCE, TriedRate

# Without a terminal, a line is printed after this many seconds.
EVERY_S = 10.0
# Assumed number of simulations of a candidate, until one is known.
SIMULATIONS = 10


class Bar:
    """A progress bar on a terminal; otherwise a line from time to time.

    Args:
        total: number of steps; None if unknown.
    """

    def __init__(self, total: int | None = None) -> None:
        self._total, self._done = total, 0
        self._said = time.monotonic()
        columns = (BarColumn(), TimeElapsedColumn(), TextColumn("{task.description}", markup=False))
        self._bar = Progress(*columns, console=Console(stderr=True))
        self._bar.disable = not sys.stderr.isatty()
        self._task = self._bar.add_task("", total=total)

    def advance(self, said: str) -> None:
        """Record that one more is done."""
        self._done += 1
        count = f"{self._done} of {self._total}" if self._total else f"{self._done} tried"
        self._bar.update(self._task, advance=1, description=f"{count}; {said}")
        last = self._done == self._total
        if self._bar.disable and (last or time.monotonic() - self._said > EVERY_S):
            self._said = time.monotonic()
            print(f"{count}; {said}", file=sys.stderr, flush=True)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bar.stop()


def _load(rate: float) -> str:
    if not rate:
        return "one request at a time"
    return "all requests at once" if rate == AT_ONCE else f"at {rate:.3g} requests/s"


class SearchBar(Watcher):
    """Shows a search's progress: the share done, what is being tried, the time left, and the best.

    It is a bar on a terminal; otherwise a line from time to time.
    """

    def __init__(self) -> None:
        self._bar, self._lock = (
            Progress(
                BarColumn(),
                TimeElapsedColumn(),
                TextColumn("{task.description}", markup=False),
                console=Console(stderr=True),
            ),
            Lock(),
        )
        self._bar.disable = not sys.stderr.isatty()
        self._task = self._bar.add_task("starting", total=None)
        self._began = time.monotonic()
        self._said = -math.inf
        self._expected, self._simulations = 0, 0
        # Numbers of simulations by candidate, of those that are done and of the others. Several
        # searches may have the same candidates.
        self._done: list[int] = []
        self._running: Counter[object] = Counter()
        self._best = "none keeps the targets yet"
        self._now = ""

    def expect(self, count: int) -> None:
        """Expect more candidates in addition to earlier ones."""
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
            self._tell(last=len(self._done) == self._expected)

    def left_s(self) -> float | None:
        """Estimate the seconds left, if all candidates take as many simulations."""
        full = [count for count in self._done if count]
        each = sum(full) / len(full) if full else float(SIMULATIONS)
        running = sum(min(count / each, 0.9) for count in self._running.values())
        share = (len(self._done) + running) / max(self._expected, 1)
        # A candidate that is evaluated again at the end would exceed the total.
        return (time.monotonic() - self._began) * max(1 / share - 1, 0.0) if share else None

    def _tell(self, last: bool = False) -> None:
        left, done = self.left_s(), len(self._done)
        said = f"{done} of {self._expected} candidates, {self._simulations} simulations"
        if left is not None and not last:
            said += f", about {timedelta(seconds=round(left))} left"
        said += f"; {self._best}" + (f"; {self._now}" if self._now and not last else "")
        self._bar.update(self._task, completed=done, total=self._expected, description=said)
        if self._bar.disable and (last or time.monotonic() - self._said > EVERY_S):
            self._said = time.monotonic()
            print(said, file=sys.stderr, flush=True)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self._bar.stop()


class PointBar(Bar):
    """A bar of the points of a sweep that are done."""

    def update(self, point: Candidate, figures: Mapping[str, object]) -> None:
        """Record that one more point is done."""
        self.advance(str(point))
