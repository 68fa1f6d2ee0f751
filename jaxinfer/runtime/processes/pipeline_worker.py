"""The loop's view of one instance whose parts are in several processes."""

import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from itertools import accumulate, count, pairwise
from typing import Any, TypeVar

from jaxinfer.config.cluster import LinkConfig
from jaxinfer.errors import JaxinferError
from jaxinfer.runtime.kv.channel import EXPLAINED_S
from jaxinfer.runtime.kv.outcome import End, Failed, Launched, Post, ProcessLost
from jaxinfer.runtime.kv.sockets import Address
from jaxinfer.runtime.processes.messages import (
    Borrow,
    BreakOff,
    FollowOn,
    Loaded,
    Measure,
    Moved,
    Prepare,
)
from jaxinfer.runtime.processes.process import Process
from jaxinfer.runtime.processes.remote_worker import RemoteStage, RemoteWorker
from jaxinfer.runtime.spread.slice_move import Copies
from jaxinfer.runtime.stage.sampler import PLAIN_SAMPLER, SamplerShape
from jaxinfer.serving.batch import Batch, Transfer
from jaxinfer.serving.world import StepDone, TransferDone

T = TypeVar("T")


class _Part(RemoteWorker):
    """The stages in one of the processes, or the pools that it lends to stages in others.

    ``on_failure`` is called, in some thread, when the process fails.
    """

    on_failure: Callable[[Exception], None]

    def on_loss(self, error: Exception) -> None:
        """Pass the error to the whole worker, which tells all waiting callers."""
        self.on_failure(error)

    def fail(self, error: Exception) -> None:
        """Report the error to callers that wait for steps, and to later ones."""
        super().on_loss(error)


class PipelineWorker:
    """The stages of one instance in several processes, one after the other; see ``Worker``.

    The loop launches each step in all of them at once. Hidden states go from process to process,
    and the last one has the tokens. Processes of attention and FFN groups receive messages only
    from those of the stages. A failure in any process loses the instance, with one exception: if
    only an attention group's process is lost, and one process has all the stages, the instance can
    ``go_on`` without the lost pools.

    Args:
        loaded: each process with stages and its answer to loading, in pipeline order.
        links: emulated links between consecutive processes.
        lenders: the processes that hold KV heads or compute the FFN for the stages.

    Attributes:
        parts: numbers of the stages, grouped by consecutive stages on one mesh.
        sampler: the sampler that was requested last.
        lends: groups whose processes lent parts at the start.
        without: numbers of the KV shards that were lost and that the instance continues without.
        coming: new processes that will lend pools in place of lost ones, by group.
        given_up: whether the instance and its processes are lost.
    """

    def __init__(
        self,
        instance: str,
        loaded: Sequence[tuple[Process, Loaded]],
        links: Sequence[LinkConfig | None],
        lenders: Sequence[Process] = (),
    ) -> None:
        self.instance = instance
        self.sampler = PLAIN_SAMPLER
        plans = [there.plans[instance] for _, there in loaded]
        self._first = [0, *accumulate(map(len, plans))]
        shards = [sum(len(plan.pool_pages) for plan in each) for each in plans]
        self._shards = [*pairwise([0, *accumulate(shards)])]
        self._there = [
            _Part(process, instance, there.plans[instance], there.parts[instance], slice(a, b))
            for (process, there), (a, b) in zip(loaded, self._shards, strict=True)
        ]
        self._lenders = [self._lender(process) for process in lenders]
        self.lends = [process.name for process in lenders]
        self.without: list[int] = []
        self.coming: dict[str, Process] = {}
        self.given_up = False
        self._failed: Exception | None = None
        self._numbers = count()
        self._lock = threading.Lock()
        for part in self._there:
            part.on_failure = partial(self._fail, part)
        self.parts = [
            [first + number for number in numbers]
            for first, part in zip(self.first_stages, self._there, strict=True)
            for numbers in part.parts
        ]
        self._check_shapes()
        self._links = links
        self.follow_on(loaded)

    def _lender(self, process: Process) -> _Part:
        part = _Part(process, self.instance, [], [])
        part.on_failure = partial(self._fail, part)
        return part

    def follow_on(self, loaded: Sequence[tuple[Process, Loaded]]) -> None:
        """Let each process receive hidden states from the previous one."""
        for ((_, before), (process, _)), link in zip(pairwise(loaded), self._links, strict=True):
            next(process.ask(FollowOn(self.instance, before.addresses[self.instance], link)))

    def _check_shapes(self) -> None:
        """Raise JaxinferError if processes would pad a step's tokens to different numbers."""
        limits = [stage.plan.limits for stage in self.stages]
        if any(each.token_buckets != limits[0].token_buckets for each in limits):
            buckets = [each.token_buckets for each in limits]
            raise JaxinferError(
                f"instances.{self.instance}: its stages have steps of unlike sizes, {buckets}: "
                "their layouts must cut tokens alike"
            )

    @property
    def stages(self) -> list[RemoteStage]:
        """Stages of the instance, in pipeline order."""
        return [stage for part in self._there for stage in part.stages]

    @property
    def pieces(self) -> Sequence[RemoteWorker]:
        """The workers of the processes with stages, in pipeline order."""
        return self._there

    def begin_again(self, lenders: Sequence[Process] = ()) -> None:
        """Start again after all processes were replaced, including those that lend pools."""
        self._lenders = [self._lender(process) for process in lenders]
        self.without, self.coming, self.given_up = [], {}, False
        self._failed = None
        self._look_for_losses()

    def _look_for_losses(self) -> None:
        """Notice processes whose loss has not been reported here yet."""
        for part in self._lenders:
            if part.process.lost:
                part.on_loss(ProcessLost(part.process.lost))

    @property
    def processes(self) -> list[Process]:
        """The processes with stages, in pipeline order, then those of attention and FFN groups."""
        return [part.process for part in [*self._there, *self._lenders]]

    @property
    def lending(self) -> list[Process]:
        """The processes of attention and FFN groups."""
        return [part.process for part in self._lenders]

    @property
    def needs_all(self) -> bool:
        """True if the loss of any one process is the loss of the instance."""
        return len(self._there) > 1 or any(stage.plan.ffn_group for stage in self.stages)

    @property
    def first_stages(self) -> list[int]:
        """The number of each process's first stage."""
        return self._first[:-1]

    def prepare(
        self, sampler: SamplerShape = PLAIN_SAMPLER, wait: bool = True
    ) -> Generator[int, None, None]:
        """Compile all steps with this sampler; see ``RemoteWorker``."""
        self.sampler = sampler
        if not wait:  # All are asked before the first yield, so that callers need not ask for more.
            for part in self._there:
                next(part.prepare(sampler, wait))
            yield 0
            return
        # All start at once, and are read one after the other.
        with ExitStack() as alone:
            for part in self._there:
                alone.enter_context(part.process.asking)
            failed: list[JaxinferError] = []
            # Each answer is read to its end, so that the next question does not receive it.
            asked = []
            for part in self._there:
                with _noting(failed):
                    asked.append(part.process.ask(Prepare(self.instance, sampler)))
            for answers in asked:
                with _noting(failed):
                    for answer in answers:
                        if not answer.parts:
                            break
                        yield answer.parts
        if failed:
            raise failed[0]
        yield 0

    def measure(self, measure: Callable[[Any], T]) -> Iterator[T]:
        """Call a function with the ``Engine`` of each process with stages; yield the results."""
        for part in self._there:
            yield next(part.process.ask(Measure(self.instance, measure))).found

    def launch(
        self, batch: Batch, origin: float, post: Post, launched: Launched = lambda *args: None
    ) -> None:
        """Start a step and return. ``post`` gets the StepDone, with times since ``origin``."""
        found: dict[int, StepDone] = {}

        def hear(number: int, answer: StepDone | Failed) -> None:
            if isinstance(answer, Failed):
                post(answer)
                return
            with self._lock:
                found[number] = answer
                is_whole = len(found) == len(self._there)
            if is_whole:
                post(_whole([found[i] for i in range(len(found))]))

        def tell(number: int, stage: int, end: End) -> None:
            launched(self._first[number] + stage, end)

        step = next(self._numbers)
        for number, part in enumerate(self._there):
            part.launch(batch, origin, partial(hear, number), partial(tell, number), step)

    def recover(self, patience: float | None = None) -> None:
        """Become ready for steps of other requests; see ``Worker``.

        Raises:
            Exception: the instance has failed.
        """
        # Hidden states are dropped when their receivers have everything that they were told of.
        for part in reversed(self._there):
            part.recover(patience)

    def move(
        self, transfer: Transfer, origin: float, post: Callable[[TransferDone | Failed], None]
    ) -> None:
        """Start moving KV heads between the pools of each stage; see ``Worker.move``."""
        copies = Copies.of(transfer)
        moves = [
            (part, [c._replace(source=c.source - a, dest=c.dest - a) for c in here])
            for part, (a, b) in zip(self._there, self._shards, strict=True)
            if (here := [copy for copy in copies.pieces if a <= copy.source < b])
        ]
        found: list[Moved] = []

        def hear(answer: Moved) -> None:
            with self._lock:
                found.append(answer)
                is_whole = len(found) == len(moves)
            if is_whole:
                start, end = min(each.start for each in found), max(each.end for each in found)
                num_bytes = sum(each.num_bytes for each in found)
                post(TransferDone(transfer, start - origin, end - origin, num_bytes))

        for part, pieces in moves:
            part.copy(copies._replace(pieces=pieces), hear, post)

    def _fail(self, part: _Part, error: Exception) -> None:
        """Give up the instance and its processes, unless it can continue."""
        with self._lock:
            if self._failed:
                return
            self._failed = error
        if not isinstance(error, JaxinferError):
            error = self._cause(part) or error
        goes_on = self.lost_lenders  # Another thread may do so once it is told.
        if goes_on:
            # A vanished host would block this call, and everything after it.
            with suppress(ProcessLost):
                self._there[0].process.send(BreakOff(self.instance, self._pools_of(goes_on)))
        for each in [*self._there, *self._lenders]:
            each.fail(type(error)(*error.args))
        if not goes_on:
            self.give_up(error)

    def give_up(self, why: Exception) -> None:
        """End those processes of the instance that serve no other instance."""
        self.given_up = True  # This comes first; otherwise, one might be started again.
        for process in [*self.processes, *self.coming.values()]:
            if process.workers.keys() <= {self.instance}:
                process.give_up(f"instance {self.instance}: {why}")

    @property
    def lost_lenders(self) -> list[str]:
        """The groups whose processes are lost, if the instance can continue without them."""
        if self.given_up or self.needs_all or self._there[0].process.lost:
            return []
        return [part.process.name for part in self._lenders if part.process.lost]

    def _pools_of(self, groups: Sequence[str]) -> list[tuple[int, int]]:
        """Return the pools that groups lend to the stages of one process, as in ``Forget``."""
        return [
            (stage.number, number)
            for stage in self.stages
            for number, place in enumerate(stage.plan.attention)
            if place.group in groups
        ]

    def go_on(self) -> None:
        """Let the stages' process forget all requests, and the pools that lost processes had.

        Raises:
            JaxinferError: the stages' process is lost, too.
        """
        (part,), gone = self._there, self.lost_lenders
        for each in self._lenders:
            if each.process.name in gone:
                each.process.wait_until_told()
        self._lenders = [each for each in self._lenders if each.process.name not in gone]
        pools = self._pools_of(gone)
        self.without = sorted({*self.without, *self._shards_of(pools)})
        part.process.forget(self.instance, pools)
        part.begin_again()
        with self._lock:
            self._failed = None
        if part.process.lost:  # The thread that heard of it took it for the same failure.
            raise JaxinferError(part.process.lost)
        self._look_for_losses()

    def _shards_of(self, pools: Iterable[tuple[int, int]]) -> list[int]:
        first = [0, *accumulate(len(stage.plan.pool_pages) for stage in self.stages)]
        return [first[stage] + number + 1 for stage, number in pools]

    def take_back(self, process: Process, pools: Mapping[tuple[int, int], Address]) -> None:
        """Use the pools (as in ``Forget``) that a process lends in place of a lost one."""
        self._lenders = [*self._lenders, self._lender(process)]
        if self.coming.get(process.name) is process:  # Otherwise, the next one is being started.
            del self.coming[process.name]
        with suppress(ProcessLost):  # The first step will notice it.
            for (stage, number), address in pools.items():
                borrow = Borrow(self.instance, stage, number, address, wait=False)
                self._there[0].process.send(borrow)
        self.without = [n for n in self.without if n not in self._shards_of(pools)]
        self._look_for_losses()

    def _cause(self, part: _Part) -> Exception | None:
        """Return the first cause: a process that has ended also makes its neighbours fail."""
        if part.process.lost:
            return None
        for other in self.processes:
            if other is not part.process and (why := other.why_lost(EXPLAINED_S)):
                return ProcessLost(why)
        return None

    def close(self) -> None:
        """Do nothing: each process is ended as a whole."""


@contextmanager
def _noting(failed: list[JaxinferError]) -> Iterator[None]:
    try:
        yield
    except JaxinferError as error:
        failed.append(error)


def _whole(parts: Sequence[StepDone]) -> StepDone:
    """Combine the results that processes report for their stages."""
    stages = [stage for part in parts for stage in part.stages]
    return replace(parts[-1], start=stages[0][0], stages=stages)


AnyRemote = RemoteWorker | PipelineWorker
