"""Errors of predictions: medians, 90th percentiles and rank correlation, by group."""

import statistics
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table
from rich.text import Text
from scipy.stats import kendalltau

from jaxinfer.lab.validate.points import Point, Use

FIGURES = ("tpot", "ttft", "e2e")
ALL = "all"
# Columns of results, next to the given ones.
OURS = (*(f"{name}_ms" for name in ("ttft", "tpot", "e2e")), "simulated_as", "usable", "why")


@dataclass(frozen=True)
class Compared:
    """A measured point and its prediction.

    Attributes:
        found: ``ttft_ms`` and ``tpot_ms``, or ``refused``; None if the point was left out.
        simulated_as: scheduler and tables used for the simulation.
    """

    point: Point
    use: Use
    found: Mapping[str, Any] | None
    simulated_as: str = ""

    @property
    def is_predicted(self) -> bool:
        """True if the point has predicted figures."""
        return self.found is not None and "refused" not in self.found

    def predicted(self, name: str) -> float:
        """Return a predicted figure in milliseconds; ``e2e`` is for a request of nominal length."""
        assert self.found
        if name != "e2e":
            return float(self.found[f"{name}_ms"])
        return self.predicted("ttft") + (self.point.osl - 1) * self.predicted("tpot")

    def counts(self, name: str) -> bool:
        """Tell whether the point counts for a figure; a request's whole time includes its TTFT."""
        return self.is_predicted and (self.use.tpot if name == "tpot" else self.use.ttft)

    def error(self, name: str) -> float:
        """Return the relative error of a figure: (predicted - measured) / measured."""
        measured: float = getattr(self.point, f"{name}_ms")
        return self.predicted(name) / measured - 1

    @property
    def why(self) -> str:
        """Reason why there are no figures, or no valid TTFT; otherwise empty."""
        return str((self.found or {}).get("refused") or self.use.why)

    @property
    def row(self) -> dict[str, Any]:
        """The given columns, followed by ours."""
        usable = "" if not self.use.tpot else "both" if self.use.ttft else "tpot"
        ours = {
            f"{name}_ms": self.predicted(name) if self.is_predicted else ""
            for name in ("ttft", "tpot", "e2e")
        }
        ours["simulated_as"] = self.simulated_as if self.is_predicted else ""
        use = {"usable": usable if self.is_predicted else "", "why": self.why}
        return beside(self.point.row, {**ours, **use})


def beside(given: Mapping[str, Any], ours: dict[str, Any]) -> dict[str, Any]:
    """Return a row of the given columns and our own; given columns with our names get ``own_``."""
    return {_own_name(name, {*given, *ours}, ours): value for name, value in given.items()} | ours


def _own_name(name: str, taken: Collection[str], ours: Collection[str]) -> str:
    if name not in ours:
        return name
    while name in taken:
        name = f"own_{name}"
    return name


def summarise(compared: Sequence[Compared]) -> dict[str, dict[str, Any]]:
    """Return the errors of each group of points, and those of all points.

    Each has ``n``, a group's ``simulated_as``, and for TPOT, TTFT and a request's whole time the
    median and the 90th percentile of \\|error\\|, the median error, and Kendall's tau between both.
    """
    groups: dict[str, list[Compared]] = {}
    for each in compared:
        if each.is_predicted and each.use.tpot:
            groups.setdefault(" ".join(filter(None, each.point.group)), []).append(each)
    found = {
        name: _figures(several) | {"simulated_as": sorted({each.simulated_as for each in several})}
        for name, several in sorted(groups.items())
    }
    return found | {ALL: _figures([each for several in groups.values() for each in several])}


def _figures(several: Sequence[Compared]) -> dict[str, Any]:
    found: dict[str, Any] = {"n": len(several)}
    for name in FIGURES:
        counted = [each for each in several if each.counts(name)]
        errors = [each.error(name) for each in counted]
        found[name] = {
            "n": len(errors),
            "median": statistics.median(map(abs, errors)) if errors else None,
            "p90": _p90([abs(error) for error in errors]),
            "bias": statistics.median(errors) if errors else None,
            "tau": _tau(counted, name),
        }
    return found


def _p90(values: Sequence[float]) -> float | None:
    if len(values) < 2:
        return values[0] if values else None
    return statistics.quantiles(values, n=10, method="inclusive")[-1]


def _tau(several: Sequence[Compared], name: str) -> float | None:
    if len(several) < 2:
        return None
    measured = [getattr(each.point, f"{name}_ms") for each in several]
    ours = [each.predicted(name) for each in several]
    tau = float(kendalltau(measured, ours).statistic)
    return None if tau != tau else tau


def show(summary: Mapping[str, Mapping[str, Any]]) -> Table:
    """Return a table with a line per group; errors in percent."""
    table = Table(box=None, pad_edge=False)
    table.add_column("group")
    columns: dict[str, Callable[[Mapping[str, Any]], str]] = {
        "n": lambda f: str(f["n"]),
        "median": lambda f: _percent(f["median"]),
        "p90": lambda f: _percent(f["p90"]),
        "tau": lambda f: "" if f["tau"] is None else f"{f['tau']:.2f}",
    }
    words = {"tpot": "TPOT", "ttft": "TTFT", "e2e": "E2E"}
    for name in FIGURES:
        for column in columns:
            table.add_column(
                f"{words[name]} {column}" if column == "n" else column, justify="right"
            )
    for group, found in summary.items():
        cells = [make(found[name]) for name in FIGURES for make in columns.values()]
        table.add_row(Text(group), *cells)
    return table


def _percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.1f}"
