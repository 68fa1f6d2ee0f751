"""Splitwise's pools of machines, and the account of the work given to each.

All loads are in tokens. They are derived from the requests given and ended, without asking the
instances.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Literal

from jaxinfer.serving.views import InstanceView

Role = Literal["prompt", "token"]
# By machine, a request's tokens that its prefix cache has.
Cached = Callable[[str], int]
ReturnWhen = Literal["opposite_done", "idle"]
_PENDING, _PROMISED = attrgetter("pending"), attrgetter("promised")
# Number of moves between pools kept for the report, the first ones of a run.
REPORTED = 2**15


def _none(machine: str) -> int:
    return 0


@dataclass(slots=True, eq=False)
class Machine:
    """An instance, and the work that it was given.

    Attributes:
        role: the pool that the machine belongs to and returns to.
        pending: number of assigned prompt tokens that are not done, plus one for each assigned
            decode.
        decodes: number of assigned decodes.
        promised: KV entries of all assigned requests at their longest.
        is_mixed: whether the machine is in the mixed pool.
    """

    name: str
    role: Role
    pending: int = 0
    decodes: int = 0
    promised: int = 0
    is_mixed: bool = False

    @property
    def has_others_work(self) -> bool:
        """True if the machine still has work that belongs to the other pool."""
        return self.decodes > 0 if self.role == "prompt" else self.pending > self.decodes


@dataclass(slots=True, eq=False)
class MachineJob:
    """A request's machines: one for its prompt, until that is done, and one for its decodes.

    Attributes:
        entries: KV entries promised to the request: all of its tokens, as the paper counts them,
            which is one more than a pool needs.
        prompt: None once the prompt is done.
        spared: prompt tokens that need not be computed.
    """

    prompt_len: int
    entries: int
    prompt: Machine | None
    token: Machine
    spared: int = 0


@dataclass
class MachinePools:
    """Three pools of machines: for prompts, for decodes, and mixed.

    Args:
        prompts: names of machines for prompts.
        tokens: names of machines for decodes. Without any there are no pairs: each request runs
            whole on the machine with the least pending work.

    Attributes:
        max_pending: tokens that a machine with a queue may have pending.
        return_when: when a mixed machine goes back to its pool.
        jobs: assigned machines, by request.
        moves: for each change of pool, its time, the machine and the new pool.
    """

    prompts: Iterable[str]
    tokens: Iterable[str]
    max_pending: int = 8192
    return_when: ReturnWhen = "opposite_done"
    jobs: dict[str, MachineJob] = field(default_factory=dict)
    moves: list[tuple[float, str, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.prompt = [Machine(name, "prompt") for name in self.prompts]
        self.token = [Machine(name, "token") for name in self.tokens]
        self.mixed: list[Machine] = []
        self._pairs = bool(self.token)
        self._roles = {machine.name: machine.role for machine in self.everyone}
        self._seen = set(self._roles)
        # Requests assigned since queues were last read.
        self._given: Counter[str] = Counter()

    @property
    def everyone(self) -> list[Machine]:
        """All machines that are not lost."""
        return [*self.prompt, *self.mixed, *self.token]

    def look(self, instances: Mapping[str, InstanceView], now: float) -> None:
        """Update the pools: remove lost machines, and add returning ones without load."""
        self._given.clear()
        if instances.keys() == self._seen:
            return
        self._seen = set(instances)
        for pool in (self.prompt, self.mixed, self.token):
            for machine in [machine for machine in pool if machine.name not in instances]:
                pool.remove(machine)
                machine.is_mixed = False
                self._note(now, machine, "lost")
        there = {machine.name for machine in self.everyone}
        for name, role in self._roles.items():
            if name in instances and name not in there:
                self._return(Machine(name, role), now)

    def pair(
        self,
        prompt_len: int,
        entries: int,
        instances: Mapping[str, InstanceView],
        now: float,
        spared: Cached = _none,
        kept: Cached = _none,
    ) -> tuple[Machine, Machine]:
        """Choose one machine for a prompt and one for its decodes, by the shortest queues.

        Each comes from its own pool, or else from the mixed pool, or else from the other pool. If
        that is impossible, the least busy of all machines takes the whole request.

        Args:
            spared: prompt tokens that a machine need not compute, counted off its queue.
            kept: tokens whose KV need not be sent to a machine, counted off its KV.
        """
        prompt = self._for_prompt(self.prompt, prompt_len, instances, spared)
        prompt = prompt or self._for_prompt(self.mixed, prompt_len, instances, spared)
        token = self._for_decodes(entries, instances, kept)
        if not self._pairs or not (prompt or self.token) or not (token or self.prompt):
            prompt = token = min(self.everyone, key=lambda each: each.pending - spared(each.name))
        if prompt is None:
            prompt = self._mix(self.token, min(self.token, key=_PENDING), now)
        if token is None:
            token = self._mix(self.prompt, min(self.prompt, key=_PROMISED), now)
        return prompt, token

    def for_decodes(
        self,
        entries: int,
        instances: Mapping[str, InstanceView],
        now: float,
        kept: Cached = _none,
    ) -> Machine:
        """Choose a machine for the decodes of a request whose prompt is done."""
        token = self._for_decodes(entries, instances, kept)
        if token is None and self._pairs and self.prompt:
            token = self._mix(self.prompt, min(self.prompt, key=_PROMISED), now)
        return token or min(self.everyone, key=_PENDING)

    def _for_prompt(
        self,
        pool: Sequence[Machine],
        prompt_len: int,
        instances: Mapping[str, InstanceView],
        spared: Cached,
    ) -> Machine | None:
        if not pool:
            return None
        best = min(pool, key=lambda each: each.pending - spared(each.name))
        if best.pending + prompt_len - spared(best.name) <= self.max_pending:
            return best
        queued = self._given[best.name] or len(instances[best.name].waiting)
        return None if queued else best

    def _for_decodes(
        self, entries: int, instances: Mapping[str, InstanceView], kept: Cached
    ) -> Machine | None:
        for pool in (self.token, self.mixed):
            if pool:
                best = min(pool, key=lambda each: each.promised - kept(each.name))
                view = instances[best.name]
                if best.promised + entries < view.num_pages * view.page_size:
                    return best
        return None

    def give(self, request: str, job: MachineJob) -> None:
        """Add a request to the accounts of its machines."""
        self.jobs[request] = job
        if job.prompt:
            job.prompt.pending += job.prompt_len - job.spared
            self._given[job.prompt.name] += 1
            if job.prompt is not job.token:
                job.prompt.promised += job.prompt_len
        job.token.pending += 1
        job.token.decodes += 1
        job.token.promised += job.entries

    def prompt_done(self, request: str, instances: Mapping[str, InstanceView], now: float) -> None:
        """Record that a request's prompt has been computed or given up."""
        job = self.jobs[request]
        machine, job.prompt = job.prompt, None
        if machine:
            machine.pending -= job.prompt_len - job.spared
            if machine is not job.token:
                machine.promised -= job.prompt_len
            self._settle(machine, instances, now)

    def take_back(self, request: str, instances: Mapping[str, InstanceView], now: float) -> None:
        """Stop counting a request that has ended or will be assigned again."""
        if request in self.jobs:
            self.prompt_done(request, instances, now)
            job = self.jobs.pop(request)
            job.token.pending -= 1
            job.token.decodes -= 1
            job.token.promised -= job.entries
            self._settle(job.token, instances, now)

    def _mix(self, pool: list[Machine], machine: Machine, now: float) -> Machine:
        pool.remove(machine)
        self.mixed.append(machine)
        machine.is_mixed = True
        self._note(now, machine, "mixed")
        return machine

    def _settle(self, machine: Machine, instances: Mapping[str, InstanceView], now: float) -> None:
        """Return a mixed machine to the end of its pool, if it may leave."""
        if not machine.is_mixed or machine.name not in instances:
            return
        if self.return_when == "idle":
            stays = instances[machine.name].num_requests > 0
        else:
            stays = machine.has_others_work
        if not stays:
            self._return(machine, now)

    def _return(self, machine: Machine, now: float) -> None:
        if machine in self.mixed:
            self.mixed.remove(machine)
        (self.prompt if machine.role == "prompt" else self.token).append(machine)
        machine.is_mixed = False
        self._note(now, machine, machine.role)

    def _note(self, now: float, machine: Machine, where: str) -> None:
        if len(self.moves) < REPORTED:
            self.moves.append((now, machine.name, where))
