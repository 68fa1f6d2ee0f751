"""Coefficients and curves of whole steps, as a run file has them: what ``simulate`` goes by."""

from typing import Any, Literal

from pydantic import Field

from jaxinfer.errors import JaxinferError
from jaxinfer.options.validation import OptionError, Options


class LinearCosts(Options):
    """Coefficients, in seconds; ``simulate/costs/linear.py`` has those of papers.

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


class PrefillCosts(Options):
    """Costs of a step with chunks, in seconds.

    Attributes:
        step_s: per step; ``token_s``: per token of a chunk.
        pair_s: per pair of tokens in a prompt; a whole prompt has the square of its length in
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
        below: applies to batches of fewer rows than this; None means all larger batches.
        step_s: per step; ``sequence_s``: per row.
        context_s: per KV entry that the rows see, their own included.

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
    """Costs that a stage has in full, however many stages share the layers, in seconds.

    Attributes:
        step_s: seconds of the first stage, per step.
        context_s: seconds of the first stage, per KV entry that the step's rows see, their own
            included.
        prefill_stage_s: seconds of each stage, per step with chunks.
    """

    step_s: float = Field(default=0.0, ge=0)
    context_s: float = Field(default=0.0, ge=0)
    prefill_stage_s: float = Field(default=0.0, ge=0)


class PhaseCosts(Options):
    """Coefficients by phase; ``simulate/costs/phases.py`` has those of papers.

    Attributes:
        decode: by size of the batch, the smallest first; the last one is for all larger ones.
        share_step: pipeline stages divide ``step_s`` in proportion to their layers, as they divide
            all other costs; otherwise each stage takes the full ``step_s``.
        extra: costs that stages do not divide.

    Raises:
        JaxinferError: the sizes of batches do not rise, or do not end with all larger ones.
    """

    prefill: PrefillCosts
    decode: tuple[DecodeCosts, ...] = Field(min_length=1, strict=False)
    share_step: bool = False
    extra: ExtraCosts = ExtraCosts()

    def model_post_init(self, context: Any, /) -> None:
        """Check that each batch size has a regime, and each regime some batch size."""
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
    """Curves of whole steps; ``simulate/costs/curves.py`` has the file's columns.

    Attributes:
        file: the points, as seen from the working directory.
        decode: what a step of decodes goes by.
        mixed_factor: ratio of the time of a step with prompts and decodes to that of a prompt with
            all its tokens; by default, the step takes the sum of the times of its prompts and of
            its decodes alone.
        share_weights: of that sum, what a single decode takes at the least context is left out:
            prompts and decodes read the weights together.
    """

    file: str
    decode: Literal["by_tokens", "by_batch_and_context"] = "by_batch_and_context"
    mixed_factor: float | None = Field(default=None, gt=0)
    share_weights: bool = False

    def model_post_init(self, context: Any, /) -> None:
        """Refuse two ways to reckon a step with both."""
        if self.mixed_factor is not None and self.share_weights:
            raise JaxinferError("both mixed_factor and share_weights: give one of them")
