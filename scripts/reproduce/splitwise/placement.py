"""Splitwise's provisioning (sections IV-D, VI-B and VI-C) by ``jaxinfer plan``'s planner.

A search is one process, and takes minutes (``cpu_s``).
"""

import csv
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import yaml

from jaxinfer.files.kept import KeptResults, key_of
from jaxinfer.lab.plan.problem import Problem
from jaxinfer.lab.plan.search import DrivenSearch
from jaxinfer.papers.splitwise.planner import SplitwisePools, SplitwisePoolsOptions
from jaxinfer.report.origin import origin
from jaxinfer.simulate.targets import Targets
from jaxinfer.workload.lengths import BenchRequest
from scripts.reproduce.claims import Target, by_amount
from scripts.reproduce.splitwise.public import BLOOM, Public, PublicDesign, drawn
from scripts.tables import Row

# Kinds of machines for prompts and for tokens, and the largest numbers of each: the ends of the
# public grids.
DESIGNS: Mapping[str, tuple[str, str, int, int]] = {
    "H100": ("h100", "", 50, 0),
    "AA": ("a100", "a100", 69, 69),
    "HH": ("h100", "h100", 39, 39),
    "HA": ("h100", "a100", 39, 69),
    "HHcap": ("h100", "h100_capped", 39, 39),
}
# Power and price of 40 DGX-H100.
BUDGETS = {"watts": 40 * 5600.0, "usd": 40 * 38.0}
RATE, SECONDS = 70, 120
# Share by which a largest rate may be too low.
PRECISION = 0.04


@dataclass(frozen=True)
class PlacementCase:
    """A search over the machines of one design.

    Attributes:
        trace: name of the trace.
        name: name of the design.
        minimise: quantity to minimise at 70 requests per second.
        budget: otherwise, the budget within which the rate is maximised.
        measured: whether decode times are the measured ones.
        step: step of the grid.
        seeds: number of seeds of arrivals.
    """

    trace: str
    name: str
    minimise: str | None = None
    budget: str | None = None
    measured: bool = False
    step: int = 1
    seeds: int = 1

    @property
    def named(self) -> dict[str, str]:
        """Return the columns that identify its row."""
        return {
            "trace": self.trace,
            "cluster": self.name,
            "decodes": "measured" if self.measured else "public",
            "least": self.minimise or "",
            "budget": self.budget or "",
        }

    @property
    def goal(self) -> dict[str, Any]:
        """Return the plan file's goal; the authors' targets replace those of its ``slo``."""
        if self.minimise:
            goal: dict[str, Any] = {"minimise": self.minimise, "rate": RATE}
        else:
            goal = {"maximise": "cluster", "precision": PRECISION}
        # One process simulates one cluster at a time.
        return goal | {"slo": "configs/targets/splitwise.yaml", "seeds": self.seeds, "at_once": 1}


@dataclass(frozen=True)
class PlacementSetting:
    """The authors' measurements, and the traces."""

    public: Public
    traces: Mapping[str, Sequence[BenchRequest]]

    def find(self, case: PlacementCase) -> dict[str, Any]:
        """Return the planner's choice, and its seconds of CPU time."""
        with TemporaryDirectory() as folder:
            problem = self._problem(case, Path(folder))
            search = DrivenSearch(problem)
            planner = SplitwisePools(SplitwisePoolsOptions.model_validate(problem.planner))
            started = time.process_time()
            best = planner.plan(search.problem, search)
            seconds = time.process_time() - started
        score = search.tried[best.key][1]
        costs = search.costs(best)
        assert costs.watts
        prompts, tokens = best.axes["prompt"], best.axes["token"]
        return {
            **case.named,
            "prompt": prompts,
            "token": tokens,
            "machines": costs.gpus // 8,
            "usd_per_hour": round(costs.usd or 0.0, 1),
            "kw": round(costs.watts / 1e3, 2),
            "rps": round(score.rate, 1),
            "looked_at": len(search.tried),
            "cpu_s": round(seconds),
        }

    def _problem(self, case: PlacementCase, folder: Path) -> Problem:
        here, there, prompts, tokens = DESIGNS[case.name]
        design = PublicDesign(1, here, min(tokens, 1), there, measured=case.measured)
        file = folder / "design.yaml"
        file.write_text(yaml.safe_dump(self.public.data(design)), encoding="utf-8")
        lengths = folder / "requests.csv"
        work = drawn(self.traces[case.trace], RATE, SECONDS, 0)
        with lengths.open("w", newline="", encoding="utf-8") as opened:
            table = csv.writer(opened)
            table.writerow(["num_prefill_tokens", "num_decode_tokens"])
            table.writerows((item.prompt_len, item.max_tokens) for item in work)
        public = self.public

        class NotebookProblem(Problem):
            """The problem with the targets of the authors' notebook."""

            @cached_property
            def targets(self) -> Targets:
                return public.targets(BLOOM, self.work)

        planner: dict[str, Any] = {
            "files": {str(file): {"prompt": prompts, "token": tokens}},
            "step": case.step,
        }
        if case.budget:
            planner["at_most"] = {case.budget: BUDGETS[case.budget]}
        own = {"model": "public", "workload": {"trace": str(lengths)}}
        own["models"] = {"public": dict(BLOOM.shape)}
        return NotebookProblem.model_validate({"planner": planner, "goal": case.goal, "run": own})


def cheapest() -> list[PlacementCase]:
    """Return cases of the cheapest for conversations, at 70 requests per second (section VI-C)."""
    # If all machines are equal, the cheapest cluster also needs the least power. A100s alone do not
    # sustain this rate: 86, the end of the public grid, miss the 90th percentile of TPOT by 1 %.
    by_cost = [PlacementCase("conv", name, "usd") for name in ("H100", "AA", "HH", "HA")]
    return [*by_cost, *(PlacementCase("conv", name, "watts") for name in ("HA", "HHcap"))]


def largest(budget: str, measured: bool = False) -> list[PlacementCase]:
    """Return cases of the largest for conversations, in the public grid's steps (VI-B, VI-C)."""
    return [
        PlacementCase("conv", name, budget=budget, measured=measured, step=5)
        for name in ("AA", "HH", "HA", "HHcap")
    ]


def claims(rows: Sequence[Mapping[str, Any]]) -> Iterator[Target]:
    """Yield the paper's claims that the rows can decide."""
    for row in rows:
        if (row["trace"], row["cluster"], row["least"]) == ("code", "HH", "gpus"):
            yield by_amount(
                "HH, code, 70 RPS: machines of the cheapest", 30, row["machines"], 2, "machines"
            )
    least = {(r["cluster"], r["least"]): r for r in rows if r["trace"] == "conv"}
    if h100 := least.get(("H100", "usd")):
        for name, of, figure, what in (
            ("AA", "usd", "usd_per_hour", "cost"),
            ("HHcap", "watts", "kw", "power"),
        ):
            ratio = least[name, of][figure] / h100[figure]
            yield by_amount(f"{name} / H100, conv, 70 RPS: {what}", 0.75, ratio, 0.12)


def cases() -> list[PlacementCase]:
    """Return all searches: HH for coding with three seeds, the cheapest, and the largest rates."""
    return [
        PlacementCase("code", "HH", "gpus", seeds=3),
        *cheapest(),
        *largest("watts"),
        *largest("usd"),
        *largest("watts", measured=True),
    ]


def found(setting: PlacementSetting, pool: ProcessPoolExecutor, known: KeptResults) -> list[Row]:
    """Return a row for each search; ``known`` has the searches of a killed run on this host."""
    keys = {case: key_of(case.named, case.seeds, origin()["machine"]) for case in cases()}
    missing = [case for case, key in keys.items() if known.get(key) is None]
    for case, row in zip(missing, pool.map(setting.find, missing), strict=True):
        known.add(keys[case], row)
    return [known.get(key) for key in keys.values()]
