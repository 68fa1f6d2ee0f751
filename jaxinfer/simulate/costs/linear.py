"""Step times that are linear in the contents of a step, from published or fitted coefficients.

The seconds of one step:

    step_s + token_s * tokens + sequence_s * sequences
        + decode_context_s * (KV entries that the rows of one token see)
        + chunk_context_s * (KV entries before each chunk, summed)

Cronus' eq. 2, a prefill of L tokens in one step, ``k_p L + b_p``: ``token_s`` is k_p, and b_p is
``step_s + sequence_s``. Over several steps, each has its ``step_s`` and its chunk's context.

Eq. 3, a step of B tokens (a chunk and d decodes), ``k_ctxp (entries before the chunk) +
k_ctxd (those of all decodes) + b_c``: ``chunk_context_s`` is k_ctxp, ``decode_context_s`` k_ctxd,
and b_c is ``step_s + token_s B + sequence_s (1 + d)``, so the form is eq. 3's where ``sequence_s``
is 0. Eq. 3 leaves open how much of b_c comes with the tokens: with eq. 2 of the same instance,
``step_s`` is ``b_c - k_p B``. A decode sees its own entry, too, which eq. 3 leaves out.

For DistServe's profiles, which have a term in the squares of prompts' lengths and decode
coefficients that depend on the size of the batch, see ``phases.py``.
"""

from collections.abc import Callable
from typing import Self

from jaxinfer.config.costs import SimulateOptions
from jaxinfer.config.stage_part import StagePart
from jaxinfer.config.step_costs import LinearCosts
from jaxinfer.serving.batch import Work
from jaxinfer.simulate.costs.step_floor import StepFloor


class LinearStage:
    """Linear step times of a pipeline stage.

    Args:
        costs: costs of all layers.
        share: this stage's share of the costs; every stage has all of ``step_s``.
    """

    def __init__(self, costs: LinearCosts, share: float = 1.0) -> None:
        self._costs, self._share = costs, share

    @classmethod
    def of(cls, part: StagePart, costs: SimulateOptions) -> Self:
        """Make the stage from a run file's options, which must have ``linear`` costs."""
        assert costs.linear
        return cls(costs.linear, part.share)

    def seconds(self, work: Work) -> float:
        """Return the seconds of one step."""
        costs = self._costs
        varying = (
            costs.token_s * work.tokens
            + costs.sequence_s * work.sequences
            + costs.decode_context_s * work.single_context
            + costs.chunk_context_s * sum(start for start, _ in work.chunks)
        )
        return costs.step_s + self._share * varying

    def decode_seconds(self, rows: int) -> Callable[[int], float]:
        """Return the seconds of a step of ``rows`` decodes, as a function of their KV entries."""
        costs, share = self._costs, self._share
        step_s, context_s = costs.step_s, costs.decode_context_s
        fixed = costs.token_s * rows + costs.sequence_s * rows
        return lambda seen: step_s + share * (fixed + context_s * seen)

    def floor(self) -> StepFloor:
        """Return the parts of a lower bound on step times; it ignores the entries before chunks."""
        costs = self._costs
        return StepFloor(
            step_s=costs.step_s,
            token_s=self._share * costs.token_s,
            sequence_s=self._share * costs.sequence_s,
            context_s=self._share * costs.decode_context_s,
        )
