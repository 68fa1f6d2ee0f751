"""Measured points: rows of a CSV with aiconfigurator's columns, and which of them may be used."""

import csv
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from jaxinfer.errors import JaxinferError

COLUMNS = (
    "id", "backend", "backend_version", "model_path", "system", "precision", "mode", "isl", "osl",
    "gemm_quant_mode", "batch_size", "tp_size", "pp_size", "silicon_ttft_ms", "silicon_tpot_ms",
)  # fmt: skip
# A series is measured anew where a time falls by more than this as concurrency rises.
_FALLS = 0.05
# A series whose TTFT falls in more than this share of pairs, of so many or more, gives none.
_MOST_FALLING, _FEWEST_PAIRS = 0.2, 10
_CONCURRENCY = re.compile(r"concurrency=(\d+)")


@dataclass(frozen=True)
class Point:
    """A measured point.

    Attributes:
        row: all columns as they are given.
        concurrency: requests in flight; ``isl``, ``osl``: nominal tokens of prompt and output.
        ttft_ms, tpot_ms: measured means.
    """

    row: Mapping[str, str]
    concurrency: int
    isl: int
    osl: int
    tp: int
    ttft_ms: float
    tpot_ms: float

    @property
    def id(self) -> str:
        """Name of the point."""
        return self.row["id"]

    @property
    def states_concurrency(self) -> bool:
        """True if ``note`` has the concurrency; ``batch_size`` alone may be an engine's limit."""
        return _CONCURRENCY.search(self.row.get("note") or "") is not None

    @property
    def moe_ep(self) -> int:
        """Ways that experts are shared whole; 1 where there are none."""
        return max(int(float(self.row.get("moe_ep_size") or 1)), 1)

    @property
    def attention_dp(self) -> int:
        """Groups of GPUs that attend to requests of their own, beside experts that all share."""
        experts = self.moe_ep * int(float(self.row.get("moe_tp_size") or 0))
        return max(experts // self.tp, 1)

    @property
    def group(self) -> tuple[str, ...]:
        """Model, card, backend and its version."""
        return tuple(self.row[n] for n in ("model_path", "system", "backend", "backend_version"))

    @property
    def series(self) -> tuple[object, ...]:
        """The key of points that differ in concurrency alone."""
        names = ("precision", "gemm_quant_mode", "mode", "pp_size", "moe_tp_size", "moe_ep_size")
        others = (self.row.get(name, "") for name in names)
        return (*self.group, self.isl, self.osl, self.tp, *others)

    @property
    def e2e_ms(self) -> float:
        """Measured mean time of a request, of its nominal length."""
        return self.ttft_ms + (self.osl - 1) * self.tpot_ms


@dataclass(frozen=True)
class Use:
    """The use that a point may be put to.

    Attributes:
        tpot, ttft: whether it counts in that figure; ``why``: why not, else empty.
    """

    tpot: bool
    ttft: bool
    why: str = ""


def read_points(path: Path) -> list[Point]:
    """Read a file of points.

    Raises:
        JaxinferError: it cannot be read, lacks a column, or a number is none.
    """
    try:
        with path.open(newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
    except OSError as error:
        raise JaxinferError(f"{path}: {error.strerror}") from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise JaxinferError(f"{path}: not CSV: {error}") from None
    if not rows:
        raise JaxinferError(f"{path}: has no points")
    if missing := [name for name in COLUMNS if name not in rows[0]]:
        raise JaxinferError(f"{path}: lacks the column {missing[0]}")
    return [_point(path, line, row) for line, row in enumerate(rows, 2)]


def _point(path: Path, line: int, row: Mapping[str, str]) -> Point:
    def number(name: str, least: float, empty: float | None = None) -> float:
        text = row[name]
        if not text and empty is not None:
            return empty
        try:
            value = float(text)
        except (TypeError, ValueError):
            value = math.nan
        if not (least <= value < math.inf):
            raise JaxinferError(
                f"{path}, line {line}: {name} is {text!r}, must be a number from {least:g} on"
            )
        return value

    given = _CONCURRENCY.search(row.get("note") or "")
    # Disaggregated points have sizes of both sides in place of one; none is simulated.
    concurrency = int(given[1]) if given else int(number("batch_size", 1, empty=0))
    tp = re.search(r"_tp(\d+)_ep\d+|_tp(\d+)_\d+_ep\d+", row["id"])
    # In some rows the degree is multiplied by that of experts; the id has it as it was.
    degree = int(tp[1] or tp[2]) if tp else int(number("tp_size", 1, empty=0))
    return Point(
        row, concurrency, int(number("isl", 1)), int(number("osl", 1)), degree,
        number("silicon_ttft_ms", 0.0), number("silicon_tpot_ms", 0.0),
    )  # fmt: skip


def uses(points: Sequence[Point]) -> list[Use]:
    """Decide what each point may be used for, by rules that no prediction has a part in."""
    twice = set(_duplicates(points))
    some_stated = any(point.states_concurrency for point in points)
    falling = _falling_groups([p for n, p in enumerate(points) if n not in twice])
    found = []
    for number, point in enumerate(points):
        if number in twice:
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
    """Yield the numbers of points that are the same as one before."""
    seen = set()
    for number, point in enumerate(points):
        key = (*point.series, point.concurrency, point.ttft_ms, point.tpot_ms)
        if key in seen:
            yield number
        seen.add(key)


def _falling_groups(points: Iterable[Point]) -> set[tuple[str, ...]]:
    """Groups whose TTFT falls in too many pairs of neighbouring concurrencies."""
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
