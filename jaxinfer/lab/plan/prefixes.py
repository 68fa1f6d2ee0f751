"""An upper bound on the tokens that a prefix cache saves."""

from collections.abc import Sequence
from itertools import compress, count, pairwise
from operator import ne
from typing import NamedTuple

from jaxinfer.workload.bench_request import BLOCK, BenchRequest, modelled_tokens


class _Units(NamedTuple):
    """A prompt as a sequence of comparable units: tokens, or whole blocks of them.

    Attributes:
        length: number of tokens; the last block may have fewer than the others.
    """

    units: Sequence[int]
    length: int
    number: int


def best_hits(work: Sequence[BenchRequest]) -> list[int]:
    """Return for each prompt the most tokens that a cache may hold from other requests.

    The requests may come in any order. If another whole prompt is a prefix of this one, the count
    is all tokens except the last, because that request's output may continue it. If the prompt's
    tokens are not known, the count is 0.
    """
    found = [_of_synthetic(item, work) for item in work]
    # Compared by blocks if all prompts are known by blocks, because expanding a trace would fill
    # the memory.
    unit = 1 if any(item.prompt_token_ids for item in work) else BLOCK
    known = sorted(
        _prompt(item, n, unit)
        for n, item in enumerate(work)
        if item.has_tokens and not item.has_stretches
    )
    # In this order, prompts with the longest common beginnings are neighbours, and a prompt is
    # directly followed by those that begin with it.
    beginnings: list[int] = []
    for a, b in pairwise(known):
        common = _common(a, b, unit)
        beginnings.append(a.length)
        while beginnings and beginnings[-1] > common:
            beginnings.pop()
        found[a.number] = max(found[a.number], min(common, a.length - 1))
        found[b.number] = b.length - 1 if beginnings else min(common, b.length - 1)
    return found


def _of_synthetic(item: BenchRequest, work: Sequence[BenchRequest]) -> int:
    """Tokens that a prompt has from the turn before, or from its prefix; 0 of other prompts."""
    if item.follows is not None:
        before = work[item.follows]
        common = before.prompt_len + before.max_tokens
    else:
        common = item.prefix[1] if item.prefix else 0
    return min(common, item.prompt_len - 1)


def _prompt(item: BenchRequest, number: int, unit: int) -> _Units:
    if unit == 1:
        tokens = modelled_tokens(item)
        return _Units(tokens, len(tokens), number)
    names = item.hash_ids or ()
    length = min(item.prompt_len, len(names) * BLOCK)
    return _Units(names[: -(-length // BLOCK)], length, number)


def _common(a: _Units, b: _Units, unit: int) -> int:
    """Return the number of tokens in the common prefix of two prompts."""
    differs = next(compress(count(), map(ne, a.units, b.units)), None)
    most = min(a.length, b.length)
    return most if differs is None else min(differs * unit, most)
