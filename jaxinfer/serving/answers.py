"""What a system answers the loop with, checked: its author's mistake is one line that names it."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from numbers import Integral
from typing import Any, get_args

from jaxinfer.errors import FAILURES, JaxinferError, raised
from jaxinfer.serving.loss import LostInstance
from jaxinfer.serving.system import Action, Assignment, HandOffRule, Leg, MoveSlices, System

_RULES = get_args(HandOffRule)
_WANTED: dict[str, tuple[str, Any]] = {
    "route": ("assignments", Assignment),
    "on_step": ("actions", Action),
    "on_tick": ("actions", Action),
    "make_room": ("MoveSlices", MoveSlices),
}


@contextmanager
def asking(system: System, hook: str) -> Iterator[None]:
    """Make what a system's hook raises one line that names it."""
    try:
        yield
    except (JaxinferError, LostInstance):
        raise
    except FAILURES as error:
        raise raising(system, hook, error) from error


def raising(system: System, hook: str, error: BaseException) -> JaxinferError:
    """What a system's hook raises, as one line that names it."""
    return JaxinferError(f"{type(system).__name__}.{hook} raises {raised(error)}")


def listed(system: System, hook: str, answer: Iterable[Any]) -> list[Any]:
    """The answer of a system's hook as a list.

    Raises:
        JaxinferError: it is nothing that has items, or an item is of another kind.
    """
    what, kind = _WANTED[hook]
    items = list(answer) if isinstance(answer, Iterable) else None
    if items is None or not all(isinstance(item, kind) for item in items):
        raise JaxinferError(
            f"{type(system).__name__}.{hook} returns {str(answer)[:60]}, must be a sequence of "
            f"{what}"
        )
    return items


def check_legs(system: str, request: str, legs: Sequence[Leg]) -> None:
    """Raise JaxinferError for what are no legs."""
    if not isinstance(legs, tuple | list) or not all(isinstance(leg, Leg) for leg in legs):
        raise JaxinferError(f"{system} gives {request!r} the legs {legs!r}, must be a tuple of Leg")
    for leg in legs:
        if leg.until is not None and (not isinstance(leg.until, Integral) or leg.until < 0):
            raise JaxinferError(
                f"{system} gives {request!r} a leg on {leg.instance!r} until {leg.until!r}, "
                "must be a number of KV entries, or None for the request's end"
            )
        if leg.hand_off not in _RULES:
            raise JaxinferError(
                f"{system} gives {request!r} a leg with hand_off {leg.hand_off!r}, must be one of "
                f"{', '.join(_RULES)}"
            )
