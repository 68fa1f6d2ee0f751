"""Finds the end of a request's text, and makes its output."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import pairwise

from jaxinfer.request import CompletionOutput, Logprob, RequestOutput, Sampling
from jaxinfer.serving.loop import Stop
from jaxinfer.serving.request_state import RequestState
from jaxinfer.text.tokenizer import Tokenizer


class StopCheck:
    """Watches one request's tokens for EOS, stop tokens and stop strings.

    Stop strings may span tokens, and text is held back until its characters are complete.

    Args:
        prompt: tokens of the prompt, which precede the text.
    """

    def __init__(self, sampling: Sampling, tokenizer: Tokenizer, prompt: Sequence[int]) -> None:
        params = sampling.params
        self._end_ids = frozenset(sampling.end_token_ids)
        self._stop_ids = frozenset(params.stop_token_ids)
        self._stop = params.stop
        self._tokenizer = tokenizer
        self._prompt = prompt
        self._stream = tokenizer.open_stream(prompt) if params.stop else None
        # The end of the text, in which a stop string may have started.
        self._tail = ""
        self._tail_len = max(map(len, params.stop), default=1) - 1
        self._cut: int | None = None
        self._min_tokens = params.min_tokens
        self._num_tokens = 0
        self._emitted = 0

    def add(self, token: int) -> Stop | None:
        """Add the next token; return a reason if it ends the request."""
        self._num_tokens += 1
        if token in self._stop_ids:
            return "stop", token
        if token in self._end_ids:
            return "stop", None
        if self._stream:
            return self._find_stop(self._stream.add(token))
        return None

    def _find_stop(self, piece: str) -> Stop | None:
        window = self._tail + piece
        begin = self._emitted - len(self._tail)
        self._emitted += len(piece)
        # Only strings that end in the new piece: earlier ones ended before ``min_tokens``.
        new = len(self._tail)
        found = [
            (at, stop)
            for stop in self._stop
            if (at := window.find(stop, max(0, new - len(stop) + 1))) >= 0
        ]
        if found and self._num_tokens > self._min_tokens:
            at, stop = min(found, key=lambda hit: hit[0])
            self._cut = begin + at
            return "stop", stop
        self._tail = window[-self._tail_len :] if self._tail_len else ""
        return None

    def text(self, token_ids: list[int], ended_by_token: bool) -> str:
        """Return the output's text, without the token or the string that ended the output."""
        text = self._tokenizer.decode(_kept(token_ids, ended_by_token), after=self._prompt)
        return text if self._cut is None else text[: self._cut]

    def pieces(self, token_ids: list[int], ended_by_token: bool) -> list[str]:
        """Return the text that each token adds before the cut; a token that ended it adds none.

        A character that consists of several tokens is added by the last of them.
        """
        kept = _kept(token_ids, ended_by_token)
        text = self._tokenizer.decode(kept, after=self._prompt)
        if not text:
            return [""] * len(kept)
        stream = self._tokenizer.open_stream(self._prompt)
        ends, end = [0], 0
        for token in kept:
            end += len(stream.add(token))
            ends.append(ends[-1] if stream.is_within else end)
        # An incomplete character is U+FFFD in the text; special tokens add none of it.
        adding = (index for index, token in enumerate(kept, 1) if self._tokenizer.token(token)[1])
        last = max(adding, default=len(kept))
        ends[last:] = [len(text)] * (len(ends) - last)
        return [text[begin:end] for begin, end in pairwise(ends)]


def _kept(token_ids: list[int], ended_by_token: bool) -> list[int]:
    return token_ids[:-1] if ended_by_token else token_ids


def decoded(position: object, tokenizer: Tokenizer) -> dict[int, Logprob]:
    """Return log probabilities at one position, with the tokens' texts and bytes."""
    assert isinstance(position, dict)
    found = {}
    for token, logprob in position.items():
        text, content = tokenizer.token(token)
        found[token] = replace(logprob, decoded_token=text, token_bytes=content)
    return found


def completion(request: RequestState, check: StopCheck, tokenizer: Tokenizer) -> CompletionOutput:
    """Return a finished request's output."""
    sampling = _sampling(request)
    tokens = request.output_token_ids
    by_token = request.finish_reason == "stop" and not isinstance(request.stop_reason, str)
    logprobs = None
    if sampling.params.logprobs is not None:
        logprobs = [decoded(position, tokenizer) for position in request.details]
        # A token that ended the text keeps its own text.
        for token, piece, position in zip(
            tokens, check.pieces(tokens, by_token), logprobs, strict=False
        ):
            if position[token].token_bytes:
                position[token] = replace(position[token], decoded_token=piece)
    return CompletionOutput(
        index=sampling.index,
        text=check.text(tokens, by_token),
        token_ids=tokens,
        logprobs=logprobs,
        cumulative_logprob=request.cumulative_logprob,
        finish_reason=request.finish_reason,
        stop_reason=request.stop_reason,
    )


class Answers:
    """Makes the outputs of one run's requests, and decides when each one ends."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._checks: dict[str, StopCheck] = {}

    def add(self, requests: Iterable[RequestState]) -> None:
        """Add requests from ``LLM.make_requests``; each is forgotten when answered."""
        for request in requests:
            self._checks[request.id] = StopCheck(
                _sampling(request), self._tokenizer, request.prompt_token_ids
            )

    def check_stop(self, request: RequestState, token: int) -> Stop | None:
        """Process a request's next token; return a reason if it ends the request.

        A token that was sampled from NaN fails the request.
        """
        if math.isnan(request.cumulative_logprob):
            request.error = (
                f"request {request.id!r}: the model's logits are NaN or infinite at output token "
                f"{len(request.output_token_ids)}: its weights hold NaN or infinity, or its "
                "activations leave the range of their dtype; check the checkpoint, or try float32"
            )
            return "error", "nan"
        return self._checks[request.id].add(token)

    def output(self, siblings: Sequence[RequestState]) -> RequestOutput:
        """Return the output of all continuations of one prompt, which have ended."""
        first = siblings[0]
        failed = next((request for request in siblings if request.error), None)
        prompt_logprobs = None
        if _sampling(first).params.prompt_logprobs is not None and not failed:
            found = (first.prompt_details[p] for p in range(1, first.prompt_len))
            prompt_logprobs = [None, *(decoded(position, self._tokenizer) for position in found)]
        checks = [self._checks.pop(request.id) for request in siblings]
        return RequestOutput(
            request_id=_sampling(first).parent,
            prompt=None,
            prompt_token_ids=list(first.prompt_token_ids),
            outputs=[
                completion(request, check, self._tokenizer)
                for request, check in zip(siblings, checks, strict=True)
                if not failed
            ],
            finished=True,
            metrics=first.metrics,
            prompt_logprobs=prompt_logprobs,
            error=failed.error if failed else None,
            lost=any(request.finish_reason == "lost" for request in siblings),
        )


def _sampling(request: RequestState) -> Sampling:
    assert isinstance(request.payload, Sampling)
    return request.payload
