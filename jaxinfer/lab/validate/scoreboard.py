"""Compares how far jaxinfer and other simulators are off on experiments, for each figure."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from rich.table import Table

from jaxinfer.errors import JaxinferError
from jaxinfer.lab.validate.experiments import ALL_STAGES, FIGURES, ExperimentSetup, StageRow
from jaxinfer.serving.request_state import RequestState
from jaxinfer.simulate.run import simulate

OURS = "jaxinfer"
Figures = Mapping[str, float]


def predict_experiment(asked: ExperimentSetup) -> dict[str, Any]:
    """Return each stage's figures in milliseconds, or ``refused`` with the reason."""
    work = asked.requests()
    ends = np.cumsum([count for count, _ in asked.loads])
    times: list[list[tuple[float, float, float]]] = [[] for _ in ends]

    def on_request(request: RequestState, at: Sequence[float]) -> None:
        stage = int(np.searchsorted(ends, int(request.id), side="right"))
        first, last = at[0] - request.arrival, at[-1] - request.arrival
        times[stage].append((last, first, (last - first) / max(len(at) - 1, 1)))

    try:
        simulate(asked.config, work, on_request=on_request)
    except JaxinferError as error:
        return {"refused": str(error)}
    whole = [each for stage in times for each in stage]
    return {
        str(stage): _figures(several) for stage, several in [*enumerate(times), (ALL_STAGES, whole)]
    }


def _figures(several: Sequence[tuple[float, float, float]]) -> dict[str, float]:
    e2e, ttft, itl = 1e3 * np.array(several).T
    found = {}
    for name, values in (("e2e", e2e), ("ttft", ttft)):
        found[f"{name}_mean"] = float(values.mean())
        found |= {f"{name}_p{p}": float(np.percentile(values, p)) for p in (90, 99)}
    return found | {"itl_mean": float(itl.mean())}


@dataclass(frozen=True)
class ScoredRow:
    """A row and our predictions for it.

    Attributes:
        ours: our predictions, by figure; empty if there are none.
        why: reason why there are none, or why the row does not count; otherwise empty.
    """

    row: StageRow
    ours: Figures
    why: str = ""

    @property
    def cells(self) -> dict[str, Any]:
        """The given columns, followed by ours."""
        return dict(self.row.row) | {
            f"{OURS}:{name}": round(self.ours[name], 3) if self.ours else "" for name in FIGURES
        } | {"why": self.why}  # fmt: skip


def errors(rows: Sequence[ScoredRow], simulator: str, figure: str) -> list[float]:
    """Return one simulator's relative errors on the rows for which we have predictions."""
    found = []
    for each in rows:
        theirs = each.ours if simulator == OURS else each.row.predicted.get(simulator, {})
        if each.ours and figure in theirs and (measured := each.row.measured.get(figure)):
            found.append(theirs[figure] / measured - 1)
    return found


def score(rows: Sequence[ScoredRow]) -> dict[str, list[dict[str, Any]]]:
    """Return the simulators for each figure, the least median absolute error first.

    Each entry has the number ``n`` of rows, ``median`` and ``p90`` of the absolute error, the
    median ``bias``, and ``ours``, the median of our absolute error on the same rows.
    """
    simulators = dict.fromkeys([OURS, *(name for each in rows for name in each.row.predicted)])
    found: dict[str, list[dict[str, Any]]] = {}
    for figure in FIGURES:
        lines = []
        for simulator in simulators:
            if several := errors(rows, simulator, figure):
                absolute = [abs(each) for each in several]
                same = [
                    each
                    for each in rows
                    if simulator == OURS or figure in each.row.predicted.get(simulator, {})
                ]
                lines.append(
                    {
                        "simulator": simulator,
                        "n": len(several),
                        "median": statistics.median(absolute),
                        "p90": float(np.percentile(absolute, 90)),
                        "bias": statistics.median(several),
                        "ours": statistics.median(map(abs, errors(same, OURS, figure))),
                    }
                )
        found[figure] = sorted(lines, key=lambda line: line["median"])
    return found


def show_scores(scores: Mapping[str, Sequence[Mapping[str, Any]]]) -> Table:
    """Return a table with a line per figure and simulator; errors are in percent."""
    table = Table(box=None, pad_edge=False)
    table.add_column("figure")
    table.add_column("rank", justify="right")
    table.add_column("simulator")
    for name in ("rows", "median", "p90", "bias", "ours there"):
        table.add_column(name, justify="right")
    for figure, lines in scores.items():
        for rank, line in enumerate(lines, 1):
            cells = [f"{100 * line[name]:.1f}" for name in ("median", "p90")]
            bias = f"{100 * line['bias']:+.1f}"
            name = figure.replace("_", " ") if rank == 1 else ""
            cells += [bias, f"{100 * line['ours']:.1f}"]
            table.add_row(name, str(rank), line["simulator"], str(line["n"]), *cells)
    return table
