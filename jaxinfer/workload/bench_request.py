"""A request for measurements, and the tokens of its prompt."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import overload

# Number of tokens of a block that ``hash_ids`` name (Mooncake's traces).
BLOCK = 512


@dataclass(frozen=True, slots=True)
class BenchRequest:
    """A request for measurements: ``prompt_len`` tokens in, ``max_tokens`` out.

    ``prompt_token_ids`` is None if only lengths are known. ``arrival`` is in seconds since the
    start of the run or, in a closed loop, since the end of another request: it arrives once
    ``after_ends`` requests of the run have ended. ``hash_ids`` name the prompt's blocks of 512
    tokens, of which the last may be shorter: prompts with the same names have the same tokens.

    A turn of a session ``follows`` another request, by its place in the workload: it comes
    ``arrival`` seconds after that one has ended, and its prompt begins with the prompt and the
    answer of that one. ``session`` is the place of the session's first turn.

    ``prefix`` has a number and a length: prompts with the same number begin with the same tokens.
    """

    prompt_token_ids: list[int] | None
    prompt_len: int
    max_tokens: int
    arrival: float
    hash_ids: tuple[int, ...] | None = None
    after_ends: int = 0
    follows: int | None = None
    session: int | None = None
    prefix: tuple[int, int] | None = None

    @property
    def has_tokens(self) -> bool:
        """True if it is known which prompts have a common prefix."""
        return bool(self.prompt_token_ids or self.hash_ids) or self.has_stretches

    @property
    def has_stretches(self) -> bool:
        """True if the prompt is synthetic and shares tokens with other prompts."""
        return self.session is not None or self.prefix is not None


def _stretches(item: BenchRequest, index: int) -> list[tuple[int, int]]:
    """Names and lengths of the parts of a synthetic prompt; blocks of traces have names from 0."""
    name, shared = item.prefix or (0, 0)
    return [(-2 - 2 * name, shared), (-3 - 2 * index, item.prompt_len - shared)]


class NamedTokens(Sequence[int]):
    """Tokens of a prompt made of named blocks, computed on demand.

    All tokens of a block are the block's name plus one.
    """

    def __init__(self, item: BenchRequest) -> None:
        self._names = item.hash_ids or ()
        self._length = min(item.prompt_len, BLOCK * len(self._names))

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, index: int) -> int: ...

    @overload
    def __getitem__(self, index: slice) -> list[int]: ...

    def __getitem__(self, index: int | slice) -> int | list[int]:
        at = range(self._length)[index]
        if isinstance(at, int):
            return self._names[at // BLOCK] + 1
        return [self._names[each // BLOCK] + 1 for each in at]


def modelled_tokens(item: BenchRequest, index: int = 0) -> Sequence[int]:
    """Return token ids for a modelled run, which only compares them; empty if nothing is known.

    All tokens of a block are its name plus one, because a modelled run samples token 0.

    Args:
        index: place of the request in its workload.
    """
    if item.has_stretches:
        return [name + 1 for name, count in _stretches(item, index) for _ in range(count)]
    if item.prompt_token_ids or not item.hash_ids:
        return item.prompt_token_ids or ()
    return NamedTokens(item)[:]


def real_tokens(item: BenchRequest, vocab_size: int, index: int) -> list[int]:
    """Return token ids for a real run; unknown ones are drawn, with ``index`` as the seed.

    Args:
        index: place of the request in its workload.
    """
    if item.prompt_token_ids:
        return item.prompt_token_ids
    if item.has_stretches:
        parts = _stretches(item, index)
        drawn = [synthetic_tokens(length, vocab_size, name) for name, length in parts]
        return [token for part in drawn for token in part]
    if not item.hash_ids:
        return synthetic_tokens(item.prompt_len, vocab_size, index)
    blocks = [synthetic_tokens(BLOCK, vocab_size, name) for name in item.hash_ids]
    return [token for block in blocks for token in block][: item.prompt_len]


def synthetic_tokens(length: int, vocab_size: int, seed: int) -> list[int]:
    """Return ``length`` token ids below ``vocab_size``, drawn uniformly with ``seed``."""
    return random.Random(seed).choices(range(vocab_size), k=length)
