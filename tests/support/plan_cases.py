"""Searches whose simulations are a rule: what each run file carries is known."""

from collections.abc import Callable, Sequence
from typing import Any

from jaxinfer.config.run_file import RunFile
from jaxinfer.lab.plan.problem import Problem
from jaxinfer.serving.batch import Work
from jaxinfer.simulate.capacity import TriedRate, num_gpus
from jaxinfer.simulate.targets import Verdict

RUN = {
    "model": "llama-3-8b",
    "engine": {"max_model_len": 2048},
    "workload": {"synthetic": {"lengths": "azure_conversation", "count": 4, "seed": 0}},
}


class Carries:
    """Stand in for simulations: clusters carry requests per second by instances and sequences.

    Attributes:
        tried: of each simulation, the run file and the rate.
        served: likewise, how many requests, and the seeds of their arrivals.
    """

    def __init__(self) -> None:
        self.tried: list[tuple[RunFile, float]] = []
        self.served: list[tuple[int, tuple[int, ...]]] = []
        self.rate: Callable[[RunFile], float] = lambda config: 1.0

    def __call__(
        self, config: RunFile, work: Any, targets: Any, seeds: Any, rate: float
    ) -> TriedRate:
        self.tried.append((config, rate))
        self.served.append((len(work), tuple(seeds)))
        met = rate <= self.rate(config)
        # A share of the requests for each limit, by its metric.
        verdict = Verdict(met, 1, float(met), dict.fromkeys(map(str, targets.limits), float(met)))
        return TriedRate(rate, num_gpus(config), verdict, rate if met else None)


def problem(goal: dict[str, Any], planner: dict[str, Any] | None = None, **more: Any) -> Problem:
    """Return a problem with targets that do not matter."""
    goal = {"slo": "ttft=1", "fresh_seeds": 1} | goal
    planner = planner or {"name": "colocated", "gpus": {"A10": 1}}
    return Problem.model_validate({"planner": planner, "goal": goal, "run": RUN} | more)


class Linear:
    """The linear costs of two stages, one of which takes half as long."""

    step_s, token_s, entry_s = 0.01, 1e-4, 1e-7

    def stages(self, work: Work) -> Sequence[float]:
        seconds = self.step_s + self.token_s * work.tokens + self.entry_s * work.single_context
        return [seconds, seconds / 2]

    def hops(self, work: Work) -> Sequence[float]:
        return [0.0]
