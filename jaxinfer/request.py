"""Sampling parameters, which a user hands in, and request outputs, which come back."""

import re
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from jaxinfer.options.validation import OptionError, Options, shown

FinishReason = Literal["stop", "length", "error", "lost"]


def _as_texts(value: object) -> object:
    """Accept one stop string or none, as the OpenAI API and vLLM do."""
    if value is None:
        return ()
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, list | tuple):
        raise ValueError(f"{shown(value)} must be a text or a list of texts")
    return tuple(value)


def _as_tokens(value: object) -> object:
    """Accept none."""
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
    """Arrays and their numbers as Python's own, in lists and mappings too."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, list | tuple):
        return type(value)(map(_plain, value))
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return value


def _with_int_keys(value: object) -> object:
    """Accept none, and the keys of a JSON object, which are strings."""
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
    """Parameters by which a request's tokens are drawn. Names and defaults are those of vLLM.

    Attributes:
        n: Number of continuations, each with its own seed; all are the same at temperature 0.
        temperature: Divisor of the logits; 0 is greedy. At 100, all tokens are almost equally
            likely.
        top_k: Sample from this many of the most likely tokens; 0 or -1 keeps all.
        top_p: Sample from the most likely tokens whose probabilities add up to this value.
        min_p: Drop tokens whose probability is below this share of the most likely one's. It is
            applied before top_k and top_p.
        repetition_penalty: Divides positive logits, and multiplies negative ones, of tokens in the
            prompt or output.
        presence_penalty: Subtracted from the logits of tokens in the output.
        frequency_penalty: Subtracted from the logit of a token for each time that it occurs in the
            output.
        logit_bias: Values added to logits, by token id.
        seed: Seed of the sampling; by default derived from the engine's seed and the request's id.
            A repeated run repeats its tokens.
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
        """True if a draw depends on the tokens so far."""
        return (
            self.repetition_penalty != 1
            or self.presence_penalty != 0
            or self.frequency_penalty != 0
        )


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters with what the engine has filled in: the payload of a request.

    Attributes:
        end_token_ids: EOS (unless it is ignored) and stop tokens.
        parent: id of the request of which this is one of ``n`` continuations, the index-th.
    """

    params: SamplingParams
    seed: int
    end_token_ids: tuple[int, ...] = ()
    parent: str = ""
    index: int = 0


@dataclass(frozen=True)
class Logprob:
    """A token's log probability under the model itself, and its rank (1 is the likeliest).

    ``decoded_token`` is the token's text: of one that was drawn, what it adds to the output, which
    is nothing as long as a character is incomplete; of any other, its own, in which U+FFFD is part
    of a character. Special tokens, which no output's text has, show their names. ``token_bytes``
    are the bytes for which the vocabulary has the token; a special one has none.
    """

    logprob: float
    rank: int
    decoded_token: str | None = None
    token_bytes: bytes | None = None


@dataclass
class RequestMetrics:
    """Times of one request, in seconds on the run's clock, which starts at 0.

    ``token_times`` holds the time at which each output token reached the host.
    ``num_cached_tokens`` are those that the request's first start found in the prefix cache.
    ``cut`` counts the KV entries that the first instance had when it handed the request on, and
    ``received`` is when the KV arrived from another instance that had drawn the first token; None
    where that never happened.
    """

    arrival: float
    first_scheduled: float | None = None
    token_times: list[float] = field(default_factory=list)
    num_preemptions: int = 0
    num_cached_tokens: int | None = None
    cut: int | None = None
    received: float | None = None

    def add_cached(self, num_tokens: int) -> None:
        """Note what a start has found in the prefix cache; the first one counts."""
        if self.num_cached_tokens is None:
            self.num_cached_tokens = num_tokens

    def delivered(self, after_transfer: bool) -> list[float]:
        """``token_times``; with ``after_transfer``, the first is when its KV has arrived."""
        if not after_transfer or self.received is None:
            return self.token_times
        return [self.received, *self.token_times[1:]]

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
    """A continuation of a prompt.

    ``finish_reason`` is ``"stop"`` (EOS, a stop token or string; ``stop_reason`` is the token
    or the string, None for EOS) or ``"length"``. ``cumulative_logprob`` sums the natural log of
    the model's own probability (before temperature and truncation) of each token.
    ``logprobs`` has a mapping of token to ``Logprob`` per output token, where they were asked for.
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
    """A finished request, in the shape that vLLM's users know.

    ``prompt`` is None where it was not given as text. ``prompt_logprobs``, where asked for, has
    None for the first token, of which the model says nothing. ``error`` says why a request was
    refused, or could not be finished; it has no outputs then. ``lost``: because an instance was
    lost, so that the same request may succeed later. ``prompt_index`` counts the prompts of one
    call from 0, in the order in which they were given; requests that were made by hand have 0.
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
