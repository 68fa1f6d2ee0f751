"""Upper bounds on how many tokens a prefix cache saves, and how many tokens requests share."""

from collections import defaultdict
from collections.abc import Collection, Sequence
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
    """Return, for each prompt, the most tokens that a cache may have from other requests.

    The requests may come in any order. If another whole prompt is a prefix of this one, the count
    is all tokens except the last, because that request's output may continue it. If the prompt's
    tokens are not known, the count is 0.
    """
    found = [_of_synthetic(item, work) for item in work]
    known, unit = _sorted(work)
    beginnings: list[int] = []
    for a, b in pairwise(known):
        common = _common(a, b, unit)
        beginnings.append(a.length)
        while beginnings and beginnings[-1] > common:
            beginnings.pop()
        found[a.number] = max(found[a.number], min(common, a.length - 1))
        found[b.number] = b.length - 1 if beginnings else min(common, b.length - 1)
    return found


class Shared(NamedTuple):
    """Entries that requests have in common, for each request.

    Attributes:
        first: the first position that the request must compute, if each page of a common beginning
            is computed once, by another request. No caches and no order of requests leave less to
            compute in all.
        most: the most entries that the request can share with others that run at the same time.
    """

    first: list[int]
    most: list[int]


def shared_pages(work: Sequence[BenchRequest], page_sizes: Collection[int]) -> Shared:
    """Return what requests can share if instances with these page sizes have prefix caches.

    A page can also be shared if the output of another request may continue that request's prompt
    to the end of the page.
    """
    first, most = _of_stretches(work)
    known, unit = _sorted(work)
    # Prompts with which the next one begins: the length, and the most entries so far with outputs.
    beginnings = [(0, 0)]
    for a, b in pairwise(known):
        common = _common(a, b, unit)
        beginnings.append((a.length, max(beginnings[-1][1], _entries(work[a.number]))))
        while beginnings[-1][0] > common:
            beginnings.pop()
        # An output may continue as the longer prompt does, and the other way round.
        shared = max(common, beginnings[-1][1])
        first[b.number] = most[b.number] = shared
        most[a.number] = max(most[a.number], shared if common == a.length else common)
    for number, item in enumerate(work):
        first[number] = _whole_pages(min(first[number], item.prompt_len - 1), page_sizes)
        most[number] = _whole_pages(min(most[number], _entries(item)), page_sizes)
    return Shared(first, most)


def _of_stretches(work: Sequence[BenchRequest]) -> tuple[list[int], list[int]]:
    """Return ``Shared`` of synthetic prompts, in tokens, and 0 of others."""
    first, most = [0] * len(work), [0] * len(work)
    with_prefix: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for number, item in enumerate(work):
        if item.follows is not None:
            # A turn comes after the turn before, and they never run at the same time.
            first[number], most[number] = _entries(work[item.follows]), most[item.follows]
        elif item.prefix:
            name, most[number] = item.prefix
            with_prefix[name].append((most[number], number))
    for same in with_prefix.values():
        for (length, _), (_, number) in pairwise(sorted(same)):
            first[number] = length
    return first, most


def _entries(item: BenchRequest) -> int:
    """Return the number of entries of a request's KV at its end."""
    return item.prompt_len + item.max_tokens - 1


def _whole_pages(tokens: int, page_sizes: Collection[int]) -> int:
    return max((tokens // size * size for size in page_sizes), default=0)


def _sorted(work: Sequence[BenchRequest]) -> tuple[list[_Units], int]:
    """Return the prompts of known tokens in their units' order, and the tokens of a unit.

    In this order, prompts with the longest common beginnings are neighbours, and a prompt is
    directly followed by those that begin with it.
    """
    # By blocks if all prompts are known by blocks, because expanding a trace would fill the memory.
    unit = 1 if any(item.prompt_token_ids for item in work) else BLOCK
    prompts = (
        _prompt(item, n, unit)
        for n, item in enumerate(work)
        if item.has_tokens and not item.has_stretches
    )
    return sorted(prompts), unit


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
