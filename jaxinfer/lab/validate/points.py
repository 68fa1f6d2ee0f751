"""Measured points: rows of a CSV file with aiconfigurator's columns, and which uses are valid."""

import csv
import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from jaxinfer.errors import JaxinferError
from jaxinfer.files.shipped import why_not
from jaxinfer.options.validation import shown

COLUMNS = (
    "id", "backend", "backend_version", "model_path", "system", "precision", "mode", "isl", "osl",
    "gemm_quant_mode", "batch_size", "tp_size", "pp_size", "silicon_ttft_ms", "silicon_tpot_ms",
)  # fmt: skip
# Optional columns that are read.
OPTIONAL = "note", "moe_quant_mode", "moe_tp_size", "moe_ep_size"
# A number above this counts as a mistake, because its simulation would never end.
_MOST_TOKENS, _MOST_AT_ONCE, _MOST_GPUS = 10_000_000, 100_000, 1024
# TTFT falls if it is shorter by more than this share at the next higher concurrency.
_FALLS = 0.05
# A series gives no TTFT if it falls in more than this share of its pairs, with at least this many
# pairs.
_MOST_FALLING, _FEWEST_PAIRS = 0.2, 10
_CONCURRENCY = re.compile(r"concurrency=([^\s,;]*)")
_DEGREES = re.compile(r"_tp(\d+)(?:_\d+)?_ep(\d+)")


@dataclass(frozen=True)
class Point:
    """A measured point.

    Attributes:
        row: all given columns.
        concurrency: number of requests in flight.
        isl: nominal number of prompt tokens.
        osl: nominal number of output tokens.
        tp: number of GPUs that share each layer.
        stages: number of pipeline stages.
        moe_tp: number of parts into which each expert is cut.
        moe_ep: number of parts into which whole experts are divided; 1 without experts.
        ttft_ms: measured mean TTFT.
        tpot_ms: measured mean TPOT.
        line: line of the file on which the row ends.
        wrong: reason why the row cannot be read, or empty; its numbers are then 0.
    """

    row: Mapping[str, str]
    concurrency: int = 0
    isl: int = 0
    osl: int = 0
    tp: int = 0
    ttft_ms: float = 0.0
    tpot_ms: float = 0.0
    stages: int = 1
    moe_tp: int = 0
    moe_ep: int = 1
    line: int = 0
    wrong: str = ""

    @property
    def id(self) -> str:
        """Name of the point."""
        return self.row["id"]

    @property
    def states_concurrency(self) -> bool:
        """True if ``note`` has the concurrency; ``batch_size`` alone may be an engine's limit."""
        return _CONCURRENCY.search(self.row.get("note") or "") is not None

    @property
    def attention_dp(self) -> int:
        """Number of groups of GPUs that each attend to their own requests, but share experts."""
        return max(self.moe_ep * self.moe_tp // max(self.tp, 1), 1)

    @property
    def group(self) -> tuple[str, ...]:
        """The point's model, card, backend and backend version."""
        return tuple(self.row[n] for n in ("model_path", "system", "backend", "backend_version"))

    @property
    def series(self) -> tuple[object, ...]:
        """Key that is equal for points that differ only in their concurrency."""
        names = ("precision", "gemm_quant_mode", "mode", "pp_size", "moe_tp_size", "moe_ep_size")
        others = (self.row.get(name, "") for name in names)
        return (*self.group, self.isl, self.osl, self.tp, *others)

    @property
    def e2e_ms(self) -> float:
        """Measured mean time of a request with its nominal length."""
        return self.ttft_ms + (self.osl - 1) * self.tpot_ms


@dataclass(frozen=True)
class Use:
    """For which metrics a point may be used.

    Attributes:
        tpot: whether the point counts for TPOT.
        ttft: whether the point counts for TTFT.
        why: reason why the point does not count for one of them; otherwise empty.
    """

    tpot: bool
    ttft: bool
    why: str = ""


def read_points(path: Path) -> list[Point]:
    """Read a file of points; in a point whose row cannot be read, ``wrong`` says why.

    Raises:
        JaxinferError: the file cannot be read, lacks a column, or has one twice.
    """
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file)
            rows = [(reader.line_num, row) for row in reader]
    except OSError as error:
        raise JaxinferError(f"{path}: {why_not(path, error)}") from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise JaxinferError(f"{path}: not CSV: {error}") from None
    header = reader.fieldnames or ()
    for mark, name in ((";", "semicolons"), ("\t", "tabs")):
        if len(header) == 1 and mark in header[0]:
            raise JaxinferError(f"{path}: its columns are apart by {name}, must be by commas")
    if twice := [name for name, count in Counter(header).items() if name and count > 1]:
        raise JaxinferError(f"{path}: has the column {twice[0]!r} twice")
    if not rows:
        raise JaxinferError(f"{path}: has no points")
    if missing := [name for name in COLUMNS if name not in header]:
        raise JaxinferError(f"{path}: lacks the column {missing[0]}")
    return [_point(line, row, len(header)) for line, row in rows]


def _point(line: int, row: dict[Any, Any], width: int) -> Point:
    more, missing = row.pop(None, []), list(row.values()).count(None)
    cells = {name: value or "" for name, value in row.items()}
    try:
        if more or missing:
            count = width + len(more) - missing
            raise JaxinferError(f"has {count} cells, the header {width}")
        return _read(line, cells)
    except JaxinferError as error:
        return Point(cells, line=line, wrong=str(error))


def _read(line: int, row: Mapping[str, str]) -> Point:
    """Read the numbers of a row."""

    def integer(name: str, least: int, most: int, empty: int | None = None) -> int:
        return _integer(name, row.get(name) or "", least, most, empty)

    # Disaggregated points have sizes of two sides instead of one; they are not simulated.
    empty = None if row["mode"] == "agg" else 0
    if given := _CONCURRENCY.search(row.get("note") or ""):
        concurrency = _integer("concurrency of note", given[1], 1, _MOST_AT_ONCE)
    else:
        concurrency = integer("batch_size", 1, _MOST_AT_ONCE, empty)
    tp = integer("tp_size", 1, _MOST_GPUS, empty)
    # In some rows, the degree is multiplied by that of experts; the id has the original one.
    if found := _DEGREES.search(row["id"]):
        degree, ep = int(found[1]), int(found[2] or 0)
        if not degree or (ep and tp not in (0, degree, degree * ep)):
            raise JaxinferError(f"tp_size is {row['tp_size']}, the id has tp{degree}")
        tp = degree
    moe_tp = integer("moe_tp_size", 0, _MOST_GPUS, 0)
    moe_ep = max(integer("moe_ep_size", 0, _MOST_GPUS, 1), 1)
    if moe_tp * moe_ep > _MOST_GPUS:
        raise JaxinferError(
            f"moe_tp_size x moe_ep_size is {moe_tp * moe_ep}, must be at most {_MOST_GPUS}"
        )
    return Point(
        row,
        line=line,
        concurrency=concurrency,
        isl=integer("isl", 1, _MOST_TOKENS),
        osl=integer("osl", 1, _MOST_TOKENS),
        tp=tp,
        stages=integer("pp_size", 1, _MOST_GPUS, 1),
        moe_tp=moe_tp,
        moe_ep=moe_ep,
        ttft_ms=_number("silicon_ttft_ms", row["silicon_ttft_ms"], 0.0, "a number from 0 on"),
        tpot_ms=_number("silicon_tpot_ms", row["silicon_tpot_ms"], 0.0, "a number from 0 on"),
    )


def _integer(name: str, text: str, least: int, most: int, empty: int | None = None) -> int:
    if not text and empty is not None:
        return empty
    wanted = f"an integer from {least} to {most}"
    value = _number(name, text, least, wanted)
    if value != int(value) or value > most:
        raise JaxinferError(f"{name} is {shown(text)}, must be {wanted}")
    return int(value)


def _number(name: str, text: str, least: float, wanted: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (least <= value < math.inf):
        raise JaxinferError(f"{name} is {shown(text)}, must be {wanted}")
    return value


def uses(points: Sequence[Point]) -> list[Use]:
    """Decide for which metrics each point may be used; the rules do not depend on predictions."""
    twice = set(_duplicates(points))
    some_stated = any(point.states_concurrency for point in points if not point.wrong)
    falling = _falling_groups([p for n, p in enumerate(points) if n not in twice and not p.wrong])
    found = []
    for number, point in enumerate(points):
        if point.wrong:
            found.append(Use(False, False, point.wrong))
        elif number in twice:
            found.append(Use(False, False, "the same as a point before"))
        elif point.row["mode"] != "agg":
            found.append(Use(False, False, f"mode {point.row['mode']}: its launch is not known"))
        elif some_stated and not point.states_concurrency:
            found.append(Use(False, False, "does not say its concurrency, as others do"))
        elif not point.tpot_ms or not point.ttft_ms or point.osl < 2:
            found.append(Use(False, False, "has no TTFT or no TPOT"))
        elif point.group in falling:
            found.append(Use(True, False, "TTFT of its group falls as concurrency rises"))
        else:
            found.append(Use(True, True))
    return found


def _duplicates(points: Sequence[Point]) -> Iterator[int]:
    """Yield the numbers of points that equal an earlier one."""
    seen = set()
    for number, point in enumerate(points):
        key = (*point.series, point.concurrency, point.ttft_ms, point.tpot_ms)
        if key in seen and not point.wrong:
            yield number
        if not point.wrong:
            seen.add(key)


def _falling_groups(points: Iterable[Point]) -> set[tuple[str, ...]]:
    """Return the groups whose TTFT falls between too many neighbouring concurrencies."""
    series: defaultdict[tuple[object, ...], list[Point]] = defaultdict(list)
    for point in points:
        series[point.series].append(point)
    pairs: defaultdict[tuple[str, ...], list[bool]] = defaultdict(list)
    for several in series.values():
        ordered = sorted(several, key=lambda p: p.concurrency)
        for low, high in pairwise(ordered):
            if low.concurrency < high.concurrency:
                falls = high.ttft_ms < (1 - _FALLS) * low.ttft_ms
                pairs[low.group].append(falls)
    return {
        group
        for group, falls in pairs.items()
        if len(falls) >= _FEWEST_PAIRS and sum(falls) / len(falls) > _MOST_FALLING
    }
