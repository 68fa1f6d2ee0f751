"""How fast an instance works, for the decisions of ``Takeover``."""

from dataclasses import dataclass

from jaxinfer.serving.step_fit import StepFit


@dataclass(frozen=True)
class Speeds:
    """How many seconds an instance's work takes, according to its fits.

    Attributes:
        token_s: seconds that a prompt token takes in a full step.
        sequence_s: seconds that a decode adds to a step.
        entry_s: seconds added by each KV entry that a decode sees.
        step_s: fixed seconds of a step with only decodes.
        full_s: seconds of a step with as many tokens as allowed, without its decodes' entries.
        full_entry_s: seconds that each of these entries adds.
        prefix_s: seconds that each KV entry before a chunk adds.
    """

    token_s: float
    sequence_s: float
    entry_s: float
    step_s: float
    full_s: float
    full_entry_s: float
    prefix_s: float = 0.0

    @classmethod
    def of(cls, fit: StepFit, narrow: float = 1.0) -> "Speeds":
        """Derive speeds from fits; if there is no fit of decodes, use that of mixed steps.

        A full step has the share ``narrow`` of the tokens that a profiled full step has.
        """
        mixed, decode = fit.mixed, fit.decode
        entry_s, full_s = max(mixed.per_decode_context, 0.0), max(mixed.constant, 1e-9)
        own = (0.0, entry_s, full_s)
        if decode:
            own = decode.per_sequence, decode.per_context, decode.constant
        sequence_s, seen_s, step_s = (max(each, 0.0) for each in own)
        token_s = max(fit.prefill.per_token, 1e-12)
        prefix_s = max(mixed.per_prefill_context, 0.0)
        return cls(token_s, sequence_s, seen_s, step_s, narrow * full_s, entry_s, prefix_s)

    def displaced(self, context: float) -> float:
        """Return how many prompt tokens could be computed instead of a decode with this context."""
        return 1 + (self.sequence_s + self.entry_s * context) / self.token_s
