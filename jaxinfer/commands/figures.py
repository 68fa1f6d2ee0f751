"""``--json``: a command's figures as one JSON object on stdout, in place of its tables."""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, is_dataclass
from typing import Any

import click

with_json = click.option(
    "--json", "as_json", is_flag=True, help="Print the figures as one JSON object, no tables."
)


def print_json(figures: Any) -> None:
    """Print a mapping or a dataclass; numbers that are not finite become null."""
    click.echo(json.dumps(_plain(figures), indent=2, allow_nan=False))


def _plain(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        value = asdict(value)
    if isinstance(value, Mapping):
        return {str(name): _plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if hasattr(value, "item"):  # A number of numpy's.
        value = value.item()
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if isinstance(value, str | int | None) else str(value)
