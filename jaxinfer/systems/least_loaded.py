"""Whole requests on the least loaded of equal instances, as load balancers do."""

import random
from collections import Counter
from collections.abc import Collection, Sequence
from typing import Literal

from jaxinfer.options.validation import OptionError, Options
from jaxinfer.serving.system import Assignment, System
from jaxinfer.serving.views import ClusterView, InstanceView, Leg, RequestView
from jaxinfer.systems.instances import least_loaded, num_requests


class LeastLoadedOptions(Options):
    """Options of ``LeastLoaded``.

    Attributes:
        choose: How an instance is chosen: the least loaded of all, the less loaded of two random
            ones, or each in turn.
        load: Load of an instance: its number of ``requests``, or the sum of its prompt tokens to
            compute and its KV entries (``tokens``).
        seed: Seed of the random choices.
    """

    choose: Literal["join_shortest_queue", "power_of_two", "round_robin"] = "join_shortest_queue"
    load: Literal["requests", "tokens"] = "requests"
    seed: int = 0

    def model_post_init(self, context: object, /) -> None:
        """Refuse options that have no effect."""
        given = self.model_fields_set
        if "load" in given and self.choose == "round_robin":
            raise OptionError("load: round_robin goes by none; leave it out")
        if "seed" in given and self.choose != "power_of_two":
            raise OptionError(f"seed: {self.choose} draws nothing; leave it out")


def num_tokens(instance: InstanceView) -> int:
    """Return an instance's load: the sum of its prompt tokens to compute and its KV entries."""
    return instance.prompt_tokens_left + instance.kv_entries


class LeastLoaded(System):
    """Runs each request whole on the least loaded instance, chosen on arrival; ties go by order."""

    Options = LeastLoadedOptions
    options: LeastLoadedOptions

    def __init__(self, options: LeastLoadedOptions) -> None:
        super().__init__(options)
        self._rng = random.Random(options.seed)
        self._turn = 0

    def routes(self, instances: Collection[str]) -> Collection[tuple[str, str]]:
        """Return no routes: KV stays where it is."""
        return ()

    def route(self, waiting: Collection[RequestView], cluster: ClusterView) -> Sequence[Assignment]:
        """Assign all waiting requests; each one counts as load for those after it."""
        names = list(cluster.instances)
        tokens = self.options.load == "tokens"
        load = num_tokens if tokens else num_requests
        given: Counter[str] = Counter()
        assignments = []
        for request in waiting:
            name = least_loaded(self._candidates(names), cluster, given, load)
            given[name] += request.prompt_len if tokens else 1
            assignments.append(Assignment(request.id, (Leg(name),)))
        return assignments

    def _candidates(self, names: Sequence[str]) -> Sequence[str]:
        match self.options.choose:
            case "join_shortest_queue":
                return names
            case "power_of_two":
                drawn = self._rng.sample(range(len(names)), min(2, len(names)))
                return [names[number] for number in sorted(drawn)]
            case "round_robin":
                self._turn += 1
                return [names[(self._turn - 1) % len(names)]]
