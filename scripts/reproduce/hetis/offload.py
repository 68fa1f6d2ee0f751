"""Tokens in flight from which heads leave the devices with layers, and where they go.

The closed form is for one stage. Heads leave once a layer's attention takes longer than an
exchange: ``entries * per_entry = exchange`` (over all heads). A step of a pipeline has only its
share of the requests, so the number of tokens in flight is larger by that factor.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from jaxinfer.config.run_file import RunFile
from jaxinfer.report.records import read_lines
from jaxinfer.simulate.run import simulate
from jaxinfer.workload.lengths import BenchRequest
from scripts.reproduce.claims import Target, by_share, holds
from scripts.reproduce.hetis.cases import (
    LARGE,
    PRIMARIES,
    SEVENTY,
    THIRTEEN,
    TWO,
    cluster,
    hardware,
    hetis,
    modelled,
)
from scripts.tables import Row

# Model, stages, groups for heads, number of requests and their tokens, and seconds between two of
# them.
CASES: dict[str, tuple[str, Any, Any, int, tuple[int, int], float]] = {
    "13B, one A100, two 3090": (THIRTEEN, (("one", None),), TWO, 60, (500, 500), 0.1),
    "70B, four A100, four P100": (SEVENTY, (("a", None),), ("p",), 150, (2000, 1500), 0.3),
    "70B, the whole cluster": (SEVENTY, PRIMARIES, ("p",), 220, (2000, 1500), 0.15),
}
EXCHANGES = (60e-6, 100e-6, 200e-6)


@dataclass(frozen=True)
class Course:
    """A simulation in which requests arrive until there are many.

    Attributes:
        case: name of the case.
        exchange_s: seconds of one layer's exchange, there and back.
        expected: tokens in flight at which heads should leave, by the closed form.
        steps: for each step, the tokens in flight, and each stage's heads on each device.
    """

    case: str
    exchange_s: float
    expected: float
    steps: Sequence[tuple[int, Sequence[Sequence[int]]]]


def courses() -> list[Course]:
    """Return the courses of all cases and exchanges."""
    found = []
    for case, (model, layers, attention, *_) in CASES.items():
        for exchange in EXCHANGES:
            with TemporaryDirectory() as folder:
                file = hardware(Path(folder), exchange / 2)
                config = cluster(model, layers, attention, hetis(), LARGE, file=file)
                steps = list(served(case, config, Path(folder) / "runs"))
                found.append(Course(case, exchange, closed_form(config), steps))
    return found


def served(case: str, config: RunFile, folder: Path) -> Iterator[tuple[int, list[list[int]]]]:
    """Yield tokens in flight and heads on each device, by stage, for each step of a simulation."""
    *_, count, (prompt, output), every = CASES[case]
    work = [BenchRequest(None, prompt, output, every * i) for i in range(count)]
    simulate(config, work, folder)
    instance = modelled(config)
    heads, stages = instance.shards[0].heads, len(instance.layers)
    each = len(instance.shards) // stages
    for step in read_lines(folder / "1").steps:
        tokens = step["pages_in_use"] * instance.config.page_size // (heads * stages)
        yield tokens, [step["heads"][i : i + each] for i in range(0, each * stages, each)]


def closed_form(config: RunFile) -> float:
    """Return the tokens in flight at which the first stage's heads leave."""
    instance = modelled(config)
    stages, least = len(instance.layers), float("inf")
    for stage in range(stages):
        own, *others = [shard for shard in instance.shards if shard.stage == stage]
        assert own.cost
        for other in others:
            assert other.cost
            tokens = other.cost.fit.exchange / own.cost.fit.per_entry / own.heads
            least = min(least, tokens)
    return stages * least


def offload(found: Sequence[Course]) -> tuple[list[Row], list[Target]]:
    """Compare the closed form with simulations, and count steps with few heads on own devices."""
    rows, targets = list[Row](), list[Target]()
    for course in found:
        # Heads that have left return late; this is about when the first ones leave.
        gone = (tokens for tokens, stages in course.steps if any(sum(s[1:]) for s in stages))
        began, expected, us = next(gone, 0), course.expected, round(1e6 * course.exchange_s)
        fewer = sum(any(s[0] < max(s[1:]) for s in stages) for _, stages in course.steps)
        most, there = max(course.steps, key=lambda step: step[0])
        rows.append(
            {
                "cluster": course.case,
                "exchange (us)": us,
                "closed form (tokens)": round(expected),
                "simulated (tokens)": began,
                "at most in flight": most,
                "own share of heads then": " / ".join(f"{s[0] / sum(s):.2f}" for s in there),
                "steps": len(course.steps),
                "of them with most heads elsewhere": fewer,
            }
        )
        if began or expected < most:
            claim = f"tokens in flight from which heads leave: {course.case}, {us} us"
            targets.append(by_share(claim, expected, began, 0.2, "consistency"))
    of_13b = [row for row in rows if row["cluster"].startswith("13B")]
    fewer = sum(row["of them with most heads elsewhere"] for row in of_13b)
    says = f"fewer in {fewer} of {sum(row['steps'] for row in of_13b)} steps"
    claim = "13B: the A100 always has more heads than a 3090 (Fig. 14)"
    return rows, [*targets, holds(claim, "more", says, not fewer, "never fewer")]
