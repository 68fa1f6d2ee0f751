"""Describes the first difference between two ledgers."""

import math
from collections.abc import Callable, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

from jaxinfer.errors import JaxinferError
from jaxinfer.ledger.ledger_file import Entry

# The values of an entry that were decided, by its kind.
_WORDS = {
    "start": "the run starts",
    "round": "a round begins",
    "arrival": "request {0!r} arrives ({1} prompt, {2} output tokens)",
    "step": "a step of {0} has ended",
    "landed": "KV {3} to {4} of request {0!r} has come from {1} to {2}",
    "tick": "a tick",
    "lost": "instance {0} is lost",
    "back": "instance {0} is back",
    "without": "instance {0} goes without shards {1}",
    "legs": "request {0!r} is to go by {legs}",
    "batch": "a step of {0} is launched: {rows}",
    "send": "KV {3} to {4} of request {0!r} leaves {1} for {2}, from pages {5} to {6}",
    "way": "the time of KV from {0} to {1} is asked",
    "victim": "{0} preempts request {1!r}",
    "role": "instance {0} takes the role {1!r}",
    "failed": "it cannot go on: {0}",
    "end": "request {0!r} ends ({1}) with {2} tokens",
}


def _is_time(given: Any) -> bool:
    return isinstance(given, int | float) and not isinstance(given, bool) and math.isfinite(given)


def _is_count(given: Any) -> bool:
    return type(given) is int and given >= 0


def _are(check: Callable[[Any], bool], given: Any) -> bool:
    return isinstance(given, list) and all(map(check, given))


def _fits(given: Any, *checks: Callable[[Any], bool]) -> bool:
    return (
        isinstance(given, list)
        and len(given) == len(checks)
        and all(check(value) for check, value in zip(checks, given, strict=True))
    )


# The measured values of each kind; kinds that are missing here have none, or a text.
_MEASURED: dict[str, Callable[[Any], bool]] = {
    "start": lambda g: isinstance(g, list) and _fits(
        g[:4], _is_time, lambda x: type(x) is bool, _is_count, lambda x: isinstance(x, dict)
    ) and all(_are(lambda y: isinstance(y, str), x) for x in g[4:5]) and len(g) < 6,
    "round": _is_time,
    "arrival": lambda g: _fits(g, _is_time, lambda x: _are(_is_count, x)),
    "step": lambda g: _fits(
        g, _is_time, _is_time, lambda x: _are(lambda y: _fits(y, _is_time, _is_time), x),
        lambda x: _is_count(x) or _are(_is_count, x)),
    "landed": lambda g: _fits(g, _is_time, _is_time, _is_count),
    "way": _is_time,
    "legs": lambda g: g is None or _fits(g, _is_time, _is_time),
}  # fmt: skip


def check_entries(path: Path, entries: Sequence[Entry]) -> None:
    """Refuse a ledger with kinds of entries or measurements that this version does not write."""
    for number, (kind, decided, given) in enumerate(entries, 1):
        if kind not in _WORDS:
            raise JaxinferError(
                f"{path}: entry {number} is of kind {kind!r}, which this version does not know: "
                "another one wrote it"
            )
        if not _MEASURED.get(kind, lambda g: g is None or isinstance(g, str | int))(given):
            raise JaxinferError(
                f"{path}: damaged, entry {number} ({describe((kind, decided, None))}) has measured "
                f"{str(given)[:60]}"
            )


def first_difference(real: Sequence[Entry], simulated: Sequence[Entry]) -> str | None:
    """Describe where two ledgers first differ, with what both have there; None if equal."""
    time = 0.0
    event = "the start"
    for number, (one, two) in enumerate(zip_longest(real, simulated), 1):
        if one is None or two is None or one[:2] != two[:2]:
            sides = f"real: {describe(one)}; simulated: {describe(two)}"
            return f"entry {number}, at {time:.6g} s, after {event}: {sides}{_where(one, two)}"
        kind, decided, measured = one
        if kind == "round":
            time = measured or time
        elif kind in ("arrival", "step", "landed", "tick", "lost", "back", "without"):
            event = describe((kind, decided, None))
    return None


def describe(entry: Entry | None) -> str:
    """Describe an entry in words."""
    if entry is None:
        return "nothing more"
    kind, decided, _ = entry
    more: dict[str, Any] = {}
    if kind == "legs":
        more["legs"] = (
            ", ".join(
                f"{name} to {'the end' if until is None else until} ({rule})"
                for name, until, rule in decided[1]
            )
            or "no leg"
        )
    elif kind == "batch":
        more["rows"] = _rows(decided)
    return _WORDS[kind].format(*decided, **more)


def _parts(decided: list[Any]) -> tuple[int, list[Any], list[Any], list[Any]]:
    """Return grouped decodes, rows, the pages that each row writes, and transfers."""
    rows, pages, transfers = [*decided[4:7], [], [], []][:3]
    return decided[2], rows, pages, transfers


def _rows(decided: list[Any]) -> str:
    grouped, rows, pages, transfers = _parts(decided)
    said = [
        f"{request!r} {start} to {start + count} in pages {where}"
        for (request, start, count, _), where in zip(rows, pages, strict=True)
    ]
    said += [f"{grouped} decodes"] * bool(grouped)
    said += [f"sends {box[0]!r} {box[3]} to {box[4]} along to {box[2]}" for box in transfers]
    return ", ".join(said)


def _where(one: Entry | None, two: Entry | None) -> str:
    """Describe which rows of two steps of one instance differ first."""
    if not (one and two) or one[0] != two[0] or one[0] != "batch" or one[1][0] != two[1][0]:
        return ""
    (_, mine, here, _), (_, theirs, there, _) = _parts(one[1]), _parts(two[1])
    for number, (row, other) in enumerate(zip_longest(mine, theirs)):
        if row != other:
            return f" (row {number}: {row} and {other})"
    if here != there:
        return " (the rows are alike, their pages differ)"
    if one[1][1] != two[1][1]:
        return f" (pages in use: {one[1][1]} and {two[1][1]})"
    if one[1][7:] != two[1][7:]:
        return f" (rows of the parts: {one[1][7:]} and {two[1][7:]})"
    return " (what is sent along differs)"
