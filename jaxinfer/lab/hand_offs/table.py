"""Tables with the outcomes of all pairs of sides, for the terminal, in markdown and as CSV."""

import csv
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from jaxinfer.lab.hand_offs.measured import HandOffCheck
    from jaxinfer.lab.hand_offs.sides import HandOffSide

TableCells = tuple[Sequence[str], list[Sequence[str]]]


def conformance_tables(
    sides: "Mapping[str, HandOffSide]", outcomes: "Sequence[HandOffCheck]", outputs: int
) -> dict[str, TableCells]:
    """Return the header and rows of each table, by the table's title.

    Args:
        outputs: number of output tokens that each pair sampled.
    """
    return {
        "Sides": (
            ["", "dtype", "KV", "page", "keys by", "TP", "PP"],
            [[name, *_settings(side)] for name, side in sides.items()],
        ),
        "From (row) to (column): = is bit-exact, else the largest change by the largest entry": (
            ["", *sides],
            [[source, *(_verdict(o) for o in outcomes if o.source == source)] for source in sides],
        ),
        f"By what the two hold (greedy tokens of {outputs} that are the first side's)": (
            [
                "from",
                "to",
                "pairs",
                "exact",
                "largest change",
                "bound",
                "mean change",
                "tokens",
                "bytes",
                "median ms",
            ],
            [_summary(*item, outputs) for item in _by_formats(sides, outcomes).items()],
        ),
        "Refused, or left out": (["from", "to", "why"], list(_reasons(outcomes))),
    }


def _settings(side: "HandOffSide") -> list[str]:
    kv = side.dtype if side.kv_cache_dtype == "auto" else side.kv_cache_dtype
    keys = "head dim" if side.kernels == "plain" else "token"
    numbers = side.page_size, keys, side.tensor_parallel_size, side.stages
    return [side.dtype, kv, *map(str, numbers)]


def _verdict(outcome: "HandOffCheck") -> str:
    if outcome.verdict == "exact":
        return "="
    if outcome.max_change is None:
        return "-"
    wrong = "WRONG " if outcome.verdict == "wrong" else ""
    return wrong + _percent(outcome.max_change)


def _percent(share: float) -> str:
    return f"{100 * share:.2g} %"


def _by_formats(
    sides: "Mapping[str, HandOffSide]", outcomes: "Iterable[HandOffCheck]"
) -> "dict[tuple[str, str], list[HandOffCheck]]":
    """Group the outcomes that were not refused by the formats of source and destination."""
    found: dict[tuple[str, str], list[HandOffCheck]] = {}
    for outcome in outcomes:
        if outcome.verdict != "refused":
            ends = _format(sides[outcome.source]), _format(sides[outcome.dest])
            found.setdefault(ends, []).append(outcome)
    return dict(sorted(found.items()))


def _format(side: "HandOffSide") -> str:
    dtype, kv = _settings(side)[:2]
    return dtype if dtype == kv else f"{kv} of {dtype}"


def _summary(ends: tuple[str, str], outcomes: "Sequence[HandOffCheck]", outputs: int) -> list[str]:
    exact = sum(o.verdict == "exact" for o in outcomes)
    changes = [
        _percent(max(getattr(o, name) or 0.0 for o in outcomes))
        for name in ("max_change", "bound", "rms_change")
    ]
    tokens = [o.same_tokens or 0 for o in outcomes]
    least = f"{min(tokens)} to {max(tokens)}" if min(tokens) < max(tokens) else f"{min(tokens)}"
    num_bytes = " ".join(f"{count:,}" for count in {o.num_bytes or 0: None for o in outcomes})
    ms = statistics.median(1e3 * (o.seconds or 0.0) for o in outcomes)
    return [*ends, str(len(outcomes)), str(exact), *changes, least, num_bytes, f"{ms:.1f}"]


def _reasons(outcomes: "Iterable[HandOffCheck]") -> list[list[str]]:
    """List the reasons; a side's own reason is listed once for all its pairs."""
    found: dict[str, list[HandOffCheck]] = {}
    for outcome in outcomes:
        if outcome.reason:
            found.setdefault(outcome.reason, []).append(outcome)
    return [
        [_names(o.source for o in some), _names(o.dest for o in some), why]
        for why, some in found.items()
    ]


def _names(names: Iterable[str]) -> str:
    return " ".join(dict.fromkeys(names))


def as_rich(title: str, cells: TableCells) -> Table:
    """Return a table for the terminal."""
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    columns, rows = cells
    for column in columns:
        table.add_column(Text(column))
    for row in rows:
        table.add_row(*map(Text, row))
    return table


def as_markdown(title: str, cells: TableCells) -> str:
    """Return a heading and a table in markdown."""
    columns, rows = cells
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join([f"### {title}", "", *(f"| {' | '.join(line)} |" for line in lines), ""])


def write_conformance(
    folder: Path,
    sides: "Mapping[str, HandOffSide]",
    outcomes: "Sequence[HandOffCheck]",
    outputs: int,
) -> None:
    """Write ``conformance.md``, and ``conformance.csv`` with a line per pair and all settings."""
    tables = conformance_tables(sides, outcomes, outputs)
    text = "\n".join(as_markdown(*item) for item in tables.items() if item[1][1])
    (folder / "conformance.md").write_text(text, encoding="utf-8")
    rows = [_row(sides, outcome) for outcome in outcomes]
    with (folder / "conformance.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, rows[0].keys())
        writer.writeheader()
        writer.writerows(rows)


def _row(sides: "Mapping[str, HandOffSide]", outcome: "HandOffCheck") -> dict[str, object]:
    settings = {
        f"{end}_{field.name}": getattr(sides[name], field.name)
        for end, name in (("source", outcome.source), ("dest", outcome.dest))
        for field in fields(sides[name])
    }
    return asdict(outcome) | settings
