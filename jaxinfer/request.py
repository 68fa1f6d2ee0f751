"""What a user hands in (sampling parameters) and gets back (request outputs)."""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from jaxinfer.validation import Options

FinishReason = Literal["stop", "length", "error"]


def _as_list(value: object) -> object:
    """Accept one stop string or none, as the OpenAI API and vLLM do."""
    if value is None:
        return ()
    if isinstance(value, str):
        return (value,)
    return tuple(value) if isinstance(value, list) else value


class SamplingParams(Options):
    """How to draw a request's tokens. Names and defaults are those of vLLM.

    Attributes:
        temperature: 0 is greedy; logits are divided by it otherwise.
        top_k: keep the k likeliest tokens; 0 or -1 keeps all.
        top_p: of those, keep the smallest set whose probability reaches ``top_p``.
        seed: with the position, decides each draw; without one, the engine derives it from
            its own seed and the request's id, so that a repeated run repeats its tokens.
        max_tokens: output tokens at most.
        stop: strings that end the output; the text stops before them.
        stop_token_ids: tokens that end the output besides EOS.
        ignore_eos: go on after EOS.
    """

    temperature: float = Field(default=1.0, ge=0)
    top_k: int = Field(default=0, ge=-1)
    top_p: float = Field(default=1.0, gt=0, le=1)
    seed: int | None = Field(default=None, ge=0, lt=2**63)
    max_tokens: int = Field(default=16, ge=1)
    stop: Annotated[tuple[Annotated[str, Field(min_length=1)], ...], BeforeValidator(_as_list)] = ()
    stop_token_ids: Annotated[
        tuple[Annotated[int, Field(ge=0)], ...], BeforeValidator(_as_list)
    ] = ()
    ignore_eos: bool = False


@dataclass
class RequestMetrics:
    """Times of one request, in seconds on the run's clock, which starts at 0.

    ``token_times`` holds the time at which each output token reached the host.
    """

    arrival: float
    first_scheduled: float | None = None
    token_times: list[float] = field(default_factory=list)
    num_preemptions: int = 0

    @property
    def ttft(self) -> float | None:
        """Time to the first token since arrival."""
        return self.token_times[0] - self.arrival if self.token_times else None

    @property
    def tbt(self) -> list[float]:
        """Times between tokens: one fewer than there are tokens."""
        return [b - a for a, b in zip(self.token_times, self.token_times[1:], strict=False)]


@dataclass
class CompletionOutput:
    """One continuation of a prompt.

    ``finish_reason`` is ``"stop"`` (EOS, a stop token or string; ``stop_reason`` is the token
    or the string, None for EOS) or ``"length"``. ``cumulative_logprob`` sums the natural log of
    the model's own probability (before temperature and truncation) of each token.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None
    logprobs: None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None


@dataclass
class RequestOutput:
    """A finished request, in the shape that vLLM's users know.

    ``prompt`` is None where it was not given as text. ``error`` says why a request was refused;
    it has no outputs then.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics
    error: str | None = None
