"""Progress on stderr: bars on a terminal, lines in a file."""

import math
import sys
import time
from types import TracebackType
from typing import Self

from rich import progress
from rich.console import Console

from jaxinfer.report.metrics import RunTotals

# Seconds between lines about one part; each part also has a line at its start and at its end.
LINES_EVERY_S = 30.0


class Progress:
    """A context in which parts of some work are shown, with how much of each is done."""

    def __init__(self, enabled: bool) -> None:
        console = Console(file=sys.stderr)
        # In a file, bars would only appear at the end.
        self._writes_lines = enabled and not console.is_terminal
        self._bar = progress.Progress(
            progress.TextColumn("{task.description}"),
            progress.BarColumn(),
            progress.TextColumn("{task.completed:.0f}/{task.total:.0f}"),
            progress.TextColumn("{task.fields[text]}", markup=False),
            progress.TimeElapsedColumn(),
            console=console,
            disable=not enabled or self._writes_lines,
        )
        self._tasks: dict[str, progress.TaskID] = {}
        # For each part, its size, and how much of it is left.
        self._parts: dict[str, tuple[int, int]] = {}
        # For each part, its size when its end was last written.
        self._ended: dict[str, int] = {}
        # For each part, its start, and the time of the last line about it.
        self._times: dict[str, tuple[float, float]] = {}

    def update(self, part: str, left: int) -> None:
        """Set how much of a part is left; an increase means that there is more to do."""
        total, before = self._parts.get(part, (0, 0))
        total += max(left - before, 0)
        self._parts[part] = total, left
        self._show(part, total - left, total)

    def _text(self) -> str:
        """Return what else is to be said; called only when it is shown."""
        return ""

    def _show(self, part: str, done: int, total: int) -> None:
        if self._writes_lines:
            self._write(part, done, total)
            return
        text = self._text()
        self._bar.start()
        if part not in self._tasks:
            self._tasks[part] = self._bar.add_task(part, total=total, text="")
        self._bar.update(self._tasks[part], completed=done, total=total, text=text)

    def _write(self, part: str, done: int, total: int) -> None:
        now = time.perf_counter()
        began, last = self._times.get(part, (now, -math.inf))
        is_news = done == total != self._ended.get(part)
        if not is_news and now - last < LINES_EVERY_S:
            return
        if is_news:
            self._ended[part] = total
        self._times[part] = began, now
        line, text = f"{part}: {done} of {total}, {now - began:.0f} s", self._text()
        print(f"{line}, {text}" if text else line, file=sys.stderr, flush=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._tasks:
            self._bar.stop()


class CountProgress(Progress):
    """Shows one part of a known size, and a text about the last piece that was done."""

    def __init__(self, part: str, total: int) -> None:
        super().__init__(True)
        self._part, self._done, self._total, self._said = part, 0, total, ""

    def __enter__(self) -> Self:
        super().__enter__()
        if self._total:
            self._show(self._part, 0, self._total)
        return self

    def advance(self, said: object, *_: object) -> None:
        """Record that one more piece is done, and describe it."""
        self._done, self._said = self._done + 1, str(said)
        self._show(self._part, self._done, self._total)

    def _text(self) -> str:
        return self._said


class LoadProgress(Progress):
    """Shows the progress of loading one or several engines."""

    def update_of(self, name: str, part: str, left: int) -> None:
        """Set how much of a part of one of several engines is left."""
        self.update(f"{name}: {part}", left)


class RunProgress(Progress):
    """Shows the number of finished requests, and the recent speeds of prefill and decode.

    On a terminal, speeds are those of the last second; in a file, those since the last line. They
    are not shown at the end, since a table with the speeds of the whole run may follow.

    Args:
        num_requests: number of requests known to come.
    """

    def __init__(self, enabled: bool, num_requests: int) -> None:
        super().__init__(enabled)
        self._done, self._num_requests, self._said = 0, num_requests, ""
        # When speeds were last printed, and the tokens then and now.
        self._since, self._tokens = (time.perf_counter(), 0, 0), (0, 0)

    def __enter__(self) -> Self:
        super().__enter__()
        self._show_requests()
        return self

    def request_done(self) -> None:
        """Count one finished request."""
        self._done += 1
        self._show_requests()

    def requests_known(self, num_requests: int) -> None:
        """Set the number of known requests; there may be more."""
        self._num_requests = max(self._num_requests, num_requests)

    def step_done(self, totals: RunTotals) -> None:
        """Count a step's tokens, and update the display once a second."""
        self._tokens = totals.prefill_tokens, totals.decode_tokens
        if time.perf_counter() - self._since[0] >= 1:
            self._show_requests()

    def _text(self) -> str:
        if self._done >= self._num_requests:
            return ""
        now = time.perf_counter()
        then, *before = self._since
        if now - then >= 1:
            prefill, decode = (
                (count - old) / (now - then)
                for count, old in zip(self._tokens, before, strict=True)
            )
            self._said = f"prefill {prefill:,.0f} tok/s, decode {decode:,.0f} tok/s"
            self._since = now, *self._tokens
        return self._said

    def _show_requests(self) -> None:
        self._show("requests", self._done, self._num_requests)
