"""All ways to make pipeline stages from a group's GPUs."""

from collections.abc import Iterator, Sequence
from functools import cache
from itertools import permutations, product

# For each node of a group, in order: its type, and the number of GPUs there.
Signature = tuple[tuple[int, int], ...]
# Stages without their layers: place and GPUs of each.
Shape = tuple[tuple[int, int], ...]


def shapes(signature: Signature, kinds: Sequence[int], degrees: Sequence[int]) -> Iterator[Shape]:
    """Yield all ways to make stages from a group's GPUs.

    Stages on GPUs of one kind follow each other, the widest first. The stages of two groups with
    equal GPUs therefore differ only in the links between them. With more than two kinds, only two
    orders are tried.

    Args:
        kinds: kind of GPU of each type.
        degrees: possible degrees of tensor parallelism, increasing.
    """
    there = sorted({kinds[type_] for type_, _ in signature})
    orders = list(permutations(there)) if len(there) < 3 else [tuple(there), tuple(there[::-1])]
    for widths in product(*(_sums(count, tuple(degrees)) for _, count in signature)):
        stages = [(place, tp) for place, each in enumerate(widths) for tp in each]
        for order in orders:
            rank = {kind: number for number, kind in enumerate(order)}
            yield tuple(
                sorted(stages, key=lambda s: (rank[kinds[signature[s[0]][0]]], -s[1], s[0]))
            )


@cache
def _sums(count: int, parts: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """Return the multisets of parts that add up to a count, each in decreasing order."""
    if not count:
        return ((),)
    return tuple(
        (part, *rest)
        for part in reversed(parts)
        if part <= count
        for rest in _sums(count - part, tuple(p for p in parts if p <= part))
    )
