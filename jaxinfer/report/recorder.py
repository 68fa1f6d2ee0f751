"""Records a run in either world: sums, and files if requested."""

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from jaxinfer.errors import JaxinferError
from jaxinfer.report.metrics import RunMetrics, RunTotals, SliceMoveCounts, run_metrics
from jaxinfer.report.plain import reported
from jaxinfer.serving.loop import ServingLoop
from jaxinfer.serving.request_state import RequestState
from jaxinfer.serving.world import Event, InstanceLost, StepDone, TransferDone

if TYPE_CHECKING:
    from jaxinfer.ledger.ledger_file import LedgerFile
    from jaxinfer.ledger.observer import Ledger
    from jaxinfer.report.run_folder import RunFolder


class Recorder:
    """Records each request and event of one run.

    Args:
        run_dir: folder in which to create a numbered folder for the run's files; None to write no
            files.
        describe: description of the instances and their devices, as JSON values.
        counts_transfer: whether a first token counts only once its KV has arrived.
        on_step: called with each step, once it is counted.
        keeps_ledger: whether to write a ledger of the loop's decisions, too.
        hears: whether the ledger also has the events that the loop received.

    Attributes:
        ledger: observer that writes the ledger, if the run keeps one.

    Raises:
        JaxinferError: the run needs a folder for its ledger and has none.
    """

    def __init__(
        self,
        run_dir: str | Path | None,
        describe: Callable[[], Mapping[str, object]],
        counts_transfer: bool,
        on_step: Callable[[StepDone], None] | None = None,
        keeps_ledger: bool = False,
        hears: bool = True,
    ) -> None:
        if keeps_ledger and not run_dir:
            raise JaxinferError("ledger is True, must be false where no folder of the run is kept")
        self.totals = RunTotals()
        self._counts_transfer = counts_transfer
        self._on_step = on_step
        self._opened = ExitStack()
        self._folder = _new_folder(Path(run_dir), describe()) if run_dir else None
        self.ledger: Ledger | None = None
        if self._folder:
            self._opened.enter_context(self._folder)
        if self._folder and keeps_ledger:
            self._ledger_file, self.ledger = _new_ledger(self._folder.path, hears)
            self._opened.callback(self._ledger_file.close)

    def add_request(
        self, request: RequestState, parent: str, tokens: Sequence[int] | None = None
    ) -> None:
        """Record a continuation, which has ended, of the prompt with id ``parent``.

        Args:
            tokens: its output tokens, if they are real.
        """
        if self._folder:
            self._folder.add_request(request, parent, self._counts_transfer, tokens)

    def add_prompt(self, continuations: Sequence[RequestState]) -> Sequence[Sequence[float]]:
        """Count a prompt whose continuations have all ended; return the times of their tokens."""
        times = [each.metrics.delivered(self._counts_transfer) for each in continuations]
        self.totals.add_prompt(list(zip(continuations, times, strict=True)))
        return times

    def add_event(self, event: Event, loop: ServingLoop) -> None:
        """Record an event that the loop has committed."""
        if isinstance(event, StepDone):
            self.totals.add_step(event)
            if self._on_step:
                self._on_step(event)
            if self._folder:
                self._folder.add_step(event, loop.assignments.hand_offs.moving)
        elif isinstance(event, TransferDone):
            if event.transfer.slice_move:
                self.totals.slice_bytes += event.num_bytes
            if self._folder:
                self._folder.add_transfer(event, loop.assignments.instances)
        elif isinstance(event, InstanceLost):
            self.totals.lose_instance(event.instance)
            if self._folder:
                self._folder.lose_instance(event.instance)

    def finish(
        self,
        loop: ServingLoop,
        requests: int,
        failed: int,
        preemptions: int,
        overruns: Mapping[str, Sequence[float]],
        lost: Mapping[str, str],
        restarts: Sequence[Mapping[str, object]] = (),
        **given: Any,
    ) -> RunMetrics:
        """Return the figures of a run that has ended; its files are complete.

        Args:
            requests: see ``RunMetrics``.
            failed: see ``RunMetrics``.
            overruns: instance -> seconds by which its emulated steps were late.
            lost: reason for each failed instance.
            restarts: restarts of lost processes, as JSON values.
            given: see ``run_metrics``.
        """
        metrics = run_metrics(
            self.totals,
            requests,
            failed,
            loop.world.now(),
            preemptions=preemptions,
            slice_moves=self._slice_moves(loop),
            **given,
        )
        if self._folder:
            if self.ledger:
                self._folder.note("ledger", self._ledger_file.finish())
            name = f"{type(loop.system).__name__}.report"
            report, wrong = reported(name, loop.system.report)
            path = self._folder.finish(asdict(metrics), overruns, lost, report, wrong, restarts)
            if wrong:
                print(f"jaxinfer: {path}: {wrong}", file=sys.stderr, flush=True)
        return metrics

    def _slice_moves(self, loop: ServingLoop) -> SliceMoveCounts | None:
        """Return the counts of moves of KV heads; None if no instance has heads on
        several groups.
        """
        left = loop.assignments.instances.values()  # Lost instances may have had moves, too.
        if not self.totals.slice_bytes and not any(each.kv.is_spread for each in left):
            return None
        hand_offs = loop.assignments.hand_offs
        return SliceMoveCounts(
            begun=hand_offs.slices.num_begun,
            num_bytes=self.totals.slice_bytes,
            without_room=hand_offs.slices.num_without_room,
            at_once=hand_offs.slices.num_at_once,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close the files, even after an error."""
        self._opened.__exit__(kind, error, trace)


def _new_folder(parent: Path, description: Mapping[str, object]) -> "RunFolder":
    # Without it, a simulation that keeps nothing starts sooner.
    from jaxinfer.report.run_folder import RunFolder

    return RunFolder(parent, description)


def _new_ledger(folder: Path, hears: bool) -> "tuple[LedgerFile, Ledger]":
    # Few runs keep one.
    from jaxinfer.ledger.ledger_file import NAME, LedgerFile
    from jaxinfer.ledger.observer import Ledger

    file = LedgerFile(folder / NAME)
    return file, Ledger(file, hears)
