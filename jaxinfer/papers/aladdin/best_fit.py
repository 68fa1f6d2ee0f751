"""Room of a worker, and the worker that takes a request: Aladdin's section 4.2.

Letters of constraints and numbers of equations are the paper's.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from jaxinfer.serving.admission import peak_entries
from jaxinfer.serving.step_fit import DecodeFit, PrefillFit


@dataclass(frozen=True)
class Limits:
    """Targets that a worker is to keep, its pool, and the times of its steps.

    Attributes:
        prefill, decode: eqs. 2 and 3.
        ttft_s, atgt_s: seconds to a request's first token, and in the mean to each further one.
        theta: share of the limits of (b) and (d) that may be used up.
        gamma: share of its output tokens that a request counts with in (b): with 0 the first
            iteration keeps the target, with 1 the last one.
        room: KV entries of the whole pool; ``page_size``: KV entries of a page.
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
        """KV entries of ``batch`` decodes at which an iteration takes ``atgt_s`` (eq. 4)."""
        left = self.atgt_s - self.decode.constant - self.decode.per_sequence * batch
        if self.decode.per_context > 0:
            return left / self.decode.per_context
        return math.copysign(math.inf, left)


@dataclass(slots=True, eq=False)
class Job:
    """A request on a worker. All counts are in tokens.

    Attributes:
        longest: KV entries that it has at most, by its token limit.
        predicted: output tokens predicted when it was placed; ``expected``: output tokens expected
            now.
        done: output tokens when its worker was last looked at.
        prefills: whether the worker computes its prompt, too; else (c) and (d) say nothing.
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
        """Output tokens to count: the expected number, or those done if they are more."""
        return max(self.expected, self.done)

    def entries(self, page_size: int) -> tuple[int, int]:
        """Return KV entries now, as if the last page were full, and those to come."""
        return self.prompt + self.done + page_size - 1, max(self.expected - self.done, 0)


@dataclass(frozen=True)
class Seen:
    """State of a worker's requests that must be read from the worker.

    Attributes:
        prompt_tokens: still to be computed.
        slack_s: the least time that one that decodes has saved, by its target.
    """

    prompt_tokens: int = 0
    slack_s: float = math.inf


@dataclass(slots=True, eq=False)
class WorkerAccount:
    """An instance, and the account of what it was given.

    Attributes:
        empty_since: seconds; holds while ``jobs`` is empty.
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
        """Book a request."""
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
        """Note the output tokens of a request, and the number expected in all."""
        self._outputs -= job.output
        job.done, job.expected = done, expected
        self._outputs += job.output

    @property
    def context(self) -> float:
        """The left side of (b)."""
        return self._prompts + self.limits.gamma * self._outputs

    @property
    def norm(self) -> float:
        """How full the worker is: length of (batch, context), as printed, regardless of units."""
        return math.hypot(len(self.jobs), self.context)

    @property
    def seconds(self) -> float:
        """Time of an iteration of all its requests, in seconds (eq. 3)."""
        return self.limits.decode.seconds(self.context, len(self.jobs))

    def usd_of(self, job: Job) -> float:
        """Dollars per hour of a request's share, of what (b) leaves or of the room of (e)."""
        limits, decode = self.limits, self.limits.decode
        context = job.prompt + limits.gamma * job.output
        seconds = decode.per_context * context + limits.theta * decode.per_sequence
        of_time = seconds / (limits.theta * (limits.atgt_s - decode.constant))
        return self.usd * max(of_time, sum(job.entries(limits.page_size)) / limits.room)

    def decodes_in_time(self, job: Job) -> bool:
        """(b): one more request leaves iterations short enough."""
        limits = self.limits
        context = self.context + job.prompt + limits.gamma * job.output
        return context <= limits.theta * limits.most_context(len(self.jobs) + 1)

    def prefills_in_time(self, job: Job, seen: Seen) -> bool:
        """(c), (d): its prompt, after those that wait, is in time, and in what all have saved."""
        limits = self.limits
        if not job.prefills:
            return True
        seconds = limits.prefill.seconds(seen.prompt_tokens + job.prompt)
        return seconds <= limits.ttft_s and seconds <= limits.theta * seen.slack_s

    def has_room(self, job: Job) -> bool:
        """(e): there are KV entries for all in each iteration to come, and for it by its limit."""
        room, size = self.limits.room, self.limits.page_size
        entries = [each.entries(size) for each in (*self.jobs.values(), job)]
        return peak_entries(entries) <= room and job.longest <= room


def takes(worker: WorkerAccount, job: Job, see: Callable[[WorkerAccount], Seen]) -> bool:
    """True if a worker has room for a request by (b) to (e).

    Args:
        see: looks at a worker, which brings its requests' output tokens up to date. There may be
            more than was known, never fewer: a worker without room by (b) need not be looked at.
    """
    if not worker.decodes_in_time(job):
        return False
    seen = see(worker)
    in_time = worker.decodes_in_time(job) and worker.prefills_in_time(job, seen)
    return in_time and worker.has_room(job)


def best_fit(
    workers: Iterable[WorkerAccount], job: Job, see: Callable[[WorkerAccount], Seen]
) -> WorkerAccount | None:
    """Algorithm 1: the fullest worker that has room; of empty ones, the cheapest for a request.

    Args:
        see: as of ``takes``.
    """

    def order(worker: WorkerAccount) -> tuple[float, float]:
        return -worker.norm, 0.0 if worker.jobs else worker.usd_of(job)

    return next((each for each in sorted(workers, key=order) if takes(each, job, see)), None)


def fits_alone(job: Job, workers: Iterable[WorkerAccount], late: float = 0.0) -> bool:
    """True if one of these would take a request if it had nothing, and it were in time.

    Args:
        late: seconds that it has waited.
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
    """Names of those that are off and that it takes for what fits nowhere else.

    Each time the one that is the cheapest for the request at hand, by its share of it. What does
    not even fit alone takes one where none is there.
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
