"""Cronus' Balancer, which chooses where to cut a prompt (sections 4.3 and 4.4, Algorithm 1)."""

from dataclasses import dataclass
from math import ceil

from jaxinfer.serving.step_fit import LeastSquares, MixedFit, PrefillFit
from jaxinfer.serving.views import InstanceView, StepView


@dataclass(frozen=True)
class CPILoad:
    """The CPI's state at the time when the Balancer cuts a request."""

    free_pages: int
    page_size: int
    max_num_batched_tokens: int
    num_decodes: int
    decode_context: int


def load_of(instance: InstanceView) -> CPILoad:
    """Return the CPI's present statistics."""
    decodes = [r.computed for r in instance.running.values() if r.computed >= r.prompt_len]
    return CPILoad(
        instance.num_free_pages,
        instance.page_size,
        instance.max_num_batched_tokens,
        len(decodes),
        sum(decodes),
    )


def chunked_seconds(fit: MixedFit, load: CPILoad, prompt_len: int, length: int) -> float:
    """Return T_chunked: seconds for the CPI to finish a prompt whose first ``length`` tokens exist.

    Eq. 1, with iteration times by eq. 3 at the contexts before the first and the last chunk. The
    listing in the paper's appendix uses the prompt's length as the first context, and uses n_p for
    two things; this code follows eqs. 1 to 3.
    """
    rest = prompt_len - length
    if not rest:
        return 0.0
    chunk = load.max_num_batched_tokens - load.num_decodes
    if chunk < 1:
        return float("inf")
    iterations = ceil(rest / chunk)
    first = fit.seconds(length, load.decode_context)
    last = fit.seconds(length + (iterations - 1) * chunk, load.decode_context)
    return iterations * (first + last) / 2


def balance(
    prefill: PrefillFit,
    mixed: MixedFit,
    load: CPILoad,
    prompt_len: int,
    candidates: int,
    in_partial: int = 0,
    in_chunked: int = 0,
) -> int:
    """Algorithm 1: return L_p, the number of prompt tokens that the PPI computes.

    Args:
        in_partial: prompt tokens in the PPI's cache, which cost no time; the paper has no cache.
        in_chunked: prompt tokens in the CPI's cache. If the CPI computes the rest of the prompt in
            no more time than its part of the best cut, it gets the whole request: L_p is 0.
    """
    if load.free_pages < ceil(prompt_len / load.page_size):
        return prompt_len

    def gap(length: int) -> float:
        first = prefill.seconds(length - min(in_partial, length))
        return abs(first - chunked_seconds(mixed, load, prompt_len, length))

    cuts = (ceil(i * prompt_len / candidates) for i in range(1, candidates + 1))
    best = min(cuts, key=gap)
    if in_chunked and chunked_seconds(mixed, load, prompt_len, in_chunked) <= chunked_seconds(
        mixed, load, prompt_len, best
    ):
        return 0
    return best


class Refined:
    """Fits to steps of the run itself, which exist after ``ENOUGH`` steps.

    Attributes:
        prefill: fit of eq. 2; None until there are enough steps.
        mixed: fit of eq. 3; None until there are enough steps.
    """

    ENOUGH = 16

    def __init__(self) -> None:
        self.prefill: PrefillFit | None = None
        self.mixed: MixedFit | None = None
        self._prefills, self._chunks = LeastSquares(2), LeastSquares(3)

    def add_prefill(self, length: int, seconds: float) -> None:
        """Add a step that computed a whole partial prefill."""
        self._prefills.add((length, 1), seconds)
        found = self._prefills.solve() if self._prefills.count >= self.ENOUGH else None
        if found and found[0] > 0:
            self.prefill = PrefillFit(*found)

    def add_mixed(self, step: StepView, max_tokens: int) -> None:
        """Add an iteration of the CPI if it is full; eq. 3 describes only full iterations."""
        decodes = [row.start for row in step.rows if row.start >= row.request.prompt_len]
        chunks = [row.start for row in step.rows if row.start < row.request.prompt_len]
        if not chunks or sum(row.count for row in step.rows) < max_tokens:
            return
        self._chunks.add((sum(chunks), sum(decodes), 1), step.end - step.start)
        found = self._chunks.solve() if self._chunks.count >= self.ENOUGH else None
        if found:
            self.mixed = MixedFit(*found)
