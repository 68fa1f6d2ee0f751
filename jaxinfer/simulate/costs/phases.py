"""Step times by phase: coefficients of prefill, and of decode by the size of its batch.

With P the tokens of a step's chunks, Q the pairs of tokens in their prompts, n the rows of one
token and K the KV entries that these see, their own included, the seconds of one step are

    prefill.step_s + prefill.token_s * P + prefill.pair_s * Q     of chunks alone
    step_s + decode.context_s * K + decode.sequence_s * n         of rows of one token alone
    prefill's, + decode.context_s * K + decode.sequence_s * n     of both

so a mixed step has only the constant of its prefill. Papers whose engines run the phases one after
the other have no mixed steps. Decode's coefficients are those of the first regime whose ``below``
is more than n.

A whole prompt of L tokens has L^2 ordered pairs. The chunk from entry s to entry e has those that
it adds, e^2 - s^2, so that the chunks of a prompt have L^2 in total. DistServe's profiles,
in milliseconds, are of this form: prefill ``a + b sum(L) + c sum(L^2)`` is ``step_s``, ``token_s``
and ``pair_s``; decode ``a + b (context tokens) + c (batch size)`` is ``step_s``, ``context_s`` and
``sequence_s``, once for small batches and once for large ones. Aladdin's eqs. 2 and 3 are, too.
"""

from collections.abc import Callable, Sequence
from typing import Self

from jaxinfer.config.costs import SimulateOptions
from jaxinfer.config.stage_part import StagePart
from jaxinfer.config.step_costs import DecodeCosts, PhaseCosts
from jaxinfer.serving.batch import Work


def prompt_pairs(chunks: Sequence[tuple[int, int]]) -> int:
    """Return by how much chunks (see ``Work``) raise the sum of their prompts' squared lengths."""
    return sum([count * (2 * start + count) for start, count in chunks])


class PhaseStage:
    """Step times of a pipeline stage.

    Args:
        costs: costs of all layers.
        share: this stage's share of the costs.
        first: whether it is the first stage.
    """

    def __init__(self, costs: PhaseCosts, share: float = 1.0, first: bool = True) -> None:
        self._prefill, self._share, self._extra = costs.prefill, share, costs.extra
        *self._regimes, self._large = costs.decode
        self._step_share = share if costs.share_step else 1.0
        self._first = first and bool(costs.extra.step_s or costs.extra.context_s)

    @classmethod
    def of(cls, part: StagePart, costs: SimulateOptions) -> Self:
        """Make the stage from a run file's options, which must have costs by ``phases``."""
        assert costs.phases
        return cls(costs.phases, part.share, part.first)

    def seconds(self, work: Work) -> float:
        """Return the seconds of one step."""
        fixed = varying = own = 0.0
        if work.singles:
            decode = self._decode(work.singles)
            fixed = decode.step_s
            varying = decode.context_s * work.single_context + decode.sequence_s * work.singles
        if work.chunks:
            prefill = self._prefill
            fixed, own = prefill.step_s, self._extra.prefill_stage_s
            varying += prefill.token_s * (work.tokens - work.singles)
            varying += prefill.pair_s * prompt_pairs(work.chunks)
        if self._first:
            seen = work.single_context + sum([start + count for start, count in work.chunks])
            own += self._extra.step_s + self._extra.context_s * seen
        return self._step_share * fixed + self._share * varying + own

    def decode_seconds(self, rows: int) -> Callable[[int], float]:
        """Return the seconds of a step of ``rows`` decodes, as a function of their KV entries."""
        decode, share, extra = self._decode(rows), self._share, self._extra
        context_s, fixed = decode.context_s, self._step_share * decode.step_s
        rows_s = decode.sequence_s * rows
        if self._first:
            own_s, seen_s = extra.step_s, extra.context_s
            return lambda seen: (
                fixed + share * (context_s * seen + rows_s) + (own_s + seen_s * seen)
            )
        return lambda seen: fixed + share * (context_s * seen + rows_s)

    def _decode(self, rows: int) -> DecodeCosts:
        for regime in self._regimes:
            if regime.below is not None and rows < regime.below:
                return regime
        return self._large
