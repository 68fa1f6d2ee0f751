"""Progress of a search on stderr."""

import sys
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from jaxinfer.plan.candidate import Candidate, Score

# Without a terminal, a line in so many seconds.
EVERY_S = 10.0


class Bar:
    """A bar where there is a terminal, else a line from time to time.

    Args:
        total: None where it is not known.
    """

    def __init__(self, total: int | None = None) -> None:
        self._total, self._done = total, 0
        self._said = time.monotonic()
        columns = (BarColumn(), TimeElapsedColumn(), TextColumn("{task.description}", markup=False))
        self._bar = Progress(*columns, console=Console(stderr=True))
        self._bar.disable = not sys.stderr.isatty()
        self._task = self._bar.add_task("", total=total)

    def advance(self, said: str) -> None:
        """One more is done."""
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


class SearchBar(Bar):
    """How many candidates have been looked at, and the best so far."""

    def update(self, candidate: Candidate, score: Score, best: Candidate | None) -> None:
        """One more has been looked at."""
        self.advance(f"best: {best}" if best else "none keeps the targets yet")


class PointBar(Bar):
    """How many points of a sweep there are figures of."""

    def update(self, point: Candidate, figures: Mapping[str, object]) -> None:
        """There are some of one more."""
        self.advance(str(point))
