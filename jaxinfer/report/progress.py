"""Progress bars on stderr."""

import sys
import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from jaxinfer.report.metrics import RunTotals


def _bar(enabled: bool) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed:.0f}/{task.total:.0f}"),
        TextColumn("{task.fields[rates]}"),
        TimeElapsedColumn(),
        console=Console(file=sys.stderr),
        disable=not enabled,
    )


class _Shown:
    """Shows a bar while in use."""

    def __init__(self, enabled: bool) -> None:
        self._bar = _bar(enabled)

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


class LoadProgress(_Shown):
    """One bar per part of an engine's start."""

    def __init__(self, enabled: bool) -> None:
        super().__init__(enabled)
        self._tasks: dict[str, tuple[TaskID, int]] = {}

    def update(self, part: str, left: int) -> None:
        """Say how much is left of a part; the first call for it says how much there is."""
        if part not in self._tasks:
            self._tasks[part] = self._bar.add_task(part, total=left, rates=""), left
        task, total = self._tasks[part]
        self._bar.update(task, completed=total - left)

    def update_of(self, name: str, part: str, left: int) -> None:
        """The same for one of several engines."""
        self.update(f"{name}: {part}", left)


class RunProgress(_Shown):
    """Finished requests, and the speed of prefill and decode over the last second."""

    def __init__(self, enabled: bool, num_requests: int) -> None:
        super().__init__(enabled)
        self._task = self._bar.add_task("requests", total=num_requests, rates="")
        self._since = (time.perf_counter(), 0, 0)

    def request_done(self) -> None:
        """Count one finished request."""
        self._bar.advance(self._task)

    def step_done(self, totals: RunTotals) -> None:
        """Refresh the speeds, once a second."""
        now = time.perf_counter()
        then, prefill, decode = self._since
        if now - then >= 1:
            prefill_rate = (totals.prefill_tokens - prefill) / (now - then)
            decode_rate = (totals.decode_tokens - decode) / (now - then)
            rates = f"prefill {prefill_rate:,.0f} tok/s, decode {decode_rate:,.0f} tok/s"
            self._bar.update(self._task, rates=rates)
            self._since = now, totals.prefill_tokens, totals.decode_tokens
