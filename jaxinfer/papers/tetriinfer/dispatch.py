"""Chooses a decode instance by a request's predicted length, and keeps accounts for the choice."""

import random
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from jaxinfer.serving.views import InstanceView, RequestView
from jaxinfer.systems.instances import capacity

Dispatch = Literal["two_choices", "ratio", "random", "imbalance"]


def least_output(request: RequestView) -> int:
    """Return the smallest predicted number of output tokens; without a prediction, the limit."""
    if request.predicted is None:
        return request.max_tokens
    return min(request.predicted[0], request.max_tokens)


@dataclass(slots=True)
class DecodeLoad:
    """The work of a decode instance at its last report.

    Attributes:
        room: number of KV entries in free pages not promised to a request.
        heavy: number of heavy requests that the instance has and that have not ended.
        light: number of light requests that the instance has and that have not ended.
    """

    room: int = 0
    heavy: int = 0
    light: int = 0

    def alike(self, heavy: bool) -> tuple[int, int]:
        """Return the number of heavy requests, or of light ones, and the number of both."""
        return self.heavy if heavy else self.light, self.heavy + self.light

    @property
    def ratio(self) -> float:
        """Ratio of heavy to light requests."""
        if self.light:
            return self.heavy / self.light
        return float("inf") if self.heavy else 0.0

    def give(self, entries: int, heavy: bool, count: int = 1) -> None:
        """Count a request that is sent to the instance; with ``count`` -1, one that has ended."""
        self.room -= count * entries
        if heavy:
            self.heavy += count
        else:
            self.light += count


def choose(
    loads: Mapping[str, DecodeLoad], entries: int, heavy: bool, rule: Dispatch, rng: random.Random
) -> str:
    """Choose one of these instances for a request.

    Two instances are drawn among those with room for it, and ``rule`` picks one of them. If none
    has room, two are drawn among all, and the one with more room is chosen.

    Args:
        entries: least number of KV entries that the request will have.
        heavy: whether it decodes for long.
        rule: picks one of the two. ``two_choices``: the one with fewer requests of this kind, then
            with fewer of both; ``imbalance``: the other one; ``ratio``: the one with the lower
            ratio of heavy to light requests; ``random``: the one drawn first.
    """
    fitting = [name for name, load in loads.items() if load.room >= entries]
    names = fitting or list(loads)
    drawn = rng.sample(names, min(2, len(names)))
    if not fitting:
        return max(drawn, key=lambda name: loads[name].room)
    match rule:
        case "two_choices":
            return min(drawn, key=lambda name: loads[name].alike(heavy))
        case "imbalance":
            return max(drawn, key=lambda name: loads[name].alike(heavy))
        case "ratio":
            return min(drawn, key=lambda name: loads[name].ratio)
        case "random":
            return drawn[0]


class LoadReports:
    """Tracks the requests on each instance: its last report, and what was assigned since.

    Args:
        seed: seed of the draws.

    Attributes:
        reports: loads by instance.
    """

    def __init__(self, seed: int = 0) -> None:
        self._rng = random.Random(seed)
        self.reports: dict[str, DecodeLoad] = {}
        self._promised: dict[str, DecodeLoad] = defaultdict(DecodeLoad)
        self._given: dict[str, tuple[str, int, bool]] = {}

    def report(self, instances: Iterable[InstanceView]) -> None:
        """Replace all reports by new ones."""
        self.reports = {}
        for instance in instances:
            promised = self._promised[instance.name]
            free = instance.num_free_pages * instance.page_size
            room = min(capacity(instance) + promised.room, free)
            self.reports[instance.name] = DecodeLoad(room, promised.heavy, promised.light)

    def place(
        self, request: RequestView, names: Iterable[str], most_light: int, rule: Dispatch
    ) -> str:
        """Choose one of these instances for a request, and record it.

        Args:
            most_light: predicted output tokens above which a request is heavy.
        """
        least = least_output(request)
        entries, heavy = request.prompt_len + least, least > most_light
        loads = {name: self.reports[name] for name in names}
        name = choose(loads, entries, heavy, rule, self._rng)
        self.forget(request.id)
        self._given[request.id] = name, entries, heavy
        for load in (self.reports[name], self._promised[name]):
            load.give(entries, heavy)
        return name

    def forget(self, request: str) -> None:
        """Forget a request that has ended or lost its instance; the next report will show it."""
        if given := self._given.pop(request, None):
            name, entries, heavy = given
            self._promised[name].give(entries, heavy, -1)
