"""Turns prompts and sampling parameters into the requests that the loop serves."""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from dataclasses import dataclass
from typing import Any

from jaxinfer.errors import JaxinferError
from jaxinfer.request import RequestOutput, Sampling, SamplingParams
from jaxinfer.serving.request_state import RequestState
from jaxinfer.text.prompts import Params, check_params, paired, token_ids
from jaxinfer.text.tokenizer import Tokenizer

# Converts a user's input to its text, if it has any, and its tokens.
Encode = Callable[[Any], tuple[str | None, list[int]]]
Make = Callable[[str, Sequence[int], SamplingParams], list[RequestState]]


@dataclass(frozen=True)
class RequestMaker:
    """Makes requests for one model.

    Attributes:
        max_model_len: largest number of prompt and output tokens that each of the model's instances
            allows.
        seed: seed for sampling parameters that give none.
    """

    tokenizer: Tokenizer
    vocab_size: int
    max_model_len: int
    seed: int

    def make(
        self, request_id: str, prompt_token_ids: Sequence[int], params: SamplingParams
    ) -> list[RequestState]:
        """Make ``params.n`` requests, and choose their seeds and largest outputs.

        Raises:
            JaxinferError: there are no tokens, too many, or some outside the vocabulary; or
                ``params`` is not a ``SamplingParams``.
        """
        check_params(params)
        prompt = token_ids(prompt_token_ids)
        self._check(prompt, params)
        seed = params.seed
        if seed is None:
            seed = _hash63(f"{self.seed}/{request_id}")
        ends = () if params.ignore_eos else tuple(self.tokenizer.eos_token_ids)
        ends += params.stop_token_ids
        requests = []
        for index in range(params.n):
            # Requests with different ids never get the same key.
            suffixed = params.n > 1 or request_id.endswith(")")
            request = RequestState(
                id=f"{request_id} ({index + 1} of {params.n})" if suffixed else request_id,
                prompt_len=len(prompt),
                max_tokens=min(params.max_tokens, self.max_model_len - len(prompt)),
                prompt_token_ids=prompt,
                payload=Sampling(params, seed, ends, request_id, index),
            )
            request.takes_cached = params.prompt_logprobs is None
            requests.append(request)
            # Further continuations have their own seeds, and their prompt is reported once.
            params = params.model_copy(update={"prompt_logprobs": None})
            seed = _hash63(f"{seed}#{index}")
        return requests

    def _check(self, prompt: Sequence[int], params: SamplingParams) -> None:
        if not prompt:
            raise JaxinferError("the prompt is empty, needs at least one token")
        if len(prompt) >= self.max_model_len:
            raise JaxinferError(
                f"the prompt has {len(prompt)} tokens, max_model_len is {self.max_model_len}: "
                "there is no room for an output"
            )
        named = [*prompt, *params.logit_bias, *params.stop_token_ids]
        if wrong := [token for token in named if not 0 <= token < self.vocab_size]:
            raise JaxinferError(
                f"token id {wrong[0]} is not in the vocabulary of {self.vocab_size}"
            )
        if params.stop:
            self.tokenizer.open_stream()  # This fails without a tokenizer.


def _hash63(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()) >> 1


class AskedPrompts:
    """The prompts of one call of ``LLM``, which become requests one by one.

    Args:
        ids: ids of the requests, each used once.
        make: see ``RequestMaker.make``.

    Attributes:
        num_known: number of prompts, if known.
    """

    def __init__(
        self, ids: Iterator[str], make: Make, prompts: Iterable[Any], encode: Encode, params: Params
    ) -> None:
        self.num_known = len(prompts) if isinstance(prompts, Sized) else 0
        self._ids, self._encode, self._make = ids, encode, make
        self._pairs = paired(prompts, params)
        self._unanswered: dict[str, tuple[int, str | None]] = {}

    def requests(self) -> Iterator[RequestState]:
        """Yield the requests of each prompt in turn.

        Raises:
            JaxinferError: a prompt cannot be run; the message gives its index.
        """
        for index, (prompt, params) in enumerate(self._pairs):
            request_id = next(self._ids)
            try:
                text, tokens = self._encode(prompt)
                requests = self._make(request_id, tokens, params)
            except JaxinferError as error:
                raise JaxinferError(f"prompt {index}: {error}") from None
            self._unanswered[request_id] = index, text
            yield from requests

    def answered(self, output: RequestOutput) -> RequestOutput:
        """Return an output with its prompt and index added."""
        output.prompt_index, output.prompt = self._unanswered.pop(output.request_id)
        return output
