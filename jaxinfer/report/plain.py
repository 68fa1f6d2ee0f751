"""Converts a user's report to JSON, so that one odd value does not lose a long run."""

from collections.abc import Callable, Mapping
from typing import Any

from jaxinfer.errors import FAILURES, raised
from jaxinfer.options.validation import shown


def reported(name: str, report: Callable[[], object]) -> tuple[dict[str, Any], str | None]:
    """Call ``report``; return its values for JSON, and a line about problems, if any.

    Sets become lists, and numpy's numbers and arrays Python's; other values that JSON does not
    support become their ``repr``. A report that fails, or returns no mapping, is empty.

    Args:
        name: name of ``report``, for the message.
    """
    odd: list[str] = []
    try:
        found = report()
        if not isinstance(found, Mapping):
            return {}, f"{name} returns {shown(found)}, must be a mapping"
        values = {str(key): _plain(value, str(key), odd) for key, value in found.items()}
    except FAILURES as error:
        return {}, f"{name} raises {raised(error)}"
    return values, f"{name} returns what JSON cannot hold: {'; '.join(odd)}" if odd else None


def _plain(value: Any, where: str, odd: list[str]) -> Any:
    """Convert a value; add places to ``odd`` where only the ``repr`` is kept."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(item, f"{where}.{key}", odd) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, where, odd) for item in value]
    if isinstance(value, set | frozenset):
        return [_plain(item, where, odd) for item in sorted(value, key=repr)]
    if hasattr(value, "tolist"):  # Scalars of numpy and JAX.
        return _plain(value.tolist(), where, odd)
    odd.append(f"{where} is {shown(value)}")
    return repr(value)
