"""DistServe's placements (section 4.2) by ``jaxinfer plan``'s planner, and the paper's.

The plan files are ``configs/plan/distserve_*.yaml``.
"""

import time
from concurrent.futures import ProcessPoolExecutor

from jaxinfer.lab.plan.candidate import Axis, Candidate
from jaxinfer.lab.plan.problem import load_problem
from jaxinfer.lab.plan.registry import make_planner
from jaxinfer.lab.plan.search import DrivenSearch
from scripts.reproduce.claims import Target, holds
from scripts.reproduce.reproduction import Inputs, Part
from scripts.tables import CONFIGS, Row

FOLDER = CONFIGS / "plan"
# For each model, tensor and pipeline parallelism of prefill and decode in the artefact.
PAPER = {"13b": (2, 1, 1, 1), "66b": (4, 1, 2, 2), "175b": (3, 3, 4, 3)}
AXES = ("prefill_tp", "prefill_pp", "decode_tp", "decode_pp")


def shape_of(candidate: Candidate) -> tuple[Axis, ...]:
    """Return tensor and pipeline parallelism of prefill and decode."""
    return tuple(candidate.axes[name] for name in AXES)


def found(model: str, pool: ProcessPoolExecutor) -> tuple[list[Row], Target]:
    """Return the best three placements and the paper's, and the claim."""
    paper = PAPER[model]
    problem = load_problem(FOLDER / f"distserve_{model}.yaml", ["goal.top=3"])
    search = DrivenSearch(problem, pool.map)
    started = time.monotonic()
    make_planner(problem.planner).plan(search.problem, search)
    seconds = time.monotonic() - started
    whole = [candidate for candidate, _ in search.tried.values() if candidate.whole]
    # Searched in full, because it may have been given up.
    search.scores([each for each in whole if shape_of(each) == paper])
    units = [(c, s) for c, s in search.tried.values() if c.whole and s.figures]
    units.sort(key=lambda each: -search.value(each[1]))
    shapes = [shape_of(candidate) for candidate, _ in units]
    rows = [
        {
            "model": model,
            "place": place + 1,
            "prefill TP, PP": f"{shape[0]}, {shape[1]}",
            "decode TP, PP": f"{shape[2]}, {shape[3]}",
            "paper's": "yes" if shape == paper else "",
            "requests/s per GPU": round(search.value(units[place][1]), 3),
            "rate": "" if units[place][1].given_up is None else "at least",
            "looked at": len(search.tried),
            "s": round(seconds),
        }
        for place, shape in enumerate(shapes)
        if place < 3 or shape == paper
    ]
    place = shapes.index(paper) + 1
    claim = f"OPT-{model.upper()}: the paper's placement is our best"
    said = f"place {place}" if place <= 3 else f"place {place} or later"
    return rows, holds(claim, f"{paper}, its best", said, place == 1, "place 1")


def placements(inputs: Inputs) -> Part:
    """Placements of each model."""
    pool = inputs.pool
    rows, targets = [], []
    for model in PAPER:
        table, target = found(model, pool)
        rows += table
        targets.append(target)
    return Part(rows, targets)
