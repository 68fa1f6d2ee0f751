"""Successive runs of one loaded model."""

import threading
import traceback
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

from jaxinfer.config.resolve import Resolved
from jaxinfer.errors import JaxinferError, one_line
from jaxinfer.report.metrics import RunMetrics
from jaxinfer.report.progress import LoadProgress, RunProgress
from jaxinfer.report.recorder import Recorder
from jaxinfer.request import RequestOutput
from jaxinfer.runtime.cluster import Cluster
from jaxinfer.runtime.kv.outcome import ProcessLost
from jaxinfer.runtime.request_feed import RequestFeed
from jaxinfer.runtime.run import Run
from jaxinfer.serving.kv_shards import KVShards
from jaxinfer.serving.request_state import RequestState
from jaxinfer.serving.step_fit import StepFit
from jaxinfer.serving.world import StepDone
from jaxinfer.text.tokenizer import Tokenizer
from jaxinfer.workload.predictor import Predict

OnOutput = Callable[[RequestOutput], None]
OnStep = Callable[[StepDone], None]
# The placement of instances, as JSON values.
Describe = Callable[[], Mapping[str, object]]


class Session:
    """Serves requests in successive runs, one at a time, on the same devices and KV.

    Args:
        watchdog_s: see ``RealWorld``.
        new_predictor: makes each run's ``predict``, see ``ServingLoop``. Like a system, a predictor
            may remember requests, and a run must not know those of earlier runs.

    Attributes:
        fits: fits of step times by instance, for the system's predictions.
        kv: KV shards that the last run left, by instance; empty during a run, and after a run that
            failed or was abandoned, which has pages in use.
    """

    # A run that has failed or was interrupted leaves steps and transfers in flight, and work that
    # was launched or sent only in part. The next run begins with ``_recover``. It decides for each
    # instance whether it is whole again, is restarted, or is lost.

    def __init__(
        self,
        site: Resolved,
        cluster: Cluster,
        tokenizer: Tokenizer,
        watchdog_s: float | None,
        new_predictor: Callable[[], Predict | None] = lambda: None,
    ) -> None:
        self.site = site
        self.fits: Mapping[str, StepFit] = {}
        self.kv: Mapping[str, KVShards] = {}
        self._cluster, self._tokenizer = cluster, tokenizer
        self._watchdog_s, self._new_predictor = watchdog_s, new_predictor
        self._lost: dict[str, str] = {}
        self._is_whole = True
        self._lock = threading.Lock()
        self._thread: int | None = None

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Wait until no other thread uses the session.

        Raises:
            JaxinferError: this thread already uses the session.
        """
        if self._thread == threading.get_ident():
            raise JaxinferError(
                "this LLM is in the middle of a run: wait until it has ended, or close its iterator"
            )
        # Not a lock that belongs to a thread, because an iterator may be closed in another thread.
        with self._lock:
            try:
                self.resume()
                yield
            finally:
                self._thread = None

    def resume(self) -> None:
        """Within ``alone``, make this thread the one that continues."""
        self._thread = threading.get_ident()

    def run(
        self,
        requests: Iterable[RequestState],
        on_output: OnOutput,
        describe: Describe,
        progress: bool,
        run_dir: str | Path | None,
        on_step: OnStep = lambda done: None,
        num_requests: int = 0,
    ) -> RunMetrics:
        """Run requests as ``LLM.run`` does; call it within ``alone``."""
        rounds = self.rounds(
            requests, on_output, describe, progress, run_dir, on_step, num_requests
        )
        while True:
            try:
                next(rounds)
            except StopIteration as ended:
                metrics: RunMetrics = ended.value
                return metrics

    def rounds(
        self,
        requests: Iterable[RequestState],
        on_output: OnOutput,
        describe: Describe,
        progress: bool,
        run_dir: str | Path | None,
        on_step: OnStep = lambda done: None,
        num_requests: int = 0,
    ) -> Generator[None, None, RunMetrics]:
        """Run requests as ``run`` does, but yield after each round, so that the caller may stop."""
        if not self._is_whole:
            self._recover()
        for name, reason in self._lost.items():
            raise JaxinferError(f"instance {name} was lost, load the model again: {reason}")
        self._is_whole = False
        try:
            metrics = yield from self._serve(
                requests, on_output, describe, progress, run_dir, on_step, num_requests
            )
        except Exception:
            raise
        except BaseException as interrupt:
            # It may still exist and keep pages that a step was about to return; the next run needs
            # them.
            traceback.clear_frames(interrupt.__traceback__)
            raise
        self._is_whole = True
        return metrics

    def _recover(self) -> None:
        self.kv = {}  # Some pages may no longer exist.
        restarts = self._cluster.restarts
        for name, engine in self._cluster.engines.items():
            if name in self._lost:
                continue
            try:
                engine.worker.recover(self._watchdog_s)
            # Any other error, such as an interrupt that C++ turned into an error, is raised; the
            # next run tries again.
            except (JaxinferError, ProcessLost) as error:
                why = one_line(error)
                if not (restarts and restarts.expect(name, why)):
                    self._lost[name] = why
        for channel in self._cluster.channels.values():
            channel.forget_all()
        self._is_whole = True

    def _serve(
        self,
        requests: Iterable[RequestState],
        on_output: OnOutput,
        describe: Describe,
        progress: bool,
        run_dir: str | Path | None,
        on_step: OnStep,
        num_requests: int,
    ) -> Generator[None, None, RunMetrics]:
        predict = self._new_predictor()
        feed = RequestFeed(requests, self._cluster, self._tokenizer)
        with LoadProgress(progress) as loading:
            first = feed.read(loading.update)
        if uses := self._cluster.uses:
            uses.begin(first)
        with ExitStack() as stack:
            counts = self.site.counts_transfer
            ledger = self.site.run_file.ledger
            recorder = stack.enter_context(Recorder(run_dir, describe, counts, on_step, ledger))
            num_requests = max(num_requests, feed.groups.num_parents)
            bar = stack.enter_context(RunProgress(progress, num_requests))
            engines = self._cluster.engines
            kv = self.kv or {name: engine.new_kv() for name, engine in engines.items()}
            self.kv = {}
            run = Run(
                self._cluster, self.site.new_system(), kv, self.fits, self._watchdog_s,
                feed, first, recorder, bar, on_output, predict,
            )  # fmt: skip
            del first  # The requests that end must be forgotten.
            try:
                yield from run.rounds()
            finally:
                if (
                    len(engines) > 1
                ):  # A failure of the only instance is raised; it may be temporary.
                    self._lost |= run.lost
            self.kv = run.kv
            return run.finish()
