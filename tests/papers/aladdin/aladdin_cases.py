"""Workers placed by Aladdin, whose books are checked as it runs."""

import math
from collections.abc import Sequence
from typing import Any

from fake_world import Timing
from serving_checks import Outcome, Run, make_kv, make_requests, new_instance

from jaxinfer.papers.aladdin.best_fit import Job, WorkerAccount
from jaxinfer.papers.aladdin.system import Aladdin, AladdinOptions
from jaxinfer.serving.instance import Instance
from jaxinfer.serving.instance_options import InstanceOptions
from jaxinfer.serving.policies import PolicyOptions, make_policies
from jaxinfer.serving.request_state import RequestState
from jaxinfer.serving.step_fit import DecodeFit, MixedFit, PrefillFit, StepFit

# In binary fractions: sums in any order are equal.
FIT = StepFit(PrefillFit(1 / 4, 1.0), MixedFit(0.0, 0.0, 1.0), DecodeFit(1 / 64, 1 / 8, 1 / 2))


POLICIES = PolicyOptions(batching="prefill_first")


def make(kind: type[Aladdin] = Aladdin, **options: Any) -> Aladdin:
    usual = {"ttft_s": 8.0, "atgt_s": 2.0, "theta": 0.75}
    return kind(AladdinOptions.model_validate(usual | options))


def instance(name: str, pages: int = 100, fit: StepFit | None = FIT, role: str = "") -> Instance:
    options = InstanceOptions(max_num_batched_tokens=16, watermark=0.0)
    kv = make_kv(pages, 1)
    return new_instance(name, kv, options, make_policies(POLICIES), fit=fit, role=role)


def serve(
    system: Aladdin, pool: Sequence[Instance], requests: Sequence[RequestState], **more: Any
) -> Outcome:
    timing = more.pop("timing", None) or Timing(in_order=True)
    return Run(system, pool, requests, timing, greedy=False, **more).verify()


def where(outcome: Outcome, count: int) -> list[str]:
    return [outcome.route_of(f"r{i}")[-1][0] for i in range(count)]


class Checked(Aladdin):
    """Recomputes every placement from the views alone, and the books with it."""

    def __init__(self, options: AladdinOptions) -> None:
        super().__init__(options)
        self.packed = self.waited = 0

    def route(self, waiting: Any, cluster: Any) -> Any:
        self.cluster, self.given = cluster, {}
        return super().route(waiting, cluster)

    def naive(self, worker: WorkerAccount, job: Job) -> bool:
        """(b) to (e) of a worker with one request more."""
        view, of, size = self.cluster.instances[worker.name], worker.limits, worker.limits.page_size
        there: dict[str, Any] = {r.id: r for r in view.waiting}
        there |= view.running
        there |= view.importing
        given = {id: each for id, each in self.given.items() if each[0] == worker.name}
        assert worker.jobs.keys() == there.keys() | given.keys()
        assert not there.keys() & given.keys()
        context, held = job.prompt + of.gamma * job.output, []
        prompts, slack = job.prompt, math.inf
        for id, each in worker.jobs.items():
            request = there.get(id)
            done = request.num_known - request.prompt_len if request else each.done
            assert each.expected > done  # It still runs.
            context += each.prompt + of.gamma * each.expected
            held.append((each.prompt + done + size - 1, each.expected - done))
            if request is None:
                prompts += each.prompt
                continue
            prompts += max(each.prompt - request.computed, 0)
            if (first := request.first_token_at) is not None:
                tokens = done if self.options.grant_gap else done - 1
                slack = min(slack, of.atgt_s * tokens - (self.cluster.now - first))
        held.append((job.prompt + job.done + size - 1, job.expected - job.done))
        reach = max(left for _, left in held)
        peak = max(
            sum(now + step for now, left in held if step <= left) for step in range(reach + 1)
        )
        fit, count = of.decode, len(worker.jobs) + 1
        most = (of.atgt_s - fit.constant - fit.per_sequence * count) / fit.per_context
        seconds = of.prefill.per_token * prompts + of.prefill.constant
        in_time = seconds <= of.ttft_s and seconds <= of.theta * slack
        return (
            context <= of.theta * most
            and (in_time or not job.prefills)
            and peak <= of.room
            and job.longest <= of.room
        )

    def _worker(self, job: Job, late: float, on: Any, off: Any) -> WorkerAccount | None:
        norms = {worker.name: worker.norm for worker in on}
        worker = super()._worker(job, late, on, off)
        if worker:
            assert worker.take_back(job.id) is job  # To look at it as it was.
        taking = [each for each in on if (self.placed.see(each), self.naive(each, job))[1]]
        if worker:
            worker.give(job)
            self.given[job.id] = worker.name, job
        if taking:
            assert worker in taking
            # The fullest as it was known, of those that have room; so an empty one comes last.
            assert norms[worker.name] == max(norms[each.name] for each in taking)
            self.packed += 1
        elif worker is None:
            self.waited += 1
        return worker


# Heartbeats.


def burst() -> list[RequestState]:
    """Arrivals now and then, six at once, and again now and then."""
    times = [0.0, 20.0, *[40.0] * 6, 80.0, 110.0]
    return make_requests([(8, 4)] * len(times), times)
