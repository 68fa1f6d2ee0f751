"""What scripts of docs/results share: a paper's claims beside ours, as a table and a file."""

import csv
import hashlib
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from jaxinfer.config.contents import contents
from jaxinfer.made_from import digest_of
from jaxinfer.plan.kept import key_of
from jaxinfer.plan.version import code_version
from jaxinfer.report.origin import origin

# What was fitted to the paper, what follows without, what was taken from it; and what is compared
# with our own closed forms, other simulators or nothing, since no paper has a figure of it.
Kind = Literal["calibrated", "predicted", "input", "consistency"]


@dataclass(frozen=True)
class Target:
    """One claim beside what came out here.

    Attributes:
        paper: its own figure or words; empty where it has none, which is a claim of consistency.
        reference: what ours is compared with there: a closed form, another simulator, one.
        tolerance: how far off a figure may be, in words; ``criterion``: the test of any other
            claim. One of them is empty.
        met: whether ours is within the tolerance, or passes the test.
    """

    claim: str
    paper: float | str
    reference: float | str
    ours: float | str
    tolerance: str
    criterion: str
    kind: Kind
    met: bool

    def __post_init__(self) -> None:
        if (self.kind == "consistency") != (self.paper == ""):
            raise ValueError(f"{self.claim}: {self.kind}, and the paper has {self.paper!r}")
        if bool(self.tolerance) == bool(self.criterion):
            raise ValueError(f"{self.claim}: must have a tolerance or a criterion")


def by_share(
    claim: str, value: float, ours: float, share: float, kind: Kind = "predicted"
) -> Target:
    """A figure that may be off by a share of the paper's, or, for consistency, of a reference."""
    met = abs(ours - value) <= share * abs(value)
    tolerance = f"{100 * share:g} %"
    return Target(claim, *_sides(value, kind), _rounded(ours), tolerance, "", kind, met)


def by_amount(
    claim: str, value: float, ours: float, most: float, unit: str = "", kind: Kind = "predicted"
) -> Target:
    """A figure that may be off by so much, in units of its own."""
    tolerance, met = f"{most:g} {unit}".rstrip(), abs(ours - value) <= most
    return Target(claim, *_sides(value, kind), _rounded(ours), tolerance, "", kind, met)


def holds(
    claim: str, paper: str, ours: str, met: bool, criterion: str, kind: Kind = "predicted"
) -> Target:
    """A claim of the paper in words (an order, a direction, a bound), and the test it has here."""
    return Target(claim, paper, "", ours, "", criterion, kind, met)


def agrees(claim: str, ours: str, met: bool, criterion: str) -> Target:
    """A claim of our own, which is in no paper, and the test it has here."""
    return Target(claim, "", "", ours, "", criterion, "consistency", met)


def _sides(value: float, kind: Kind) -> tuple[float | str, float | str]:
    """The paper's figure and the reference, of which one is empty."""
    return ("", _rounded(value)) if kind == "consistency" else (value, "")


def show_targets(targets: Sequence[Target]) -> None:
    """As lines of a markdown table."""
    rows = [asdict(target) | {"met": "met" if target.met else "**missed**"} for target in targets]
    show_table(rows)
    print()
    for kind in get_args(Kind):
        here = [target.met for target in targets if target.kind == kind]
        if here:
            print(f"{kind}: {sum(here)} of {len(here)} met")


def show_table(rows: Sequence[Mapping[str, Any]]) -> None:
    """As lines of a markdown table; numbers to the right."""
    columns = list(rows[0])
    numeric = [all(isinstance(row[c], int | float) for row in rows) for c in columns]
    print("| " + " | ".join(columns) + " |")
    print("| " + " | ".join("---:" if right else "---" for right in numeric) + " |")
    for row in rows:
        print("| " + " | ".join(_text(row[column]) for column in columns) + " |")


def write_targets(path: Path, made_by: str, targets: Sequence[Target]) -> None:
    """A file with a row for each claim, and in its last column the script that has made it.

    Claims that a script made before and makes no more are dropped; other scripts' are left.
    """
    rows: list[dict[str, Any]] = []
    if path.exists():
        with path.open(newline="", encoding="utf-8") as file:
            rows = [row for row in csv.DictReader(file) if row["made_by"] != made_by]
    for target in targets:
        rows.append(asdict(target) | {"met": "yes" if target.met else "no", "made_by": made_by})
    write_csv(path, rows)


def kept(path: Path, make: Callable[[], list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """A table that this very command has made, as it stands in its file; else made anew.

    So a script that was killed goes on, and one of another version reproduces all that it writes.
    Seconds that a host takes are not to be kept so: another one has others.
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


def is_current(path: Path, measured: bool = False) -> bool:
    """True if a file is as ``mark`` has seen it, by the same command, code and data.

    Args:
        measured: it has seconds that a host took, and must have been made on this one.
    """
    marks = _marks(path)
    return path.exists() and marks.get(path.name) == _origin(path, measured)


def mark(path: Path, measured: bool = False) -> None:
    """Note what has made a file, in ``.kept.json`` beside it; ``measured``: see ``is_current``."""
    marks = _marks(path) | {path.name: _origin(path, measured)}
    path.with_name(".kept.json").write_text(json.dumps(marks, indent=1), encoding="utf-8")


def _marks(path: Path) -> dict[str, str]:
    file = path.with_name(".kept.json")
    found: dict[str, str] = json.loads(file.read_text("utf-8")) if file.exists() else {}
    return found


def _origin(path: Path, measured: bool) -> str:
    """A digest of the command, the files that it names, all code, and the file itself."""
    words = [word.partition("=")[2] if word.startswith("--") else word for word in sys.argv[1:]]
    named = [w for w in words if Path(w).resolve() != path.parent.resolve()]
    scripts = digest_of(Path(__file__).parent)
    table = hashlib.sha256(path.read_bytes()).hexdigest()
    host = [origin()["machine"]] if measured else []
    made_by = code_version(), scripts, Path(sys.argv[0]).name, named, contents(named)
    return key_of(*made_by, table, *host)


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
