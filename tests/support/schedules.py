"""Schedules by hand: a system that does as it is told, and a run as lines of text.

A step takes a second, and so does a transfer, unless said otherwise.
"""

from collections.abc import Sequence
from typing import Any

from fake_world import Step, Timing
from scenarios import Follow, Script
from serving_checks import Outcome, Run, make_kv, make_requests, new_instance

from jaxinfer.serving.instance import Instance
from jaxinfer.serving.instance_options import InstanceOptions
from jaxinfer.serving.system import Action, Assignment, System
from jaxinfer.serving.views import ClusterView, Leg

Actions = dict[float, Sequence[Action]]


def unit(**timing: Any) -> Timing:
    """A second for each, and no ties."""
    return Timing(in_order=True, **timing)


def pool(name: str, pages: int = 50, page_size: int = 1, **options: Any) -> Instance:
    """Four tokens in a step, one step at a time, and no watermark, unless said otherwise."""
    defaults = {"max_num_batched_tokens": 4, "max_in_flight": 1, "launch_ahead": False}
    opts = InstanceOptions(**(defaults | {"watermark": 0.0} | options))
    return new_instance(name, make_kv(pages, page_size), opts)


class Plan(System):
    """Legs by request, and actions at given times: half seconds, at which no step ends.

    Requests of ``later`` are routed from then on only.
    """

    def __init__(
        self,
        legs: dict[str, tuple[Leg, ...]],
        actions: Actions | None = None,
        later: dict[str, float] | None = None,
        ticks: bool = True,
    ) -> None:
        self.legs, self.actions, self.later = legs, actions or {}, later or {}
        self.tick_interval = 0.5 if ticks else None
        self.asked: list[list[str]] = []

    def route(self, waiting, cluster: ClusterView) -> list[Assignment]:  # type: ignore[no-untyped-def]
        self.asked.append([r.id for r in waiting])
        return [
            Assignment(r.id, self.legs[r.id])
            for r in waiting
            if cluster.now >= self.later.get(r.id, 0)
        ]

    def on_tick(self, cluster: ClusterView) -> Sequence[Action]:
        return self.actions.pop(cluster.now, ())


def serve(
    system: System,
    instances: Sequence[Instance],
    lengths: Sequence[tuple[int, int]],
    arrivals: Sequence[float] | None = None,
    **run: Any,
) -> Outcome:
    run.setdefault("timing", unit())
    return Run(system, instances, make_requests(lengths, arrivals), **run).verify()


def follow(legs: Sequence[tuple[Leg, ...]], *rest: Any, **run: Any) -> Outcome:
    """Follow legs that are all named at once, without ticks."""
    scripts = {f"r{i}": Script(1, 1, 0, None, each, len(each)) for i, each in enumerate(legs)}
    return serve(Follow(scripts), *rest, **run)


def steps(outcome: Outcome) -> list[str]:
    """Start, end, instance and rows of each step, e.g. ``0-1 A r0:0+4``."""

    def text(step: Step) -> str:
        rows = " ".join(f"{r.request.id}:{r.start}+{r.count}" for r in step.batch.rows)
        return f"{step.start:g}-{step.end:g} {step.batch.instance} {rows}"

    return [text(step) for step in outcome.world.steps]


def moves(outcome: Outcome) -> list[str]:
    """Return each transfer's time asked for, request, source, destination and entries."""
    return [
        f"{t.requested:g} {t.request.id} {t.source}>{t.dest} {t.start}-{t.stop}"
        for t in outcome.world.transfers
    ]


def times(outcome: Outcome, name: str = "r0") -> list[float]:
    return outcome.finished[name].metrics.token_times


TO_A = (Leg("A"),)
