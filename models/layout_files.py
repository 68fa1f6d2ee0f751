"""Finds layouts by their names, or in the user's own files."""

import runpy
from collections.abc import Mapping
from dataclasses import replace

from jaxinfer.errors import FAILURES, JaxinferError, raised
from jaxinfer.files.shipped import data_path, why_not
from jaxinfer.models.layout_checks import check_tables
from jaxinfer.models.layouts import LAYOUTS, PRICED, Layout
from jaxinfer.options.validation import did_you_mean

# Part of a message.
_EXAMPLE = """(Rule("*", {"N": "x"}),)"""


def load_layout(name: str | None) -> Layout:
    """Return a layout by its name, or from a Python file; by default ``megatron``.

    The file defines LAYOUT, or only RULES for parameters; everything else is then as in
    ``megatron``.

    Raises:
        JaxinferError: the name is unknown; or the file cannot be run, or lacks both, or has both.
    """
    name = name or "megatron"
    if not name.endswith(".py"):
        if name not in (known := LAYOUTS | PRICED):
            raise JaxinferError(f"layout {name}: {did_you_mean(name, known)} (files end in .py)")
        return known[name]
    try:
        found = runpy.run_path(str(data_path(name)))
    except OSError as error:
        raise JaxinferError(f"layout {name}: {why_not(name, error)}") from None
    except FAILURES as error:
        raise JaxinferError(f"layout {name}: {raised(error)}") from error
    try:
        return _defined(found)
    except JaxinferError as error:
        raise JaxinferError(f"layout {name}: {error}") from None


def _defined(found: Mapping[str, object]) -> Layout:
    match [name for name in ("LAYOUT", "RULES") if name in found]:
        case []:
            raise JaxinferError("must define LAYOUT or RULES, and defines neither")
        case [_, _]:
            raise JaxinferError(
                "must define LAYOUT or RULES, not both: with LAYOUT, give its rules another name"
            )
    layout = found.get("LAYOUT")
    if "RULES" in found:
        rules = found["RULES"]
        if not isinstance(rules, tuple | list):
            raise JaxinferError(
                f"RULES must be a tuple of jaxinfer.models.layouts.Rule, such as {_EXAMPLE}"
            )
        layout = replace(LAYOUTS["megatron"], parameters=tuple(rules))
    if not isinstance(layout, Layout):
        raise JaxinferError(
            f"LAYOUT must be a jaxinfer.models.layouts.Layout, such as Layout({_EXAMPLE})"
        )
    check_tables(layout)
    return layout
