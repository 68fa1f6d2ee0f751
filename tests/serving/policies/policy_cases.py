"""Runs of instances by named policies."""

from collections.abc import Sequence
from itertools import count
from typing import Any

from scenarios import Follow, Scenario
from serving_checks import Outcome, make_kv, make_requests, new_instance

from jaxinfer.serving.instance_options import InstanceOptions
from jaxinfer.serving.policies import PolicyOptions, make_policies
from jaxinfer.serving.views import Leg


def serve(
    scenario: Scenario, chosen: PolicyOptions, predicted: Sequence[tuple[int, int] | None] = ()
) -> Outcome:
    run = scenario.run(Follow(scenario.by_id), lambda: make_policies(chosen))
    for request, both in zip(run.requests, predicted, strict=False):
        request.predicted = both
    outcome = run.verify()
    assert not any(request.error for request in outcome.finished.values())
    budgets = {i.name: i.options.max_num_batched_tokens for i in run.instances}
    for batch in outcome.world.batches:
        assert sum(row.count for row in batch.rows) <= budgets[batch.instance]
    return outcome


# By hand: one instance, steps committed at once.


class Instant:
    """Requests on one instance, whose steps end as soon as they are formed."""

    def __init__(
        self, pages: int = 100, size: int = 1, grouped: bool = False, **options: Any
    ) -> None:
        limits: dict[str, Any] = {
            "max_num_batched_tokens": 100,
            "max_num_seqs": 8,
            "watermark": 0.0,
            "max_in_flight": 2,
            "launch_ahead": True,
        }
        given = {name: options.pop(name) for name in list(options) if name in limits}
        policies = make_policies(PolicyOptions(**options))
        opts = InstanceOptions(**(limits | given))
        kv = make_kv(pages, size)
        self.instance = new_instance("A", kv, opts, policies, groups_decodes=grouped)
        self._numbers = count()

    def add(self, *lengths: tuple[int, int], predicted: tuple[int, int] | None = None) -> None:
        for request in make_requests(lengths):
            request.id = f"r{next(self._numbers)}"
            request.legs = [Leg("A")]
            request.predicted = predicted
            self.instance.waiting.append(request)

    def step(self) -> dict[str, int]:
        """Tokens computed of each request."""
        batch = self.instance.next_batch()
        if not batch:
            return {}
        self.instance.in_flight -= 1
        for row in batch.rows:
            request = row.request
            row.hold.unpin()
            request.computed = row.start + row.count
            if row.samples:
                request.pending -= 1
                request.output_token_ids.append(0)
            if len(request.output_token_ids) == request.max_tokens:
                self.instance.remove(request)
                assert request.hold
                request.hold.release()
        return {row.request.id: row.count for row in batch.rows}
