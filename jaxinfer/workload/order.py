"""The order in which requests that are all known beforehand are served."""

from collections.abc import Callable, Iterable, Sequence
from typing import Literal, TypeVar, get_args

from jaxinfer.errors import JaxinferError
from jaxinfer.serving.request_state import RequestState
from jaxinfer.workload.bench_request import BenchRequest, modelled_tokens
from jaxinfer.workload.blend import Sized, blended

T = TypeVar("T")
Order = Literal["given", "prefix_tree", "blend"]


def in_order(items: Iterable[T], sized: Callable[[T], Sized], order: Order) -> list[T]:
    """Return the items in the given order.

    ``prefix_tree`` goes depth first through the tree of all prompts' tokens, so that prompts with a
    common prefix follow one another; equal prompts keep their order. For ``blend``, see
    ``blended``.

    Args:
        sized: returns an item's prompt and lengths.

    Raises:
        JaxinferError: there is no such order.
    """
    if order not in (known := get_args(Order)):
        raise JaxinferError(f"order is {order!r}, must be {' or '.join(map(repr, known))}")
    items = list(items)
    if order == "given":
        return items
    if order == "prefix_tree":
        return sorted(items, key=lambda item: tuple(sized(item).units))
    return [items[number] for number in blended(list(map(sized, items)))]


def requests_in_order(requests: Iterable[RequestState], order: Order) -> list[RequestState]:
    """Return real requests in an order, assuming that outputs have ``max_tokens`` tokens."""
    return in_order(
        requests,
        lambda each: Sized(each.prompt_token_ids, each.prompt_len, each.max_tokens),
        order,
    )


def modelled_in_order(
    work: Sequence[BenchRequest], order: Order, limit: int | None = None
) -> list[BenchRequest]:
    """Return modelled requests in an order.

    Args:
        limit: length to assume for all outputs; by default, the true lengths.
    """

    def sized(numbered: tuple[int, BenchRequest]) -> Sized:
        number, item = numbered
        units = item.hash_ids or modelled_tokens(item, number)
        return Sized(units, item.prompt_len, limit or item.max_tokens)

    return [item for _, item in in_order(enumerate(work), sized, order)]
