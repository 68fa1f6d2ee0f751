"""Workers in processes of their own, as the loop's process sees them."""

import os
import queue
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

from jaxinfer.config.cluster import LinkConfig
from jaxinfer.errors import JaxinferError, one_line
from jaxinfer.runtime.kv.kv_messages import Checked, Offered, Pulled, SlabAnswer, SlabFailed
from jaxinfer.runtime.kv.outcome import Failed, Launched, Post, ProcessLost, StepEnd
from jaxinfer.runtime.processes.batch_delta import BatchEncoder
from jaxinfer.runtime.processes.messages import (
    CallResult,
    EmulateSteps,
    Heartbeat,
    Hello,
    Launch,
    Left,
    Lent,
    Loaded,
    Move,
    Moved,
    Prepare,
    Refused,
    StepEnded,
    WorkerFailed,
)
from jaxinfer.runtime.processes.peers import END_S, Ended, Peer, how_ended
from jaxinfer.runtime.spread.slice_move import Copies
from jaxinfer.runtime.stage.sampler import PLAIN_SAMPLER, SamplerShape
from jaxinfer.runtime.stage.stage_plan import StageFacts
from jaxinfer.serving.batch import Batch
from jaxinfer.serving.world import StepDone
from jaxinfer.sockets import send, set_patience

# A process says each second that it is alive; one that has not for so long has gone.
SILENCE_S = 10.0
# Silence is waited for in so many parts: where this process is stopped as well, as by Ctrl-Z, that
# takes one of them.
PARTS = 10
# Before its first word it imports JAX, from a disk that may be slow.
START_S = 300.0


class NobodyThere(JaxinferError):
    """A process was asked for something, and is lost."""


class Process:
    """A process with devices of its own, ended by this one.

    Args:
        name: of its group.
        peer: it, as it is got at.

    Attributes:
        lost: why it is no more, or None.
        workers: of its instances, by name; ``ends``: who gets the answers of each end.
        on_loss: called, in a thread, when it is no more.
        asking: held by who asks for something while others may: answers come to whoever listens.
    """

    def __init__(self, name: str, peer: Peer) -> None:
        self.name = name
        self.lost: str | None = None
        self.workers: dict[str, RemoteWorker] = {}
        self.ends: dict[int, Callable[[SlabAnswer], None]] = {}
        self.on_loss: list[Callable[[str], None]] = []
        self.asking = threading.Lock()
        self._answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._closing = False
        self._given_up: str | None = None
        self._ended = threading.Event()
        self.peer, self._socket = peer, peer.socket
        # One that is stopped may have said half of something.
        set_patience(self._socket, SILENCE_S)
        self._connection: Connection[Any, Any] = Connection(os.dup(self._socket.fileno()))
        self._lock = threading.Lock()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def send(self, message: Any) -> None:
        """Have something done, after all that was sent before.

        Raises:
            ProcessLost: nobody is there to do it.
        """
        if self.lost:
            raise ProcessLost(self.lost)
        try:
            with self._lock:
                send(self._connection, message)
        except OSError as error:
            # The thread that reads is about to learn how it ended, unless that is this one.
            reads = threading.current_thread() is self._reader
            why = None if reads else self.why_lost(END_S)
            raise ProcessLost(why or f"process of group {self.name}: {error}") from None

    def ask(self, message: Any) -> Iterator[Any]:
        """Send, and the answers to this message as they come.

        Raises:
            JaxinferError: it cannot be done, by the user's mistake or because the process is lost.
        """
        try:
            self.send(message)
        except ProcessLost as error:
            raise NobodyThere(str(error)) from None
        return self.answers()

    def answers(self) -> Iterator[Any]:
        """Yield the answers to the message that was sent; see ``ask``."""
        while True:
            match answer := self._answers.get():
                case Refused(line):
                    raise JaxinferError(f"groups.{self.name}: {line}")
                case ProcessLost():
                    raise NobodyThere(str(answer))
            yield answer

    def close(self) -> None:
        """End it; waits for no more than a few seconds."""
        self._closing = True
        # Not by a message: a thread that is in the midst of sending one may be the one here, which
        # garbage collection has brought.
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self.peer.end(END_S)

    def give_up(self, why: str) -> None:
        """End it as if it had ended by itself: who works with it is told, and why."""
        self._given_up = self._given_up or why
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def why_lost(self, seconds: float) -> str | None:
        """Wait so many seconds at most for the process to end; return why it did, or None."""
        self._ended.wait(seconds)
        return self.lost

    def wait_until_told(self) -> None:
        """Wait until it has ended and all who work with it have been told.

        Whoever is told later would take it for the loss of what has come in its place.
        """
        self._reader.join()

    def _read(self) -> None:
        ended = f"process of group {self.name} ({self.peer.where}) {self._hear_all()}"
        self.lost = why = self._given_up or ended
        self._ended.set()
        self._answers.put(ProcessLost(why))
        # Each of them, whatever the others raise: who is not told waits for ever.
        with ExitStack() as all_told:
            all_told.callback(self._disconnect)
            if not self._closing:
                for hear in reversed(list(self.on_loss)):
                    all_told.callback(hear, why)
                # A list: the loop's thread may move a worker here meanwhile.
                for worker in reversed(list(self.workers.values())):
                    all_told.callback(worker.on_loss, ProcessLost(why))

    def _disconnect(self) -> None:
        with self._lock:
            self._connection.close()
            self._socket.close()

    def _hear_all(self) -> str:
        """Hear answers until the process is no more, and why that is so."""
        patience = START_S
        try:
            while self._says_something(patience):
                answer = self._connection.recv()
                if isinstance(answer, Ended):
                    self.peer.end(0)
                    return how_ended(answer.code)
                self._hear(answer)
                patience = SILENCE_S
        except BlockingIOError:
            pass  # Half of something.
        except TimeoutError:
            self.peer.end(0)
            return "cannot be reached any more"
        except (EOFError, OSError):
            return self.peer.end(END_S)
        except Exception as error:
            self.peer.end(0)
            return f"has said what is not understood: {type(error).__name__}: {one_line(error)}"
        # Stopped, or too busy to be of use: nobody is to find it later.
        self.peer.end(0)
        return f"has said nothing for {patience:g} s"

    def _says_something(self, patience: float) -> bool:
        return any(self._connection.poll(patience / PARTS) for _ in range(PARTS))

    def _hear(self, answer: Any) -> None:
        match answer:
            case StepEnded():
                self.workers[answer.instance].on_step(answer)
            case Moved():
                self.workers[answer.instance].on_move(answer)
            case WorkerFailed(instance, is_mistake, line):
                error = JaxinferError(line) if is_mistake else ProcessLost(line)
                self.workers[instance].on_loss(error)
            case Pulled(end, slab, began, ended):
                ahead = self.peer.clock_offset
                self.ends[end](Pulled(end, slab, began - ahead, ended - ahead))
            case Offered() | Checked() | SlabFailed():
                self.ends[answer.end](answer)
            case Hello():
                for name, there, here in zip(Hello._fields, answer, Hello.here(), strict=True):
                    if there != here:
                        line = f"{name} is {there} in its process, {here} in this one"
                        self._answers.put(Refused(line))
            case Left() | Lent() | Loaded() | CallResult() | Refused():
                self._answers.put(answer)
            case Heartbeat():
                pass


@dataclass
class CompileCounts:
    """See ``CompiledStep``."""

    compiles: int = 0
    compile_s: float = 0.0
    late_compiles: int = 0


@dataclass
class RemoteStage:
    """A stage that another process has: what is known of it here."""

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
        """Seconds that a step is to take on a slower device, or None."""
        return self._emulate

    @emulate.setter
    def emulate(self, seconds: Callable[[Batch], float] | None) -> None:
        self._emulate = seconds
        self.emulate_on(self.process)

    def emulate_on(self, process: Process) -> None:
        """Tell a process how long its steps are to take."""
        process.send(EmulateSteps(self.instance, self.number, self._emulate))

    def move_to(self, process: Process) -> None:
        """Go on in another process, which has compiled all of it anew."""
        self.process, self._before = process, self.step

    def count(self, compiles: int, seconds: float, late: int) -> None:
        """Note what the process has compiled; that of those before it counts, too."""
        before = self._before
        self.step = CompileCounts(
            before.compiles + compiles, before.compile_s + seconds, before.late_compiles + late
        )


class RemoteWorker:
    """The stages of one instance in another process; see ``Worker``.

    Args:
        shards: those of the instance's KV that these stages have.

    Attributes:
        parts: as the worker there has.
        sampler: the one that was asked for last.
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
        self._numbers = 0
        self._steps: dict[int, tuple[Batch, Post]] = {}
        self._moves: dict[int, tuple[Callable[[Moved], None], Callable[[Failed], None]]] = {}
        self._lost: Exception | None = None
        process.workers[instance] = self

    def prepare(self, sampler: SamplerShape = PLAIN_SAMPLER, wait: bool = True) -> Iterator[int]:
        """Compile all steps with this sampler, which those launched from now on have.

        Yields how many are left, their number first.

        Args:
            wait: until it is done. A process that is stopped would hold up whoever does.
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
        """The same in a process that is to have these stages."""
        with process.asking:
            for answer in process.ask(Prepare(self.instance, sampler)):
                yield answer.parts
                if not answer.parts:
                    return

    def emulate_on(self, process: Process) -> None:
        """Have steps there take as long as here."""
        for stage in self.stages:
            if stage.emulate:
                stage.emulate_on(process)

    def move_to(self, process: Process) -> None:
        """Go on in a process that has these stages, and has heard of no request."""
        self.process.workers.pop(self.instance, None)  # It may still have to tell of its end.
        self.process = process
        self.begin_again()
        for stage in self.stages:
            stage.move_to(process)
        process.workers[self.instance] = self

    def begin_again(self) -> None:
        """Go on where the process has forgotten all requests."""
        self._encoder, self._lost = BatchEncoder(self._shards), None

    def launch(
        self,
        batch: Batch,
        origin: float,
        post: Post,
        launched: Launched = lambda *args: None,
    ) -> None:
        """Start a step and return. ``post`` gets its StepDone, with times since ``origin``."""
        step = self._next()
        self._steps[step] = batch, post
        told: Launch = self._encoder.encode(batch, step, origin + self.process.peer.clock_offset)
        self.process.send(told._replace(instance=self.instance))  # A profile's batch has none.
        for stage in range(len(self.stages)):
            launched(stage, StepEnd(self.instance, step, stage))

    def _next(self) -> int:
        """The number of something that is to be done there."""
        if self._lost:
            raise type(self._lost)(*self._lost.args)  # A new one, for it will keep those it passes.
        self._numbers += 1
        return self._numbers - 1

    def copy(
        self, copies: Copies, hear: Callable[[Moved], None], post: Callable[[Failed], None]
    ) -> None:
        """Start moving KV heads, and return; ``post`` is told only where that fails."""
        move = self._next()
        self._moves[move] = hear, post
        self.process.send(Move(self.instance, move, copies))

    def on_move(self, answer: Moved) -> None:
        """Pass on when KV heads have moved."""
        hear, _ = self._moves.pop(answer.move, (None, None))
        if hear is None:
            return  # Of a worker that has failed.
        ahead = self.process.peer.clock_offset
        hear(answer._replace(start=answer.start - ahead, end=answer.end - ahead))

    def on_step(self, answer: StepEnded) -> None:
        """Pass a step's results on."""
        batch, post = self._steps.pop(answer.step, (None, None))
        if batch is None or post is None:
            return  # Of a worker that has failed.
        for stage, late, counts in zip(self.stages, answer.overruns, answer.compiles, strict=True):
            stage.overruns += late
            stage.count(*counts)
        post(StepDone(batch, *answer.results))

    def on_loss(self, error: Exception) -> None:
        """Tell those who wait for steps, and whoever comes with one."""
        self._lost = error
        while self._steps:
            _, (_, post) = self._steps.popitem()
            post(Failed(self.instance, error))
        while self._moves:
            _, (_, hear) = self._moves.popitem()
            hear(Failed(self.instance, error))

    def close(self) -> None:
        """The process is ended as a whole."""
