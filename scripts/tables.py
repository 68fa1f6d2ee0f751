"""Tables as CSV files and as markdown."""

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]
CONFIGS = Path(__file__).parents[1] / "configs"


def write_csv(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write rows with a header of the first row's keys."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, rows[0].keys())
        writer.writeheader()
        writer.writerows(rows)


def read_csv(path: Path) -> list[Row]:
    """Return the rows of a file; text that looks like a number becomes a number."""
    with path.open(newline="", encoding="utf-8") as file:
        return [
            {name: _number(value) for name, value in row.items()} for row in csv.DictReader(file)
        ]


def _number(text: str) -> str | float:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def show_table(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print the lines of a markdown table; numbers are aligned to the right."""
    columns = list(rows[0])
    numeric = [all(isinstance(row[c], int | float) for row in rows) for c in columns]
    print("| " + " | ".join(columns) + " |")
    print("| " + " | ".join("---:" if right else "---" for right in numeric) + " |")
    for row in rows:
        print("| " + " | ".join(_text(row[column]) for column in columns) + " |")


def _text(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
