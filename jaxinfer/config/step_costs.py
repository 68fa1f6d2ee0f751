"""Coefficients and curves of whole steps in a run file, which ``simulate`` uses."""

from typing import Any, Literal

from pydantic import Field

from jaxinfer.errors import JaxinferError
from jaxinfer.options.validation import OptionError, Options


class LinearCosts(Options):
    """Coefficients, in seconds; ``simulate/costs/linear.py`` relates them to papers.

    Attributes:
        step_s: Per step.
        token_s: Per computed token.
        sequence_s: Per sequence of a step.
        decode_context_s: Per KV entry that a row of one token sees, including its own.
        chunk_context_s: Per KV entry before a chunk, whatever the chunk's length.

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


class PrefillCosts(Options):
    """Costs of a step with chunks, in seconds.

    Attributes:
        step_s: Per step.
        token_s: Per token of a chunk.
        pair_s: Per pair of tokens in a prompt; a whole prompt has the square of its length in
            pairs.

    Raises:
        JaxinferError: steps would take no time.
    """

    step_s: float = Field(default=0.0, ge=0)
    token_s: float = Field(default=0.0, ge=0)
    pair_s: float = Field(default=0.0, ge=0)

    def model_post_init(self, context: Any, /) -> None:
        """Refuse steps that take no time."""
        if not (self.step_s or self.token_s or self.pair_s):
            raise JaxinferError("step_s, token_s or pair_s must be greater than 0")


class DecodeCosts(Options):
    """Costs of a step with rows of one token, in seconds.

    Attributes:
        below: These costs apply to batches of fewer rows than this; None means all larger batches.
        step_s: Per step.
        sequence_s: Per row.
        context_s: Per KV entry that the rows see, including their own.

    Raises:
        JaxinferError: steps would take no time.
    """

    below: int | None = Field(default=None, ge=2)
    step_s: float = Field(default=0.0, ge=0)
    context_s: float = Field(default=0.0, ge=0)
    sequence_s: float = Field(default=0.0, ge=0)

    def model_post_init(self, context: Any, /) -> None:
        """Refuse steps that take no time."""
        if not (self.step_s or self.context_s or self.sequence_s):
            raise JaxinferError("step_s, context_s or sequence_s must be greater than 0")


class ExtraCosts(Options):
    """Costs in seconds that stages do not divide among them.

    Attributes:
        step_s: Seconds of the first stage, per step.
        context_s: Seconds of the first stage, per KV entry that the step's rows see, including
            their own.
        prefill_stage_s: Seconds of each stage, per step with chunks.
    """

    step_s: float = Field(default=0.0, ge=0)
    context_s: float = Field(default=0.0, ge=0)
    prefill_stage_s: float = Field(default=0.0, ge=0)


class PhaseCosts(Options):
    """Coefficients by phase; ``simulate/costs/phases.py`` relates them to papers.

    Attributes:
        decode: coefficients by size of the batch, the smallest first; the last ones are for all
            larger sizes.
        share_step: whether pipeline stages divide ``step_s`` in proportion to their layers, as they
            divide all other costs; otherwise each stage takes the full ``step_s``.
        extra: costs that stages do not divide.

    Raises:
        JaxinferError: the sizes of batches do not increase, or do not end with all larger ones.
    """

    prefill: PrefillCosts
    decode: tuple[DecodeCosts, ...] = Field(min_length=1, strict=False)
    share_step: bool = False
    extra: ExtraCosts = ExtraCosts()

    def model_post_init(self, context: Any, /) -> None:
        """Check that each batch size has coefficients, and that all coefficients are used."""
        last = 0
        for number, regime in enumerate(self.decode[:-1]):
            if regime.below is None:
                raise OptionError(
                    f"decode[{number}].below is missing: only the last regime is for all batches "
                    "that are left"
                )
            if regime.below <= last:
                raise OptionError(
                    f"decode[{number}].below is {regime.below}, must rise from one regime to the "
                    "next"
                )
            last = regime.below
        if (below := self.decode[-1].below) is not None:
            raise OptionError(
                f"decode[{len(self.decode) - 1}].below is {below}: the last regime is for all "
                "batches that are left, leave it out"
            )


class CurveCosts(Options):
    """Curves of whole steps; ``simulate/costs/curves.py`` lists the file's columns.

    Attributes:
        file: the file with the points, relative to the working directory.
        decode: the quantities on which the time of a step of decodes depends.
        mixed_factor: ratio of the time of a step with prompts and decodes to that of a prompt with
            all its tokens; by default, the step takes the sum of the times of its prompts and of
            its decodes alone.
        share_weights: whether to subtract, from that sum, the time of a single decode at the
            smallest context, because prompts and decodes read the weights together.
    """

    file: str
    decode: Literal["by_tokens", "by_batch_and_context"] = "by_batch_and_context"
    mixed_factor: float | None = Field(default=None, gt=0)
    share_weights: bool = False

    def model_post_init(self, context: Any, /) -> None:
        """Refuse two rules for the time of a mixed step."""
        if self.mixed_factor is not None and self.share_weights:
            raise JaxinferError("both mixed_factor and share_weights: give one of them")
