"""The order in which requests that are all known beforehand are served."""

from collections.abc import Callable, Iterable, Sequence
from typing import Literal, TypeVar

T = TypeVar("T")
Order = Literal["given", "prefix_tree"]


def in_order(items: Iterable[T], tokens: Callable[[T], Sequence[int]], order: Order) -> list[T]:
    """Return the items in the order that is asked for.

    ``prefix_tree`` goes depth first through the tree of all prompts' tokens, so that prompts that
    begin alike follow one another; of equal prompts, the first given comes first.

    Args:
        tokens: returns an item's prompt.
    """
    return list(items) if order == "given" else sorted(items, key=lambda item: tuple(tokens(item)))
