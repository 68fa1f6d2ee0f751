"""Loads that are followed, on clusters whose steps take one second."""

from typing import Any, ClassVar

from jaxinfer.errors import JaxinferError
from jaxinfer.lab.plan.candidate import Candidate, Search
from jaxinfer.lab.plan.problem import Problem
from jaxinfer.options.validation import Options

RUN: dict[str, Any] = {
    "model": "llama-3-8b",
    "engine": {"max_model_len": 2048, "launch_ahead": False, "enable_prefix_caching": False},
    "groups": {"g": {"kind": "A100-80G-SXM"}},
    "instances": {"i": {"group": "g"}},
    "simulate": {"linear": {"step_s": 1.0}},
}
LONG = 50


class ByPrompts:
    """Two instances where prompts are long, else one.

    Of prompts of 13 tokens there is no plan, and of 14 it breaks.

    Attributes:
        asked: the requests per second of each goal that it was asked for.
    """

    Options = Options
    asked: ClassVar[list[float | None]] = []

    def __init__(self, options: Options) -> None:
        del options

    def plan(self, problem: Problem, search: Search) -> Candidate:
        work = problem.work
        self.asked.append(problem.goal.rate)
        if all(item.prompt_len == 13 for item in work):
            raise JaxinferError("13 is none of mine")
        if all(item.prompt_len == 14 for item in work):
            raise ZeroDivisionError("14")
        return candidate(1 + (sum(item.prompt_len for item in work) > LONG * len(work)))


class OneToThree:
    """The best of as many instances."""

    Options = Options

    def __init__(self, options: Options) -> None:
        del options

    def plan(self, problem: Problem, search: Search) -> Candidate:
        return search.best([candidate(1), candidate(2), candidate(3)])


def candidate(count: int) -> Candidate:
    part = {
        "groups": {"g": {"devices": count, "tensor_parallel_size": 1}},
        "instances": {"i": {"replicas": count}},
        "system": {"name": "least_loaded"},
    }
    return Candidate({"instances": count}, part)


def problem(trace: str, replan: dict[str, Any], **more: Any) -> Problem:
    """Return a problem of a trace with times; targets hold up to some rate, and fail above."""
    goal = {"maximise": "cluster", "slo": "ttft:p90=30", "precision": 0.5}
    workload = {"trace": trace, "arrivals": "trace"}
    file = {
        "planner": "replan_cases:ByPrompts",
        "goal": goal,
        "run": RUN | {"workload": workload},
        "replan": {"reload_s": 3.0} | replan,
    }
    return Problem.model_validate(file | more)
