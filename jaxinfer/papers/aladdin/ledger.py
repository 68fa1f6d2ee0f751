"""Aladdin's accounts: which requests each worker has, and how wrong their predictions are."""

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence

from jaxinfer.errors import JaxinferError
from jaxinfer.papers.aladdin.best_fit import Job, Limits, Seen, WorkerAccount, takes
from jaxinfer.papers.aladdin.length_history import History
from jaxinfer.papers.aladdin.rebalance import Errors, rebalance
from jaxinfer.serving.views import ClusterView, InstanceView, RequestView
from jaxinfer.systems.instances import capacity, most_entries


def limits_of(
    instance: InstanceView, ttft_s: float, atgt_s: float, theta: float, gamma: float
) -> Limits:
    """Return a worker's limits, given the fits of its step times.

    Raises:
        JaxinferError: each iteration takes too long, or step times are not known.
    """
    name, fit = instance.name, instance.fit
    if fit is None or fit.decode is None:
        raise JaxinferError(
            f"instance {name!r} has no fit of its decodes: max_num_seqs must be 2 or more, and 16 "
            "where steps are measured"
        )
    if atgt_s <= fit.decode.constant:
        raise JaxinferError(
            f"atgt_s is {atgt_s:g}, must be above the {fit.decode.constant:.4g} s that an "
            f"iteration of instance {name!r} takes, however few decode"
        )
    targets = ttft_s, atgt_s, theta, gamma
    return Limits(fit.prefill, fit.decode, *targets, capacity(instance), instance.page_size)


class WorkerLedger:
    """The accounts of all workers, by name.

    Args:
        limits: returns the limits of an instance.
        grant_gap: whether a decoding request has also saved the gap that has begun: as the paper
            prints (d), it has its target for each token, including the first.
        usd: returns the dollars per hour of a worker, given its name.
    """

    def __init__(
        self,
        limits: Callable[[InstanceView], Limits],
        grant_gap: bool,
        usd: Callable[[str], float],
    ) -> None:
        self._limits, self._not_granted, self._usd = limits, int(not grant_gap), usd
        self._history = History()
        self._workers: dict[str, WorkerAccount] = {}
        self._where: dict[str, WorkerAccount] = {}
        # For each worker, requests that ended early: the time until which they would have run, and
        # their KV entries.
        self._early: defaultdict[str, list[tuple[float, int]]] = defaultdict(list)
        # Requests given in this call.
        self._given: Counter[str] = Counter()
        self._slack: dict[str, float] = {}

    def look(self, cluster: ClusterView, *names: Sequence[str]) -> tuple[list[WorkerAccount], ...]:
        """Return lists of workers in their present state; close the accounts of lost workers."""
        self._cluster = cluster
        self._given.clear()
        self._slack.clear()
        for name in self._workers.keys() - cluster.instances.keys():
            for request in self._workers.pop(name).jobs:
                del self._where[request]
            self._early.pop(name, None)
        return tuple([self._worker(name) for name in some] for some in names)

    def _worker(self, name: str) -> WorkerAccount:
        if name not in self._workers:
            limits = self._limits(self._cluster.instances[name])
            self._workers[name] = WorkerAccount(name, limits, self._cluster.now, self._usd(name))
        return self._workers[name]

    def job(self, request: RequestView, prefills: bool) -> Job:
        """Return the job of a request that is to be placed, with a fresh prediction."""
        done = request.num_known - request.prompt_len
        expected = self._expected(request, done)
        longest = most_entries(request)
        return Job(request.id, request.prompt_len, longest, expected, expected, done, prefills)

    def _expected(self, request: RequestView, done: int) -> int:
        """Return the expected output tokens: the first prediction not yet exceeded, or
        the limit.
        """
        if request.predicted:
            low, high = request.predicted
            guesses = [(low + high) // 2, high]
        else:
            guesses = [self._history.mean(request.prompt_len) or 0]
        found = next((guess for guess in guesses if guess > done), None)
        found = found or self._history.mean_above(request.prompt_len, done)
        return min(found or request.max_tokens, request.max_tokens)

    def give(self, job: Job, worker: WorkerAccount) -> None:
        """Add a request to its worker's account."""
        worker.give(job)
        self._where[job.id] = worker
        if job.prefills:
            self._given[worker.name] += job.prompt

    def take_back(self, request: str) -> tuple[WorkerAccount, Job] | None:
        """Take back a request that is placed again or has ended; None if no worker has it."""
        worker = self._where.pop(request, None)
        job = worker and worker.take_back(request)
        return (worker, job) if worker and job else None

    def ended(self, request: RequestView, now: float) -> None:
        """Record an answer's length; an early end counts as an error until the predicted end."""
        output = request.num_known - request.prompt_len
        if output:
            self._history.add(request.prompt_len, output)
        if found := self.take_back(request.id):
            worker, job = found
            worker.empty_since = now
            until = now + (job.expected - output) * worker.limits.atgt_s
            early = [*self._early[worker.name], (until, job.prompt + output)]
            self._early[worker.name] = [each for each in early if each[0] > now]

    def see(self, worker: WorkerAccount) -> Seen:
        """Read a worker's state, once per call, and update the output tokens of its requests."""
        instance = self._cluster.instances[worker.name]
        if worker.name not in self._slack:
            self._slack[worker.name] = self._least_slack(worker, instance)
        tokens = instance.prompt_tokens_left + self._given[worker.name]
        return Seen(tokens, self._slack[worker.name])

    def _least_slack(self, worker: WorkerAccount, instance: InstanceView) -> float:
        least, now, target = math.inf, self._cluster.now, worker.limits.atgt_s
        there = dict(instance.running) | dict(instance.importing)
        there |= {request.id: request for request in instance.waiting}
        for name, job in worker.jobs.items():
            if (request := there.get(name)) is None:
                continue  # It was given in this call.
            done = request.num_known - job.prompt
            if done >= job.expected:
                worker.update(job, done, self._expected(request, done))
            elif done != job.done:
                worker.update(job, done, job.expected)
            if (first := request.first_token_at) is not None:
                least = min(least, target * (done - self._not_granted) - (now - first))
        return least

    def errors(self, worker: WorkerAccount) -> Errors:
        """Return the errors of a worker's predictions since the last look.

        An answer that exceeds its prediction counts with its prompt and its remaining tokens. One
        that ended early counts negatively, with its entries, until its predicted end.
        """
        now = self._cluster.now
        longer = [job for job in worker.jobs.values() if job.expected > job.predicted]
        shorter = [each for each in self._early[worker.name] if each[0] > now]
        tokens = sum(job.prompt + job.expected - job.done for job in longer)
        tokens -= sum(entries for _, entries in shorter)
        return Errors(worker.limits.decode, tokens, len(longer) - len(shorter))

    def rebalance(self, workers: Sequence[WorkerAccount]) -> dict[str, str]:
        """Move requests that have not started, and return each one's new worker."""
        by_name = {worker.name: worker for worker in workers}
        for worker in workers:
            self.see(worker)
        moves: dict[str, str] = {}

        def move(request: str, source: str, dest: str) -> bool:
            job = by_name[source].jobs[request]
            if not takes(by_name[dest], job, self.see):
                return False
            self.take_back(request)
            self.give(job, by_name[dest])
            moves[request] = dest
            return True

        errors = {worker.name: self.errors(worker) for worker in workers}
        rebalance(errors, {worker.name: self._unstarted(worker) for worker in workers}, move)
        return moves

    def _unstarted(self, worker: WorkerAccount) -> dict[str, int]:
        """Return requests that wait for their first step there, and their possible
        output tokens.
        """
        waiting = self._cluster.instances[worker.name].waiting
        return {
            request.id: worker.jobs[request.id].expected
            for request in waiting
            if request.held_by or request.first_token_at is None
        }
