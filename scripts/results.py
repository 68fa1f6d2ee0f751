"""What scripts of docs/results share: a paper's claims beside ours, as a table and a file."""

import csv
import hashlib
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from jaxinfer.plan.kept import contents, key_of
from jaxinfer.plan.version import code_version, digest_of

# What was fitted to the paper, what follows without, and what was taken from it.
Kind = Literal["calibrated", "predicted", "input"]


@dataclass(frozen=True)
class Target:
    """One claim of a paper beside what came out here.

    Attributes:
        tolerance: how far off it may be, in words.
        met: whether it is within the tolerance.
    """

    claim: str
    paper: float | str
    ours: float | str
    tolerance: str
    kind: Kind
    met: bool


def by_share(
    claim: str, paper: float, ours: float, share: float, kind: Kind = "predicted"
) -> Target:
    """A figure that may be off by a share of the paper's."""
    met = abs(ours - paper) <= share * abs(paper)
    return Target(claim, paper, _rounded(ours), f"{100 * share:g} %", kind, met)


def by_amount(
    claim: str, paper: float, ours: float, most: float, unit: str = "", kind: Kind = "predicted"
) -> Target:
    """A figure that may be off by so much, in units of its own."""
    tolerance = f"{most:g} {unit}".rstrip()
    return Target(claim, paper, _rounded(ours), tolerance, kind, abs(ours - paper) <= most)


def holds(claim: str, paper: str, ours: str, met: bool, kind: Kind = "predicted") -> Target:
    """A claim in words: an order, a direction."""
    return Target(claim, paper, ours, "as stated", kind, met)


def show_targets(targets: Sequence[Target]) -> None:
    """As lines of a markdown table."""
    rows = [asdict(target) | {"met": "met" if target.met else "**missed**"} for target in targets]
    show_table(rows)
    print(f"\n{sum(target.met for target in targets)} of {len(targets)} met")


def show_table(rows: Sequence[Mapping[str, Any]]) -> None:
    """As lines of a markdown table; numbers to the right."""
    columns = list(rows[0])
    numeric = [all(isinstance(row[c], int | float) for row in rows) for c in columns]
    print("| " + " | ".join(columns) + " |")
    print("| " + " | ".join("---:" if right else "---" for right in numeric) + " |")
    for row in rows:
        print("| " + " | ".join(_text(row[column]) for column in columns) + " |")


def write_targets(path: Path, targets: Sequence[Target]) -> None:
    """The columns claim, paper, ours, tolerance, kind and met (yes or no)."""
    write_csv(path, [asdict(t) | {"met": "yes" if t.met else "no"} for t in targets])


def update_targets(path: Path, targets: Sequence[Target]) -> None:
    """The same in a file that may be there: of equal claims, these are right."""
    rows: list[dict[str, Any]] = []
    if path.exists():
        with path.open(newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
    ours = [asdict(t) | {"met": "yes" if t.met else "no"} for t in targets]
    claims = {row["claim"] for row in ours}
    write_csv(path, [row for row in rows if row["claim"] not in claims] + ours)


def kept(path: Path, make: Callable[[], list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """A table that this very command has made, as it stands in its file; else made anew.

    So a script that was killed goes on, and one of another version reproduces all that it writes.
    """
    if is_current(path):
        print(f"{path}: kept, made before by the same command, code and data")
    else:
        write_csv(path, make())
        mark(path)
    with path.open(newline="", encoding="utf-8") as file:
        return [
            {name: _number(value) for name, value in row.items()} for row in csv.DictReader(file)
        ]


def is_current(path: Path) -> bool:
    """Whether a file is as ``mark`` has seen it, by the same command, code and data."""
    marks = _marks(path)
    return path.exists() and marks.get(path.name) == _origin(path)


def mark(path: Path) -> None:
    """Note what has made a file, in ``.kept.json`` beside it."""
    marks = _marks(path) | {path.name: _origin(path)}
    path.with_name(".kept.json").write_text(json.dumps(marks, indent=1), encoding="utf-8")


def _marks(path: Path) -> dict[str, str]:
    file = path.with_name(".kept.json")
    found: dict[str, str] = json.loads(file.read_text("utf-8")) if file.exists() else {}
    return found


def _origin(path: Path) -> str:
    """Of the command, the files that it names, all code, and the file itself."""
    words = [word.partition("=")[2] if word.startswith("--") else word for word in sys.argv[1:]]
    named = [w for w in words if Path(w).resolve() != path.parent.resolve()]
    scripts = digest_of(Path(__file__).parent)
    table = hashlib.sha256(path.read_bytes()).hexdigest()
    return key_of(code_version(), scripts, Path(sys.argv[0]).name, named, contents(named), table)


def _number(text: str) -> str | float:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def write_csv(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """With a header, which is the first row's."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, rows[0].keys())
        writer.writeheader()
        writer.writerows(rows)


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")


def _text(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
