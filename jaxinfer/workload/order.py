"""The order in which requests that are all known beforehand are served."""

from collections.abc import Callable, Iterable, Sequence
from typing import Literal, TypeVar, get_args

from jaxinfer.errors import JaxinferError

T = TypeVar("T")
Order = Literal["given", "prefix_tree"]


def in_order(items: Iterable[T], tokens: Callable[[T], Sequence[int]], order: Order) -> list[T]:
    """Return the items in the order that is asked for.

    ``prefix_tree`` goes depth first through the tree of all prompts' tokens, so that prompts that
    begin alike follow one another; of equal prompts, the first given comes first.

    Args:
        tokens: returns an item's prompt.

    Raises:
        JaxinferError: there is no such order.
    """
    if order not in (known := get_args(Order)):
        raise JaxinferError(f"order is {order!r}, must be {' or '.join(map(repr, known))}")
    return list(items) if order == "given" else sorted(items, key=lambda item: tuple(tokens(item)))
