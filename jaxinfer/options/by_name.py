"""Choices by name: a class of jaxinfer, or one of the user's own."""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from jaxinfer.errors import FAILURES, JaxinferError, raised
from jaxinfer.options.validation import (
    OptionError,
    Options,
    did_you_mean,
    import_own,
    shown,
    within,
)

T = TypeVar("T")


def make_by_name(
    what: str,
    config: Mapping[str, Any],
    known: Mapping[str, str],
    refusal: Callable[[Any], str | None],
    check: Callable[[T], None] = lambda made: None,
) -> T:
    """Return an object of a named class, made with validated ``Options`` of that class.

    Args:
        what: kind of the object, for messages.
        config: its ``name``, or ``my_module:MyClass``, and its options.
        known: the location of each known class, ``module:Class``, by name.
        refusal: returns why an imported object is not a suitable class, or None.
        check: raises JaxinferError for an object that is not suitable.

    Raises:
        JaxinferError: the name is unknown, or the options do not fit the class.
    """
    options = dict(config)
    name = options.pop("name", None)
    own = f"my_module:My{what.capitalize()}"
    if not isinstance(name, str):
        given = "is missing" if name is None else f"is {shown(name)}"
        raise JaxinferError(f"{what}.name {given}, must be one of {', '.join(known)}, or {own}")
    kind = _find(what, name, known, own, refusal)
    try:
        made: T = kind(kind.Options.model_validate(options))
        check(made)
    except OptionError as error:
        raise within(what, error) from None
    except JaxinferError as error:
        raise JaxinferError(f"{what} {name}: {error}") from None
    except FAILURES as error:
        if name in known:
            raise
        raise JaxinferError(f"{what} {name}: making it raises {raised(error)}") from error
    return made


def _find(
    what: str,
    name: str,
    known: Mapping[str, str],
    own: str,
    refusal: Callable[[Any], str | None],
) -> Any:
    target = known.get(name, name)
    if ":" not in target:
        raise JaxinferError(f"{what} {name!r}: {did_you_mean(name, known)}; or {own} of your own")
    try:
        found = import_own(target)
    except JaxinferError as error:
        raise JaxinferError(f"{what} {error}") from error
    attribute = target.partition(":")[2]
    if why := refusal(found):
        raise JaxinferError(f"{what} {name!r}: {attribute} {why}")
    options = getattr(found, "Options", None)
    if not (isinstance(options, type) and issubclass(options, Options)):
        raise JaxinferError(
            f"{what} {name!r}: {attribute}.Options is {options!r}, must be a subclass of "
            "jaxinfer.options.validation.Options"
        )
    return found
