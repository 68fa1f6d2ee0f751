"""Costs of takeover's decisions, and of its simulation compared with data parallelism."""

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeVar

from jaxinfer.config.run_file import RunFile, load_run_file
from jaxinfer.papers.takeover.system import Takeover
from jaxinfer.serving.system import Action, Assignment
from jaxinfer.serving.views import ClusterView, Leg, RequestView, StepView
from jaxinfer.simulate.run import prepare, serve
from scripts.reproduce.claims import Target, agrees
from scripts.reproduce.reproduction import Work
from scripts.reproduce.takeover.cases import OURS, Cell
from scripts.tables import CONFIGS, Row

# Numbers of instances, and of requests for each: few requests, which soon all run, and many, which
# wait.
SIZES = ((2, 30), (16, 30), (16, 240), (128, 30))
# Limits: microseconds of decisions per request, by instances; and simulation time relative to data
# parallelism.
MOST_US, MOST_TIMES = {16: 50, 128: 200}, 1.5
# Number of runs. The smallest time of each call counts, because other processes use the CPU, too.
RUNS = 3
T = TypeVar("T")


class TimedTakeover(Takeover):
    """Takeover, with the seconds of each call of its hooks."""

    spent: list[float]

    def route(self, waiting: Collection[RequestView], cluster: ClusterView) -> Sequence[Assignment]:
        """Route, and record the time."""
        return _timed(super().route, waiting, cluster)

    def on_step(self, step: StepView, cluster: ClusterView) -> Sequence[Action]:
        """Look at a step, and record the time."""
        return _timed(super().on_step, step, cluster)

    def on_leg_end(self, request: RequestView, leg: Leg, cluster: ClusterView) -> None:
        """End a leg, and record the time."""
        _timed(super().on_leg_end, request, leg, cluster)

    def on_finish(self, request: RequestView, cluster: ClusterView) -> None:
        """End a request, and record the time."""
        _timed(super().on_finish, request, cluster)


def _timed(hook: Callable[..., T], *given: object) -> T:
    start = time.perf_counter()
    answer = hook(*given)
    TimedTakeover.spent.append(time.perf_counter() - start)
    return answer


def rows() -> list[Row]:
    """Return microseconds per request, for half A100s and half A10s, with prompts of 1k tokens."""
    return [_measured(*size) for size in SIZES]


def _measured(instances: int, each: int) -> Row:
    work = Cell("A100+A10", 1024, 128).work(0, each * instances)
    calls = []
    for _ in range(RUNS):
        TimedTakeover.spent = []
        _seconds(
            _config(
                "takeover/pair", instances, f"system.name={TimedTakeover.__module__}:TimedTakeover"
            ),
            work,
        )
        calls.append(TimedTakeover.spent)
    # The run is the same each time, and so are its calls.
    decided = sum(map(min, zip(*calls, strict=True)))
    names = [f"{name}{number}" for name in ("high", "low") for number in range(instances // 2)]
    shares: Mapping[str, Any] = {
        name: dict.fromkeys(("weight", "max_waiting"), 3 if name.startswith("high") else 1)
        for name in names
    }
    found = {
        OURS: _config("takeover/pair", instances),
        "DP": _config(
            "cronus/data_parallel",
            instances,
            f"system={{name: data_parallel, shares: {_as_yaml(shares)}}}",
        ),
    }
    simulated = {
        system: min(_seconds(config, work) for _ in range(RUNS)) for system, config in found.items()
    }
    per_request = 1e6 / len(work)
    return {
        "instances": instances,
        "requests": len(work),
        "calls_per_request": round(len(calls[0]) / len(work), 2),
        "decisions_us": round(decided * per_request, 1),
        **{f"{name} simulated_us": round(s * per_request) for name, s in simulated.items()},
        "by_dp": round(simulated[OURS] / simulated["DP"], 2),
    }


def _as_yaml(shares: Mapping[str, Mapping[str, int]]) -> str:
    each = (f"{name}: {str(values).replace(chr(39), '')}" for name, values in shares.items())
    return f"{{{', '.join(each)}}}"


def _config(file: str, instances: int, *changes: str) -> RunFile:
    half = instances // 2
    return load_run_file(
        CONFIGS / f"{file}.yaml",
        [
            *(f"groups.{name}.devices={half}" for name in ("high", "low")),
            *(f"groups.{name}.tensor_parallel_size=1" for name in ("high", "low")),
            *(f"instances.{name}.replicas={half}" for name in ("high", "low")),
            *changes,
        ],
    )


def _seconds(config: RunFile, work: Work) -> float:
    """Return the CPU seconds of a run."""
    prepared = prepare(config)
    start = time.process_time()
    serve(prepared, work, None)
    return time.process_time() - start


def claims(rows: Sequence[Row]) -> list[Target]:
    """Return the claims, with their limits."""
    made = []
    for row in rows:
        where = f"{row['instances']} instances, {row['requests']} requests"
        if most := MOST_US.get(int(row["instances"])):
            us = float(row["decisions_us"])
            said, bar = f"{us} us per request", f"under {most} us"
            made.append(agrees(f"takeover's decisions, {where}", said, us < most, bar))
        times = float(row["by_dp"])
        claim = f"seconds of a simulation of takeover by one of DP, {where}"
        made.append(agrees(claim, f"{times}", times <= MOST_TIMES, f"at most {MOST_TIMES}"))
    return made
