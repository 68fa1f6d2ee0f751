"""Step times that are linear in what a step holds: published or fitted coefficients as they are.

The seconds of one step:

    step_s + token_s * tokens + sequence_s * sequences
        + decode_context_s * (KV entries that the rows of one token see)
        + chunk_context_s * (KV entries before each chunk, summed)

Cronus' eq. 2, a prefill of L tokens in one step, ``k_p L + b_p``: ``token_s`` is k_p, and b_p is
``step_s + sequence_s``. Over several steps, each has its ``step_s`` and its chunk's context.

Eq. 3, a step of B tokens (a chunk and d decodes), ``k_ctxp (entries before the chunk) +
k_ctxd (those of all decodes) + b_c``: ``chunk_context_s`` is k_ctxp, ``decode_context_s`` k_ctxd,
and b_c is ``step_s + token_s B + sequence_s (1 + d)``, so the form is eq. 3's where ``sequence_s``
is 0. How much of b_c comes with the tokens, eq. 3 leaves open: with eq. 2 of the same instance,
``step_s`` is ``b_c - k_p B``. A decode sees its own entry, too, which eq. 3 leaves out.

DistServe's profiles, in milliseconds: prefill ``a + b sum(L) + c sum(L^2)`` gives ``step_s`` a and
``token_s`` b; c has no counterpart, as what a chunk's tokens see of each other is not counted here.
Decode ``a + b (context tokens) + c (batch size)`` gives ``step_s`` a, ``decode_context_s`` b, and
c is ``token_s + sequence_s``.
"""

from typing import Any

from pydantic import Field

from jaxinfer.errors import JaxinferError
from jaxinfer.serving.work import Work
from jaxinfer.validation import Options


class LinearCosts(Options):
    """Coefficients, in seconds; see this module's head for those of papers.

    Attributes:
        step_s: per step; ``token_s``: per token computed; ``sequence_s``: per sequence in it.
        decode_context_s: per KV entry that a row of one token sees, its own included.
        chunk_context_s: per KV entry before a chunk, however long the chunk.

    Raises:
        JaxinferError: steps would take no time.
    """

    step_s: float = Field(default=0.0, ge=0)
    token_s: float = Field(default=0.0, ge=0)
    sequence_s: float = Field(default=0.0, ge=0)
    decode_context_s: float = Field(default=0.0, ge=0)
    chunk_context_s: float = Field(default=0.0, ge=0)

    def model_post_init(self, context: Any, /) -> None:
        """Refuse steps that may take no time."""
        if not self.step_s and not self.token_s:
            raise JaxinferError("step_s or token_s must be greater than 0")


class LinearStage:
    """One pipeline stage.

    Args:
        costs: of all layers.
        share: this stage's part of them; ``step_s`` is every stage's in full.
    """

    def __init__(self, costs: LinearCosts, share: float = 1.0) -> None:
        self._costs, self._share = costs, share

    def seconds(self, work: Work) -> float:
        """Of one step."""
        costs = self._costs
        varying = (
            costs.token_s * work.tokens
            + costs.sequence_s * work.sequences
            + costs.decode_context_s * work.single_context
            + costs.chunk_context_s * sum(start for start, _ in work.chunks)
        )
        return costs.step_s + self._share * varying
