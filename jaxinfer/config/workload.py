"""A run file's workload: its requests and their arrivals."""

from collections.abc import Callable, Sequence
from functools import lru_cache
from stat import S_ISREG

from pydantic import Field, field_validator

from jaxinfer.errors import JaxinferError
from jaxinfer.files.shipped import data_path
from jaxinfer.options.validation import OptionError, Options, shown, within
from jaxinfer.text.encode import encoder
from jaxinfer.workload.arrivals import Arrivals, with_arrivals
from jaxinfer.workload.lengths import BenchRequest, read_trace
from jaxinfer.workload.order import Order, modelled_in_order
from jaxinfer.workload.predictor import Buckets, Own
from jaxinfer.workload.synthetic import Synthetic, WorkloadClass, is_of_class
from jaxinfer.workload.trace import Trace, from_start


class Workload(Options):
    """The requests to serve.

    Attributes:
        input, output: Files with the prompts and the results of ``jaxinfer run``.
        trace: File with one request per row.
        tokenizer: Model, or folder with ``tokenizer.json``, for traces that contain text; by
            default the run's model.
        synthetic: Requests with random lengths, in place of a trace.
        only: Use only one class of requests: heavy prefill (HP) has more than 512 tokens, heavy
            decode (HD) more than 128; LP and LD are light.
        limit: Number of requests to use, counted from the first; by default all.
        order: Order of requests that all arrive at once: as ``given``; ``prefix_tree``, depth first
            through the tree of their prompts, so that the prefix cache still has what the next
            prompt shares with the last one; or ``blend``, from both ends of such a tree, so that
            prefill fills the steps of requests with long outputs.
        arrivals: When requests arrive.
        max_tokens: In a modelled run, the output limit that users set; by default, the true length.
            Systems and policies see only this limit; the request ends earlier, at its true length.
        predictor: Predictor of the number of output tokens. It is ``my_module:MyPredictor``, or
            ``{name: ..., ...options}``, or in a modelled run ``{granularity: 200, accuracy: 0.85,
            seed: 0}``.
    """

    input: str | None = None
    output: str | None = None
    trace: str | None = None
    tokenizer: str | None = None
    synthetic: Synthetic | None = None
    only: WorkloadClass | None = None
    limit: int | None = Field(default=None, ge=1)
    order: Order = "given"
    arrivals: Arrivals = Arrivals()
    max_tokens: int | None = Field(default=None, ge=1)
    predictor: Buckets | Own | None = None

    @field_validator("arrivals", mode="before")
    @classmethod
    def _by_name(cls, value: object) -> object:
        return {"kind": value} if isinstance(value, str) else value

    @field_validator("synthetic", mode="before")
    @classmethod
    def _by_lengths(cls, value: object) -> object:
        return {"lengths": value} if isinstance(value, str) else value

    @field_validator("predictor", mode="before")
    @classmethod
    def _as_buckets(cls, value: object) -> object:
        if value is None or isinstance(value, Buckets):
            return value
        if isinstance(value, str) and ":" in value:
            return value
        if isinstance(value, dict) and "name" in value:
            name = value["name"]
            if isinstance(name, str) and ":" in name:
                return value
            raise ValueError(f"name is {shown(name)}, must be my_module:MyPredictor")
        if not isinstance(value, dict):
            raise ValueError(
                f"must be my_module:MyPredictor, or a mapping of granularity and accuracy, not "
                f"{shown(value)}"
            )
        try:
            return Buckets.model_validate(value)
        except JaxinferError as error:
            raise ValueError(error) from None

    @property
    def source(self) -> str:
        """The source of the requests, for messages and figures."""
        return self.trace or "workload.synthetic"

    @property
    def drawn(self) -> dict[str, Arrivals | Buckets | Synthetic]:
        """The parts of the workload that are drawn with a seed, by name."""
        return {
            name: part
            for name, part in self
            if isinstance(part, Arrivals | Buckets | Synthetic) and part.is_drawn
        }

    def check_real(self) -> None:
        """Raise JaxinferError for options that only a modelled run can have."""
        if self.max_tokens is not None:
            raise OptionError(
                "workload.max_tokens: what users of a modelled run give; a real run has the "
                "max_tokens of its lines, or the lengths of its trace"
            )

    def requests(
        self,
        model: str | None,
        note: Callable[[str], None] = lambda text: None,
        searched: bool = False,
    ) -> list[BenchRequest]:
        """Return the requests with their times of arrival.

        Args:
            model: model whose tokenizer is used for traces with texts, if there is no
                ``tokenizer``.
            note: called with a line about skipped requests or ignored times.
            searched: whether a search will set the rates, so that the workload's arrivals are
                ignored.

        Raises:
            JaxinferError: there is no trace, it cannot be read, or it has no request of the class.
        """
        if self.trace is None and self.synthetic is None:
            raise JaxinferError(
                "no trace: give --workload, or workload.trace or synthetic in the run file"
            )
        if self.trace is not None and self.synthetic is not None:
            raise JaxinferError(f"workload: both a trace, {self.trace}, and synthetic lengths")
        if self.synthetic:
            work = self._drawn()
        else:
            work = self._read(self.tokenizer or model, note, searched)
        work = work[: self.limit]
        if self.order != "given":
            self._check_order(work, searched)
            work = modelled_in_order(work, self.order, self.max_tokens)
        return with_arrivals(work, self.arrivals)

    def _check_order(self, work: Sequence[BenchRequest], searched: bool) -> None:
        """Refuse an order of requests that come over time, or whose prompts are not known."""
        if searched:
            raise OptionError(
                f"workload.order is {self.order!r}, must be 'given' where rates are searched: "
                "requests are served as they come"
            )
        if (kind := self.arrivals.kind) != "at_once":
            raise OptionError(
                f"workload.order is {self.order!r}, must be 'given' where workload.arrivals is "
                f"{kind}: requests are served as they come"
            )
        if any(item.session is not None for item in work):
            raise OptionError(
                f"workload.order is {self.order!r}, must be 'given' with sessions: turns come in "
                "turn"
            )
        if self.order == "prefix_tree" and not any(item.has_tokens for item in work):
            raise OptionError(
                f"workload.order is {self.order!r}, must be 'given': {self.source} has no tokens "
                "that prompts could share"
            )

    def _drawn(self) -> list[BenchRequest]:
        assert self.synthetic
        if self.arrivals.kind == "trace":
            raise JaxinferError("workload.arrivals: synthetic lengths have no times of a trace")
        try:
            return self.synthetic.requests(self.only, self.limit)
        except JaxinferError as error:
            raise within("workload.synthetic", error) from None

    def _read(
        self, model: str | None, note: Callable[[str], None], searched: bool
    ) -> list[BenchRequest]:
        trace = _trace(str(self.trace), None if self.only else self.limit, model)
        if self.arrivals.kind == "trace" and not trace.has_times:
            raise JaxinferError(
                f"workload.arrivals: trace, but {self.trace} has no times: take at_once, interval, "
                "poisson, gamma, ramp or closed"
            )
        if trace.note:
            note(trace.note)
        if told := self._of_times(trace, searched):
            note(told)
        requests = from_start(trace.requests)
        if self.only is None:
            return list(requests)
        kept = [item for item in requests if is_of_class(item, self.only)]
        if not kept:
            raise JaxinferError(
                f"workload {self.trace}: none of its {len(requests)} is {self.only}"
            )
        return kept

    def _of_times(self, trace: Trace, searched: bool) -> str | None:
        """Return a note on arrival times of a trace that are ignored or shifted, or None."""
        if not trace.has_times:
            return None
        if searched:
            return f"{self.trace}: its times do not count, each rate is of Poisson arrivals"
        if (kind := self.arrivals.kind) != "trace":
            return (
                f"{self.trace}: its times do not count, since workload.arrivals is {kind}: "
                "--set workload.arrivals=trace takes them"
            )
        if start := min(item.arrival for item in trace.requests):
            return f"{self.trace}: its first request comes at {start:g} s, which counts as 0"
        return None


def _trace(path: str, limit: int | None, model: str | None) -> Trace:
    """Read a trace; an unchanged file is not read and tokenized again."""
    try:
        found = data_path(path).stat()
    except OSError:
        return read_trace(path, limit, encoder(model))  # This says why it cannot be read.
    if not S_ISREG(found.st_mode):  # A pipe can be read only once.
        return read_trace(path, limit, encoder(model))
    stands = found.st_dev, found.st_ino, found.st_mtime_ns, found.st_size
    return _read_once(path, limit, model, stands)


# Points and seeds of a sweep share one trace; keeping more would only use memory.
@lru_cache(maxsize=2)
def _read_once(path: str, limit: int | None, model: str | None, stands: tuple[int, ...]) -> Trace:
    return read_trace(path, limit, encoder(model))
