"""A system that scatters KV heads at random, and sections of run files for it."""

import random
from collections.abc import Collection, Sequence
from typing import Any

from jaxinfer.serving.features.head_slices import Placement
from jaxinfer.serving.system import Action, Assignment, MoveSlices
from jaxinfer.serving.views import ClusterView, InstanceView, Leg, RequestView, StepView
from jaxinfer.systems.single import Single


class Scatter(Single):
    """Slices lie anywhere with room, and every other step one request's go somewhere else."""

    def __init__(self, options: Any = None) -> None:
        super().__init__(options)
        self.rng = random.Random(5)

    def route(self, waiting: Collection[RequestView], cluster: ClusterView) -> list[Assignment]:
        return list(super().route(waiting, cluster))

    def place(self, request: RequestView, instance: InstanceView) -> Placement | None:
        pages = -(-request.num_known // instance.page_size)
        free = [shard.num_free_pages for shard in instance.shards]
        found: list[list[int]] = [[] for _ in instance.shards]
        for shard in instance.shards:
            here = [n for n, other in enumerate(instance.shards) if other.stage == shard.stage]
            for piece in shard.slices:
                if not (room := [n for n in here if free[n] >= pages]):
                    return None
                chosen = self.rng.choice(room)
                free[chosen] -= pages
                found[chosen].append(piece)
        return found

    def on_step(self, step: StepView, cluster: ClusterView) -> Sequence[Action]:
        instance = cluster.instances[step.instance]
        if self.rng.random() < 0.5 or not instance.running:
            return ()
        request = instance.running[self.rng.choice(list(instance.running))]
        moves = []
        for source, shard in enumerate(instance.shards):
            others = [
                n
                for n, other in enumerate(instance.shards)
                if other.stage == shard.stage and n != source
            ]
            moves += [
                (source, self.rng.choice(others), (piece,))
                for piece in request.slices[source]
                if self.rng.random() < 0.5
            ]
        gone = {(dest, piece) for _, dest, (piece,) in moves}
        there = {(n, piece) for n, pieces in enumerate(request.slices) for piece in pieces}
        return [MoveSlices(request.id, tuple(moves))] if moves and not gone & there else ()


class ScatterFirst(Scatter):
    """The same on the first of several instances, and plainly on others once that is lost."""

    def check(self, instances: Collection[str]) -> None:
        pass

    def route(self, waiting: Collection[RequestView], cluster: ClusterView) -> list[Assignment]:
        first = next(iter(cluster.instances))
        return [Assignment(request.id, (Leg(first),)) for request in waiting]

    def on_step(self, step: StepView, cluster: ClusterView) -> Sequence[Action]:
        several = len(cluster.instances[step.instance].shards) > 1
        return super().on_step(step, cluster) if several else ()


def spread(attention: Sequence[int | None], primary: int = 1, **more: Any) -> dict[str, Any]:
    """Return a run file's sections: one stage, with attention groups of these numbers of pages."""
    names = [f"a{number}" for number in range(len(attention))]
    groups = {"p": {"devices": primary}} | {name: {} for name in names}
    pools = [
        {"group": name, "num_pages": pages} if pages else name
        for name, pages in zip(names, attention, strict=True)
    ]
    stages = [{"group": "p", "attention": pools}]
    instance = {"stages": stages, "enable_prefix_caching": False} | more
    return {"groups": groups, "instances": {"x": instance}, "system": "scatter:Scatter"}


def of_two_devices(sections: dict[str, Any]) -> dict[str, Any]:
    """The same with a first attention group of two devices."""
    sections["groups"]["a0"]["devices"] = 2
    return sections
