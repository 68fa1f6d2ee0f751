"""Unlike workers opened for given requests: Aladdin's rule compared with the best packing."""

from collections.abc import Sequence

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp

from jaxinfer.papers.aladdin.best_fit import Job, Seen, WorkerAccount, best_fit, takes, to_open


def see(worker: WorkerAccount) -> Seen:
    """Return a worker's load, with all prompts still to compute and no decodes."""
    return Seen(sum(job.prompt for job in worker.jobs.values()))


def empty(worker: WorkerAccount) -> WorkerAccount:
    """Return the worker without its requests."""
    return WorkerAccount(worker.name, worker.limits, usd=worker.usd)


def by_rule(jobs: Sequence[Job], off: Sequence[WorkerAccount]) -> float | None:
    """Return the dollars per hour if requests arrive one by one; None if one fits nowhere.

    Args:
        off: workers that can be opened, all empty.
    """
    opened: list[WorkerAccount] = []
    for job in jobs:
        worker = best_fit(opened, job, see)
        if worker is None:
            names = {each.name for each in opened}
            left = [empty(each) for each in off if each.name not in names]
            first = next(iter(to_open([job], opened, left, see)), None)
            worker = next((each for each in left if each.name == first), None)
            if worker is None or not takes(worker, job, see):
                return None
            opened.append(worker)
        worker.give(job)
    return sum(each.usd for each in opened)


def in_order(jobs: Sequence[Job], off: Sequence[WorkerAccount]) -> float | None:
    """Return the dollars per hour by first fit.

    Workers are opened in their order, whatever they cost.
    """
    opened: list[WorkerAccount] = []
    left = [empty(each) for each in off]
    for job in jobs:
        while (worker := next((each for each in opened if takes(each, job, see)), None)) is None:
            if not left:
                return None
            opened.append(left.pop(0))
        worker.give(job)
    return sum(each.usd for each in opened if each.jobs)


def least_usd(jobs: Sequence[Job], workers: Sequence[WorkerAccount]) -> float | None:
    """Return the dollars per hour of the best packing by an integer program; None if none exists.

    The binary variables are whether request j is on worker i, and whether worker i is open.
    Constraints (b), (c) and (e) are linear in these. Constraint (d) limits nothing while no request
    decodes.
    """
    count, jobs = len(jobs), list(jobs)
    size = len(workers) * (count + 1)  # For each worker, all requests, and then whether it is open.
    rows, upper = [], []

    def at_most(number: int, each: Sequence[float], most: float) -> None:
        row = np.zeros(size)
        start = number * (count + 1)
        row[start : start + count] = each
        row[start + count] = -most
        rows.append(row)
        upper.append(0.0)

    for number, worker in enumerate(workers):
        of = worker.limits
        decode, prefill = of.decode, of.prefill
        seconds = [
            decode.per_context * (job.prompt + of.gamma * job.output)
            + of.theta * decode.per_sequence
            for job in jobs
        ]
        at_most(number, seconds, of.theta * (of.atgt_s - decode.constant))  # (b)
        prompts = [prefill.per_token * job.prompt for job in jobs]
        at_most(number, prompts, of.ttft_s - prefill.constant)  # (c)
        entries = [job.entries(of.page_size) for job in jobs]
        for step in {left for _, left in entries}:  # (e): peaks are where a request ends.
            held = [now + step if step <= left else 0 for now, left in entries]
            at_most(number, held, of.room)
        at_most(number, [float(job.longest > of.room) for job in jobs], 0.0)
        at_most(number, [1.0] * count, count)  # A closed worker has no requests.
    once = np.zeros((count, size))
    for j in range(count):
        once[j, j :: count + 1] = 1
    cost = np.zeros(size)
    cost[count :: count + 1] = [worker.usd for worker in workers]
    found = milp(
        cost,
        integrality=np.ones(size),
        bounds=Bounds(0, 1),
        constraints=[LinearConstraint(np.array(rows), ub=upper), LinearConstraint(once, 1, 1)],
    )
    return None if found.x is None else float(found.fun)
