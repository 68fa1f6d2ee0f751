"""The loop's view of workers in other processes."""

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count

from jaxinfer.config.cluster import LinkConfig
from jaxinfer.runtime.kv.outcome import Failed, Launched, Post, StepEnd
from jaxinfer.runtime.processes.batch_delta import BatchEncoder
from jaxinfer.runtime.processes.messages import (
    EmulateSteps,
    Launch,
    Move,
    Moved,
    Prepare,
    StepEnded,
)
from jaxinfer.runtime.processes.process import Process
from jaxinfer.runtime.spread.slice_move import Copies
from jaxinfer.runtime.stage.sampler import PLAIN_SAMPLER, SamplerShape
from jaxinfer.runtime.stage.stage_plan import StageFacts
from jaxinfer.serving.batch import Batch
from jaxinfer.serving.world import StepDone


@dataclass
class CompileCounts:
    """How much a stage has compiled; see ``CompiledStep``."""

    compiles: int = 0
    compile_s: float = 0.0
    late_compiles: int = 0


@dataclass
class RemoteStage:
    """The loop's view of a stage in another process."""

    process: Process
    instance: str
    number: int
    plan: StageFacts
    link: LinkConfig | None = None
    overruns: list[float] = field(default_factory=list)
    step: CompileCounts = field(default_factory=CompileCounts)
    _before: CompileCounts = field(default_factory=CompileCounts)
    _emulate: Callable[[Batch], float] | None = None

    @property
    def emulate(self) -> Callable[[Batch], float] | None:
        """Function that returns how long a step takes on an emulated slower device, or None."""
        return self._emulate

    @emulate.setter
    def emulate(self, seconds: Callable[[Batch], float] | None) -> None:
        self._emulate = seconds
        self.emulate_on(self.process)

    def emulate_on(self, process: Process) -> None:
        """Tell a process how long its steps should take."""
        process.send(EmulateSteps(self.instance, self.number, self._emulate))

    def move_to(self, process: Process) -> None:
        """Continue in another process, which has compiled all steps again."""
        self.process, self._before = process, self.step

    def count(self, compiles: int, seconds: float, late: int) -> None:
        """Record what the process has compiled, in addition to what earlier processes compiled."""
        before = self._before
        self.step = CompileCounts(
            before.compiles + compiles, before.compile_s + seconds, before.late_compiles + late
        )


class RemoteWorker:
    """The stages of one instance in another process; see ``Worker``.

    Args:
        shards: range of the instance's KV shards that belong to these stages.

    Attributes:
        parts: ``parts`` of the worker in the other process.
        sampler: the sampler that was requested last.
    """

    without: Sequence[int] = ()

    def __init__(
        self,
        process: Process,
        instance: str,
        plans: Sequence[StageFacts],
        parts: list[list[int]],
        shards: slice = slice(None),
    ) -> None:
        self.process, self.instance, self.parts = process, instance, parts
        self.stages = [RemoteStage(process, instance, i, plan) for i, plan in enumerate(plans)]
        self.sampler = PLAIN_SAMPLER
        self._shards, self._encoder = shards, BatchEncoder(shards)
        self._numbers, self._move_numbers = count(), count()
        self._steps: dict[int, tuple[Batch, Post]] = {}
        self._moves: dict[int, tuple[Callable[[Moved], None], Callable[[Failed], None]]] = {}
        self._lost: Exception | None = None
        process.workers[instance] = self

    def prepare(
        self, sampler: SamplerShape = PLAIN_SAMPLER, wait: bool = True
    ) -> Generator[int, None, None]:
        """Compile all steps with this sampler; later launches use it.

        Yields the number of steps left, beginning with their total number.

        Args:
            wait: whether to wait until all is compiled. A stopped process would block the caller.
        """
        self.sampler = sampler
        if wait:
            yield from self.prepare_on(self.process, sampler)
        else:
            self.process.ask(Prepare(self.instance, sampler, wait))
            yield 0

    @property
    def pieces(self) -> "Sequence[RemoteWorker]":
        """See ``PipelineWorker``."""
        return [self]

    def prepare_on(self, process: Process, sampler: SamplerShape) -> Iterator[int]:
        """Compile all steps in a process that will have this worker's stages; see ``prepare``."""
        with process.asking:
            for answer in process.ask(Prepare(self.instance, sampler)):
                yield answer.parts
                if not answer.parts:
                    return

    def emulate_on(self, process: Process) -> None:
        """Set how long steps take in another process, as for stages in this one."""
        for stage in self.stages:
            if stage.emulate:
                stage.emulate_on(process)

    def move_to(self, process: Process) -> None:
        """Continue in a process that has this worker's stages and knows no requests."""
        self.process.workers.pop(self.instance, None)  # It may still have to report its end.
        self.process = process
        self.begin_again()
        for stage in self.stages:
            stage.move_to(process)
        process.workers[self.instance] = self

    def begin_again(self) -> None:
        """Start again with a process that knows no requests."""
        self._encoder, self._lost = BatchEncoder(self._shards), None
        self._steps, self._moves = {}, {}

    def recover(self, patience: float | None = None) -> None:
        """Become ready for steps of other requests; see ``Worker``.

        Raises:
            Exception: the instance has failed.
        """
        self._check()
        self.process.forget(self.instance, patience=patience)
        self._check()
        self.begin_again()

    def launch(
        self,
        batch: Batch,
        origin: float,
        post: Post,
        launched: Launched = lambda *args: None,
        number: int | None = None,
    ) -> None:
        """Start a step and return at once. ``post`` gets its StepDone, with times since ``origin``.

        Args:
            number: number by which other processes know the step.
        """
        self._check()
        step = next(self._numbers) if number is None else number
        self._steps[step] = batch, post
        told: Launch = self._encoder.encode(batch, step, origin + self.process.peer.clock_offset)
        self.process.send(told._replace(instance=self.instance))  # A profile's batch has none.
        for stage in range(len(self.stages)):
            launched(stage, StepEnd(self.instance, step, stage))

    def _check(self) -> None:
        if self._lost:
            # A new one, because it will keep those it passes.
            raise type(self._lost)(*self._lost.args)

    def copy(
        self, copies: Copies, hear: Callable[[Moved], None], post: Callable[[Failed], None]
    ) -> None:
        """Start to move KV heads, and return at once; ``post`` is called only if the move fails."""
        self._check()
        move = next(self._move_numbers)
        self._moves[move] = hear, post
        self.process.send(Move(self.instance, move, copies))

    def on_move(self, answer: Moved) -> None:
        """Pass on the times at which KV heads were moved."""
        hear, _ = self._moves.pop(answer.move, (None, None))
        if hear is None:
            return  # This is for a worker that has failed.
        ahead = self.process.peer.clock_offset
        hear(answer._replace(start=answer.start - ahead, end=answer.end - ahead))

    def on_step(self, answer: StepEnded) -> None:
        """Pass on a step's results."""
        batch, post = self._steps.pop(answer.step, (None, None))
        if batch is None or post is None:
            return  # This is for a worker that has failed.
        for stage, late, counts in zip(self.stages, answer.overruns, answer.compiles, strict=True):
            stage.overruns += late
            stage.count(*counts)
        post(StepDone(batch, *answer.results))

    def on_loss(self, error: Exception) -> None:
        """Report the first failure to all callers that wait for steps or will launch one."""
        self._lost = error = self._lost or error
        while self._steps:
            _, (_, post) = self._steps.popitem()
            post(Failed(self.instance, error))
        while self._moves:
            _, (_, hear) = self._moves.popitem()
            hear(Failed(self.instance, error))

    def close(self) -> None:
        """Do nothing: the process is ended as a whole."""
