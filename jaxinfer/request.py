"""Sampling parameters, which a user passes in, and request outputs, which come back."""

import re
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from jaxinfer.options.validation import OptionError, Options, shown

FinishReason = Literal["stop", "length", "error", "lost"]


def _as_texts(value: object) -> object:
    """Accept one stop string or None, as the OpenAI API and vLLM do."""
    if value is None:
        return ()
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, list | tuple):
        raise ValueError(f"{shown(value)} must be a text or a list of texts")
    return tuple(value)


def _as_tokens(value: object) -> object:
    """Accept None."""
    if value is None:
        return ()
    if not isinstance(value, list | tuple):
        raise ValueError(f"{shown(value)} must be a list of tokens")
    return tuple(value)


def _not_empty(value: tuple[str, ...]) -> tuple[str, ...]:
    if "" in value:
        raise ValueError("'' is empty, must have at least one character")
    return value


def _plain(value: object) -> object:
    """Convert arrays and their numbers to Python's own types, also inside lists and mappings."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, list | tuple):
        return type(value)(map(_plain, value))
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return value


def _with_int_keys(value: object) -> object:
    """Accept None, and the keys of a JSON object, which are strings."""
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ValueError(f"{shown(value)} must be a mapping from tokens to numbers")
    converted = {
        int(k) if isinstance(k, str) and re.fullmatch(r"-?[0-9]{1,12}", k) else _plain(k): v
        for k, v in value.items()
    }
    if len(converted) < len(value):
        raise ValueError("a token is named twice")
    return converted


class SamplingParams(Options):
    """Parameters that control how a request's tokens are sampled. Names and defaults are vLLM's.

    Attributes:
        n: Number of continuations, each with its own seed; all are the same at temperature 0.
        temperature: Divisor of the logits; 0 is greedy. At 100, all tokens are almost equally
            likely.
        top_k: Sample from this many of the most likely tokens; 0 or -1 keeps all.
        top_p: Sample from the most likely tokens whose probabilities add up to this value.
        min_p: Drop tokens whose probability is below this share of the most likely one's. It is
            applied before top_k and top_p.
        repetition_penalty: Factor for tokens in the prompt or output: divides their positive
            logits, and multiplies their negative ones.
        presence_penalty: Number subtracted from the logits of tokens in the output.
        frequency_penalty: Number subtracted from a token's logit for each of its occurrences in the
            output.
        logit_bias: Values added to logits, by token id.
        seed: Seed of the sampling; by default derived from the engine's seed and the request's id.
            Either way, a repeated run samples the same tokens.
        max_tokens: Largest number of output tokens; 256 by default in lines of a batch.
        min_tokens: Smallest number of output tokens. Until then EOS and stop tokens are not drawn;
            a stop string has to end later.
        logprobs: Number of the most likely tokens whose log probabilities are reported at each
            position. That of the drawn token is always reported; 0 reports only that one.
        prompt_logprobs: Like ``logprobs``, for the prompt. All of the prompt is then computed, even
            what the prefix cache has.
        stop: Strings that end the output; they are not part of it.
        stop_token_ids: Tokens that end the output, in addition to EOS.
        ignore_eos: Continue after EOS.
    """

    n: int = Field(default=1, ge=1, le=128)
    temperature: float = Field(default=1.0, ge=0, le=100)
    top_k: int = Field(default=0, ge=-1)
    top_p: float = Field(default=1.0, gt=0, le=1)
    min_p: float = Field(default=0.0, ge=0, le=1)
    repetition_penalty: float = Field(default=1.0, ge=0.01, le=100)
    presence_penalty: float = Field(default=0.0, ge=-2, le=2)
    frequency_penalty: float = Field(default=0.0, ge=-2, le=2)
    logit_bias: Annotated[
        dict[Annotated[int, Field(ge=0)], Annotated[float, Field(ge=-100, le=100)]],
        BeforeValidator(_with_int_keys),
    ] = Field(default_factory=dict)
    seed: int | None = Field(default=None, ge=0, lt=2**63)
    max_tokens: int = Field(default=16, ge=1)
    min_tokens: int = Field(default=0, ge=0)
    logprobs: int | None = Field(default=None, ge=0, le=20)
    prompt_logprobs: int | None = Field(default=None, ge=0, le=20)
    stop: Annotated[tuple[str, ...], BeforeValidator(_as_texts), AfterValidator(_not_empty)] = ()
    stop_token_ids: Annotated[
        tuple[Annotated[int, Field(ge=0)], ...], BeforeValidator(_as_tokens)
    ] = ()
    ignore_eos: bool = False

    @model_validator(mode="before")
    @classmethod
    def _without_arrays(cls, data: Any) -> Any:
        return _plain(data)

    def model_post_init(self, context: object, /) -> None:
        """Refuse combinations that cannot work."""
        if self.min_tokens > self.max_tokens:
            raise OptionError(
                f"min_tokens is {self.min_tokens}, must be at most max_tokens, {self.max_tokens}"
            )

    @property
    def has_penalties(self) -> bool:
        """True if a sample depends on earlier tokens."""
        return (
            self.repetition_penalty != 1
            or self.presence_penalty != 0
            or self.frequency_penalty != 0
        )


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters completed by the engine: the payload of a request.

    Attributes:
        end_token_ids: EOS (unless the request ignores it) and the stop tokens.
        parent: id of the user's request, of which this is one of ``n`` continuations.
        index: number of this continuation.
    """

    params: SamplingParams
    seed: int
    end_token_ids: tuple[int, ...] = ()
    parent: str = ""
    index: int = 0


@dataclass(frozen=True)
class Logprob:
    """A token's log probability under the model itself, and its rank (1 is the likeliest).

    Attributes:
        decoded_token: text of the token. For a sampled token, the text that it adds to the output,
            which is empty while a character is incomplete. For other tokens, their own text, with
            U+FFFD for part of a character. Special tokens, which never appear in an output's text,
            show their names.
        token_bytes: bytes of the token in the vocabulary; None for special tokens.
    """

    logprob: float
    rank: int
    decoded_token: str | None = None
    token_bytes: bytes | None = None


@dataclass
class RequestMetrics:
    """Times of one request, in seconds on the run's clock, which starts at 0.

    Attributes:
        token_times: times at which the output tokens reached the host.
        num_cached_tokens: number of tokens that the request's first start found in the prefix
            cache.
        cut: number of KV entries that the first instance had when it handed the request over.
        received: time at which the KV arrived from another instance that had sampled the first
            token; None if that never happened.
    """

    arrival: float
    first_scheduled: float | None = None
    token_times: list[float] = field(default_factory=list)
    num_preemptions: int = 0
    num_cached_tokens: int | None = None
    cut: int | None = None
    received: float | None = None

    def add_cached(self, num_tokens: int) -> None:
        """Record the tokens that a start has found in the prefix cache.

        Only the first start counts.
        """
        if self.num_cached_tokens is None:
            self.num_cached_tokens = num_tokens

    def delivered(self, after_transfer: bool) -> list[float]:
        """Return ``token_times``; with ``after_transfer``, the first time is when its
        KV arrived.
        """
        if not after_transfer or self.received is None:
            return self.token_times
        return [self.received, *self.token_times[1:]]

    @property
    def ttft(self) -> float | None:
        """Time from arrival to the first token."""
        return self.token_times[0] - self.arrival if self.token_times else None

    @property
    def tbt(self) -> list[float]:
        """Times between tokens: one fewer than there are tokens."""
        return [b - a for a, b in zip(self.token_times, self.token_times[1:], strict=False)]


@dataclass
class CompletionOutput:
    """A continuation of a prompt.

    Attributes:
        cumulative_logprob: sum of the natural logarithms of the model's own probability (before
            temperature and truncation) of each token.
        logprobs: for each output token, a mapping of tokens to ``Logprob``, if requested.
        finish_reason: ``"stop"`` (EOS, a stop token or a stop string) or ``"length"``.
        stop_reason: the stop token or string; None for EOS.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None


@dataclass
class RequestOutput:
    """A finished request, in the form that vLLM's users know.

    Attributes:
        prompt: text of the prompt; None if it was not given as text.
        prompt_logprobs: log probabilities of the prompt, if requested; the first token has None,
            since the model gives it no probability.
        error: reason why a request was refused or could not be finished; it then has no outputs.
        lost: whether it failed because an instance was lost, so that it may succeed later.
        prompt_index: number of the prompt among those of one call, from 0; requests made by hand
            have 0.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    error: str | None = None
    lost: bool = False
    prompt_index: int = 0
