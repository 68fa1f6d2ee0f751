"""A worker's room, and the choice of a worker for a request (Aladdin, section 4.2).

Letters of constraints and numbers of equations are the paper's.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from jaxinfer.serving.admission import peak_entries
from jaxinfer.serving.step_fit import DecodeFit, PrefillFit


@dataclass(frozen=True)
class Limits:
    """A worker's targets, its pool, and its step times.

    Attributes:
        prefill: eq. 2.
        decode: eq. 3.
        ttft_s: target in seconds for a request's first token.
        atgt_s: target in seconds for the mean time of each further token.
        theta: share of the limits of (b) and (d) that may be used.
        gamma: share of a request's output tokens that counts in (b); with 0, the first iteration
            must meet the target, with 1 the last one.
        room: KV entries of the whole pool.
        page_size: KV entries of a page.
    """

    prefill: PrefillFit
    decode: DecodeFit
    ttft_s: float
    atgt_s: float
    theta: float
    gamma: float
    room: int
    page_size: int = 1

    def most_context(self, batch: int) -> float:
        """Return the KV entries at which ``batch`` decodes take ``atgt_s`` per step (eq. 4)."""
        left = self.atgt_s - self.decode.constant - self.decode.per_sequence * batch
        if self.decode.per_context > 0:
            return left / self.decode.per_context
        return math.copysign(math.inf, left)


@dataclass(slots=True, eq=False)
class Job:
    """A request that was given to a worker. All counts are in tokens.

    Attributes:
        longest: largest number of KV entries, by its token limit.
        predicted: output tokens predicted when the request was placed.
        expected: output tokens expected now.
        done: output tokens when the worker was last looked at.
        prefills: whether the worker also computes its prompt; if not, (c) and (d) do not apply.
    """

    id: str
    prompt: int
    longest: int
    predicted: int
    expected: int
    done: int = 0
    prefills: bool = True

    @property
    def output(self) -> int:
        """Number of output tokens to count: those expected, or those done if they are more."""
        return max(self.expected, self.done)

    def entries(self, page_size: int) -> tuple[int, int]:
        """Return the present KV entries, as if the last page were full, and those still to come."""
        return self.prompt + self.done + page_size - 1, max(self.expected - self.done, 0)


@dataclass(frozen=True)
class Seen:
    """The state of a worker's requests that only the worker itself knows.

    Attributes:
        prompt_tokens: number of prompt tokens still to be computed.
        slack_s: least time that a decoding request has saved relative to its target.
    """

    prompt_tokens: int = 0
    slack_s: float = math.inf


@dataclass(slots=True, eq=False)
class WorkerAccount:
    """An instance, and an account of the requests given to it.

    Attributes:
        empty_since: time in seconds; valid while ``jobs`` is empty.
        usd: dollars per hour; without prices, all workers cost the same.
    """

    name: str
    limits: Limits
    empty_since: float = 0.0
    usd: float = 1.0
    jobs: dict[str, Job] = field(default_factory=dict)
    _prompts: int = 0
    _outputs: int = 0

    def give(self, job: Job) -> None:
        """Add a request to the account."""
        self.jobs[job.id] = job
        self._prompts += job.prompt
        self._outputs += job.output

    def take_back(self, request: str) -> Job | None:
        """Remove a request that has ended or will be placed again; None if it is not here."""
        job = self.jobs.pop(request, None)
        if job:
            self._prompts -= job.prompt
            self._outputs -= job.output
        return job

    def update(self, job: Job, done: int, expected: int) -> None:
        """Record a request's output tokens so far, and the total number expected."""
        self._outputs -= job.output
        job.done, job.expected = done, expected
        self._outputs += job.output

    @property
    def context(self) -> float:
        """KV entries that the worker's requests are counted with: the left side of (b)."""
        return self._prompts + self.limits.gamma * self._outputs

    @property
    def norm(self) -> float:
        """Load of the worker: length of the vector (batch, context), as in the paper."""
        return math.hypot(len(self.jobs), self.context)

    @property
    def seconds(self) -> float:
        """Seconds of an iteration with all of the worker's requests (eq. 3)."""
        return self.limits.decode.seconds(self.context, len(self.jobs))

    def usd_of(self, job: Job) -> float:
        """Return a request's dollars per hour: its share of the free context (b) or room (e)."""
        limits, decode = self.limits, self.limits.decode
        context = job.prompt + limits.gamma * job.output
        seconds = decode.per_context * context + limits.theta * decode.per_sequence
        of_time = seconds / (limits.theta * (limits.atgt_s - decode.constant))
        return self.usd * max(of_time, sum(job.entries(limits.page_size)) / limits.room)

    def decodes_in_time(self, job: Job) -> bool:
        """Tell whether (b) holds: with one more request, iterations are still short enough."""
        limits = self.limits
        context = self.context + job.prompt + limits.gamma * job.output
        return context <= limits.theta * limits.most_context(len(self.jobs) + 1)

    def prefills_in_time(self, job: Job, seen: Seen) -> bool:
        """Tell whether (c) and (d) hold: the prompt is in time, and uses time that others saved."""
        limits = self.limits
        if not job.prefills:
            return True
        seconds = limits.prefill.seconds(seen.prompt_tokens + job.prompt)
        return seconds <= limits.ttft_s and seconds <= limits.theta * seen.slack_s

    def has_room(self, job: Job) -> bool:
        """Tell whether (e) holds: KV entries suffice for all, and for this request at its limit."""
        room, size = self.limits.room, self.limits.page_size
        entries = [each.entries(size) for each in (*self.jobs.values(), job)]
        return peak_entries(entries) <= room and job.longest <= room


def takes(worker: WorkerAccount, job: Job, see: Callable[[WorkerAccount], Seen]) -> bool:
    """Tell whether a worker has room for a request, by (b) to (e).

    Args:
        see: looks at a worker, and updates the output tokens of its requests. Their number never
            shrinks, so a worker without room by (b) need not be looked at.
    """
    if not worker.decodes_in_time(job):
        return False
    seen = see(worker)
    in_time = worker.decodes_in_time(job) and worker.prefills_in_time(job, seen)
    return in_time and worker.has_room(job)


def best_fit(
    workers: Iterable[WorkerAccount], job: Job, see: Callable[[WorkerAccount], Seen]
) -> WorkerAccount | None:
    """Algorithm 1: choose the fullest worker with room; of empty ones, the cheapest for the
    request.

    Args:
        see: see ``takes``.
    """

    def order(worker: WorkerAccount) -> tuple[float, float]:
        return -worker.norm, 0.0 if worker.jobs else worker.usd_of(job)

    return next((each for each in sorted(workers, key=order) if takes(each, job, see)), None)


def fits_alone(job: Job, workers: Iterable[WorkerAccount], late: float = 0.0) -> bool:
    """Tell whether any of these workers, if empty, could take a request and meet its target.

    Args:
        late: seconds that the request has waited.
    """
    return any(
        takes(WorkerAccount("", limits), job, lambda _: Seen())
        and (not job.prefills or late + limits.prefill.seconds(job.prompt) <= limits.ttft_s)
        for limits in {worker.limits for worker in workers}
    )


def to_open(
    jobs: Iterable[Job],
    workers: Sequence[WorkerAccount],
    off: Sequence[WorkerAccount],
    see: Callable[[WorkerAccount], Seen],
) -> list[str]:
    """Return the names of workers that must be switched on for requests that fit nowhere else.

    Each such request gets the worker on which its share costs the least. A request that does not
    fit on an empty worker gets one only if no worker is on.
    """
    opened: dict[str, WorkerAccount] = {}

    def see_opened(worker: WorkerAccount) -> Seen:
        return Seen(sum(job.prompt for job in worker.jobs.values()))

    for job in jobs:
        if any(takes(worker, job, see) for worker in workers):
            continue
        worker = next((each for each in opened.values() if takes(each, job, see_opened)), None)
        if worker is None:
            left = [each for each in off if each.name not in opened]
            able = [each for each in left if fits_alone(job, [each])]
            if not able and not workers and not opened:
                able = left
            if able:
                worker = min(able, key=lambda each: each.usd_of(job))
                worker = opened[worker.name] = WorkerAccount(worker.name, worker.limits)
        if worker:
            worker.give(job)
    return list(opened)
