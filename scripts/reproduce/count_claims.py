"""Count the met claims by page and kind, for the table in docs/results/README.md.

    python -m scripts.reproduce.count_claims

The program reads ``targets.csv`` of all pages, and replaces the table.
"""

import csv
from collections import Counter
from pathlib import Path
from typing import get_args

import click

from scripts.reproduce.claims import Kind

RESULTS = Path(__file__).parents[2] / "docs" / "results"
README = RESULTS / "README.md"
KINDS: tuple[str, ...] = get_args(Kind)
HEAD = f"| page | {' | '.join(KINDS)} |"


def claims() -> list[dict[str, str]]:
    """Return the rows of all pages, each with its page."""
    rows = []
    for path in sorted(RESULTS.glob("*/targets.csv")):
        with path.open(newline="", encoding="utf-8") as file:
            rows += [{"page": path.parent.name} | row for row in csv.DictReader(file)]
    return rows


def table() -> str:
    """Return the table in markdown: met claims of all claims, by page and kind, and sums."""
    met: Counter[tuple[str, str]] = Counter()
    every: Counter[tuple[str, str]] = Counter()
    for row in claims():
        for page in (row["page"], "all"):
            every[page, row["kind"]] += 1
            met[page, row["kind"]] += row["met"] == "yes"
    lines = [HEAD, f"|---|{'---:|' * len(KINDS)}"]
    for page in dict.fromkeys(page for page, _ in sorted(every, key=lambda key: key[0] == "all")):
        cells = [
            f"{met[page, kind]} of {every[page, kind]}" if every[page, kind] else ""
            for kind in KINDS
        ]
        name = "all" if page == "all" else f"[{page}]({page}.md)"
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


@click.command()
def main() -> None:
    """Replace the table at the end of the file."""
    text = README.read_text(encoding="utf-8")
    README.write_text(text[: text.index(HEAD)] + table() + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
