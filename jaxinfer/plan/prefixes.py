"""What a prefix cache may spare, at best."""

from collections.abc import Sequence
from itertools import pairwise

from jaxinfer.workload.bench_request import BenchRequest, modelled_tokens


def best_hits(work: Sequence[BenchRequest]) -> list[int]:
    """The tokens of each prompt that a cache may have from other requests, in whatever order.

    All but the last where another whole prompt is its beginning: that one's output may be next.
    None of a prompt whose tokens are not known.
    """
    found = [0] * len(work)
    known = sorted(
        (tuple(modelled_tokens(item)), number)
        for number, item in enumerate(work)
        if item.has_tokens
    )
    beginnings: list[tuple[int, ...]] = []
    for tokens, number in known:
        while beginnings and tokens[: len(beginnings[-1])] != beginnings[-1]:
            beginnings.pop()
        if beginnings:
            found[number] = len(tokens) - 1
        beginnings.append(tokens)
    # In this order, those that begin most alike are next to each other.
    for (a, here), (b, there) in pairwise(known):
        common = next((n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), len(a))
        found[here] = max(found[here], min(common, len(a) - 1))
        found[there] = max(found[there], min(common, len(b) - 1))
    return found
