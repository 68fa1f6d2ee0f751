"""A request for measurements, and the tokens of its prompt."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

# Number of tokens of a block that ``hash_ids`` name (Mooncake's traces).
BLOCK = 512


@dataclass(frozen=True, slots=True)
class BenchRequest:
    """A request for measurements: ``prompt_len`` tokens in, ``max_tokens`` out.

    ``prompt_token_ids`` is None if only lengths are known. ``arrival`` is in seconds since the
    start of the run or, in a closed loop, since the end of another request: it arrives once
    ``after_ends`` requests of the run have ended. ``hash_ids`` name the prompt's blocks of 512
    tokens, of which the last may be shorter: prompts with the same names have the same tokens.
    """

    prompt_token_ids: list[int] | None
    prompt_len: int
    max_tokens: int
    arrival: float
    hash_ids: tuple[int, ...] | None = None
    after_ends: int = 0

    @property
    def has_tokens(self) -> bool:
        """True if it is known which prompts have a common prefix."""
        return bool(self.prompt_token_ids or self.hash_ids)


def modelled_tokens(item: BenchRequest) -> Sequence[int]:
    """Return token ids for a modelled run, which only compares them; empty if nothing is known.

    A block repeats its name plus one; 0 is the token that a modelled run samples.
    """
    if item.prompt_token_ids or not item.hash_ids:
        return item.prompt_token_ids or ()
    tokens: list[int] = []
    for name in item.hash_ids:
        tokens += [name + 1] * BLOCK
    del tokens[item.prompt_len :]
    return tokens


def real_tokens(item: BenchRequest, vocab_size: int, seed: int) -> list[int]:
    """Return token ids for a real run; unknown ones are drawn with ``seed``."""
    if item.prompt_token_ids:
        return item.prompt_token_ids
    if not item.hash_ids:
        return synthetic_tokens(item.prompt_len, vocab_size, seed)
    blocks = [synthetic_tokens(BLOCK, vocab_size, name) for name in item.hash_ids]
    return [token for block in blocks for token in block][: item.prompt_len]


def synthetic_tokens(length: int, vocab_size: int, seed: int) -> list[int]:
    """Return ``length`` token ids below ``vocab_size``, drawn uniformly with ``seed``."""
    return random.Random(seed).choices(range(vocab_size), k=length)
