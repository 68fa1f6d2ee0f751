"""Small instances, and systems that follow a script."""

from collections.abc import Sequence

from fake_world import Timing
from scenarios import Follow, Script
from serving_checks import Outcome, Run, make_kv, make_requests, new_instance

from jaxinfer.serving.instance import Instance
from jaxinfer.serving.instance_options import InstanceOptions
from jaxinfer.serving.system import Action, Assignment, System
from jaxinfer.serving.views import ClusterView, Leg, StepView


def tiny(name: str, pages: int, page_size: int = 1, **options: float | bool) -> Instance:
    defaults = {"max_num_batched_tokens": 4, "watermark": 0.0}
    opts = InstanceOptions(**(defaults | options))  # type: ignore[arg-type]
    return new_instance(name, make_kv(pages, page_size), opts)


def follow(
    routes: Sequence[Sequence[Leg]],
    instances: Sequence[Instance],
    lengths: Sequence[tuple[int, int]],
    seed: int = 0,
    **run: object,
) -> Outcome:
    scripts = {
        f"r{i}": Script(*length, 0.0, None, tuple(legs), len(legs))
        for i, (length, legs) in enumerate(zip(lengths, routes, strict=True))
    }
    timing = Timing(seed, max_step=2, max_transfer=5)
    return Run(Follow(scripts), instances, make_requests(lengths), timing, **run).verify()  # type: ignore[arg-type]


class Do(System):
    """Everything runs on A, or by ``legs``; after the n-th step, some actions."""

    def __init__(
        self, *actions: Action, after: int = 1, legs: tuple[Leg, ...] = (Leg("A"),)
    ) -> None:
        self.actions, self.steps_left, self.legs = actions, after, legs

    def route(self, waiting, cluster: ClusterView) -> list[Assignment]:  # type: ignore[no-untyped-def]
        return [Assignment(r.id, self.legs) for r in waiting]

    def on_step(self, step: StepView, cluster: ClusterView) -> Sequence[Action]:
        self.steps_left -= 1
        return self.actions if self.steps_left == 0 else ()
