"""A run's speed in its steady part; the bound says how much each part of the work is worth."""

from collections.abc import Sequence

import numpy as np

from jaxinfer.errors import JaxinferError
from jaxinfer.lab.plan.bound import Bound, Span
from jaxinfer.serving.request_state import RequestState
from jaxinfer.serving.world import StepDone

# Shares of the total value between which a run counts as steady.
_STEADY = 0.15, 0.65


class WorthDone:
    """Adds up what a run's work is worth over time. Repeated work counts once.

    Args:
        bound: bound of the run's cluster and workload.

    Raises:
        JaxinferError: requests share entries, whose worth is not counted here.
    """

    def __init__(self, bound: Bound) -> None:
        if bound.shares:
            raise JaxinferError(
                "no worth of a run whose requests share prefixes: engine.enable_prefix_caching="
                "false"
            )
        self._bound, count = bound, len(bound.prompts)
        self._prompt = _Worth(bound.prompts, bound.token_worth[:count], bound.entry_worth[:count])
        self._decode = _Worth(bound.decodes, bound.token_worth[count:], bound.entry_worth[count:])
        self._reached: dict[str, int] = {}
        self._times: list[np.ndarray] = []
        self._worths: list[np.ndarray] = []

    def add_step(self, done: StepDone) -> None:
        """Count the prompt chunks that a step has computed."""
        gained = 0.0
        for row in done.rows:
            request, stop = row.request, min(row.start + row.count, row.request.prompt_len)
            start = max(row.start, self._reached.get(request.id, 0))
            if start < stop:
                self._reached[request.id] = stop
                gained += float(self._prompt.until(stop) - self._prompt.until(start))
        if gained:
            self._times.append(np.array([done.end]))
            self._worths.append(np.array([gained]))

    def add_request(self, request: RequestState, times: Sequence[float]) -> None:
        """Count a request that has ended, whose tokens came at these times."""
        self._reached.pop(request.id, None)
        reached = self._decode.until(request.prompt_len + np.arange(len(times)))
        self._times.append(np.array(times))
        self._worths.append(np.diff(reached, prepend=reached[0] - self._bound.first_worth))

    def share(self) -> float:
        """Return the rate of the run's steady part, divided by the bound's.

        The work of requests that have not ended by the end of that part counts, too. The share is
        at most 1 for any system, except for the steps that are in flight when the window begins
        (one or more per instance), which count in full.
        """
        times, worths = np.concatenate(self._times), np.concatenate(self._worths)
        order = np.argsort(times, kind="stable")
        times, done = times[order], np.cumsum(worths[order])
        first, last = (int(np.searchsorted(done, part * done[-1])) for part in _STEADY)
        seconds = times[last] - times[first]
        # Work that ends at the first moment was done before.
        first = int(np.searchsorted(times, times[first], side="right")) - 1
        return float((done[last] - done[first]) / seconds / self._bound.rate)


class _Worth:
    """The summed worth of all positions up to a given one: a quadratic function per span."""

    def __init__(
        self, spans: Sequence[Span], token: Sequence[float], entry: Sequence[float]
    ) -> None:
        self._low = np.array([span.low for span in spans])
        self._token, self._entry = np.array(token), np.array(entry)
        ends = np.array([span.high for span in spans])
        whole = self._within(np.arange(len(spans)), ends) if len(spans) else np.zeros(0)
        self._before = np.concatenate([[0.0], np.cumsum(whole)])

    def _within(self, number: np.ndarray, end: np.ndarray) -> np.ndarray:
        low = self._low[number]
        entries = (end * (end + 1.0) - low * (low + 1.0)) / 2
        worth: np.ndarray = (end - low) * self._token[number] + entries * self._entry[number]
        return worth

    def until(self, end: np.ndarray | int) -> np.ndarray:
        """Return the worth of all positions below ``end``, without a constant."""
        if not len(self._low):
            return np.zeros(np.shape(end))
        ends = np.maximum(np.asarray(end, float), self._low[0])
        number = np.maximum(np.searchsorted(self._low, ends, side="right") - 1, 0)
        found: np.ndarray = self._before[number] + self._within(number, ends)
        return found
