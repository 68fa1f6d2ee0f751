"""A process with its own devices: messages to it, receivers of its answers, and its end."""

import os
import queue
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from itertools import count
from multiprocessing.connection import Connection
from typing import Any, Protocol

from jaxinfer.errors import JaxinferError, one_line
from jaxinfer.runtime.kv.kv_messages import Checked, Offered, Pulled, SlabAnswer, SlabFailed
from jaxinfer.runtime.kv.outcome import ProcessLost
from jaxinfer.runtime.kv.sockets import Sender, Torn, set_patience
from jaxinfer.runtime.processes.messages import (
    CallResult,
    Forget,
    Forgot,
    Heartbeat,
    Hello,
    Left,
    Lent,
    Loaded,
    Moved,
    Refused,
    StepEnded,
    WorkerFailed,
)
from jaxinfer.runtime.processes.peers import END_S, Ended, Peer, how_ended

# A process reports each second that it is alive. After this long without a report, it counts as
# gone.
SILENCE_S = 10.0
# The wait is split into this many parts. If this process is stopped, too, for example by Ctrl-Z,
# only one part is lost.
PARTS = 10
# Before its first report, it imports JAX, perhaps from a slow disk.
START_S = 300.0


class Listener(Protocol):
    """Receives the events of one instance in a process."""

    def on_step(self, answer: StepEnded) -> None:
        """Take the results of a step."""

    def on_move(self, answer: Moved) -> None:
        """Record that KV heads have moved."""

    def on_loss(self, error: Exception) -> None:
        """Record that the instance has failed."""


class ProcessGone(JaxinferError):
    """A process cannot answer because it is lost."""


class Process:
    """A process with its own devices, which this process started and will end.

    Args:
        name: name of the process's group.
        peer: connection to the process.

    Attributes:
        lost: reason why the process has ended, or None.
        workers: workers of the process's instances, by name.
        ends: receivers of the answers of each end.
        on_loss: called, in a thread, when the process has ended.
        asking: lock to hold during a question if other threads may ask, too, because an answer goes
            to any listener.
    """

    def __init__(self, name: str, peer: Peer) -> None:
        self.name = name
        self.lost: str | None = None
        self.workers: dict[str, Listener] = {}
        self.ends: dict[int, Callable[[SlabAnswer], None]] = {}
        self.on_loss: list[Callable[[str], None]] = []
        self.asking = threading.Lock()
        self._answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._numbers = count()
        self._closing = False
        self._given_up: str | None = None
        self._ended = threading.Event()
        self.peer, self._socket = peer, peer.socket
        # A stopped process may have sent half of a message.
        set_patience(self._socket, SILENCE_S)
        self._connection: Connection[Any, Any] = Connection(os.dup(self._socket.fileno()))
        self._lock, self._sender = threading.Lock(), Sender(self._connection)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def send(self, message: Any) -> None:
        """Send a message, which the process carries out after all earlier ones.

        Raises:
            ProcessLost: the process has ended.
        """
        if self.lost:
            raise ProcessLost(self.lost)
        try:
            with self._lock:
                self._sender.send(message)
        except OSError as error:
            if isinstance(error, Torn):
                self.give_up(f"process of group {self.name}: {error}")
            # The thread that reads is about to learn how it ended, unless that is this thread.
            reads = threading.current_thread() is self._reader
            why = None if reads else self.why_lost(END_S)
            raise ProcessLost(why or f"process of group {self.name}: {error}") from None

    def ask(self, message: Any) -> Iterator[Any]:
        """Send a message, and yield its answers as they come.

        Raises:
            JaxinferError: the process refuses, because the user made a mistake, or is lost.
        """
        try:
            self.send(message)
        except ProcessLost as error:
            raise ProcessGone(str(error)) from None
        return self.answers()

    def answers(self) -> Iterator[Any]:
        """Yield the answers to the message that was sent; see ``ask``."""
        while True:
            match answer := self._answers.get():
                case Refused(line):
                    raise JaxinferError(f"groups.{self.name}: {line}")
                case ProcessLost():
                    raise ProcessGone(str(answer))
            yield answer

    def forget(
        self, instance: str, pools: Sequence[tuple[int, int]] = (), patience: float | None = None
    ) -> None:
        """Let an instance there end all work and start again; see ``Forget``.

        Answers to an interrupted caller, which were never read, are dropped.

        Raises:
            JaxinferError: the process cannot do so, does not do so within ``patience`` seconds, or
                is lost.
        """
        with self.asking:
            asked = Forget(instance, pools, next(self._numbers))
            self.ask(asked)
            while True:
                try:
                    answer = self._answers.get(timeout=patience)
                except queue.Empty:
                    line = f"its steps have not ended within {patience:g} s"
                    raise JaxinferError(line) from None
                match answer:
                    case Forgot(asked.number, why):
                        if why:
                            raise JaxinferError(why)
                        return
                    case ProcessLost():
                        raise ProcessGone(str(answer))

    def close(self) -> None:
        """End the process; this takes at most a few seconds."""
        self._closing = True
        # Not done by a message: garbage collection may call this in the thread that is just sending
        # one.
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self.peer.end(END_S)

    def give_up(self, why: str) -> None:
        """End the process as if it had failed, and tell its users why."""
        self._given_up = self._given_up or why
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def why_lost(self, seconds: float) -> str | None:
        """Wait at most ``seconds`` for the process to end; return the reason, or None."""
        self._ended.wait(seconds)
        return self.lost

    def wait_until_told(self) -> None:
        """Wait until the process has ended and all its users know.

        A user that is told later would believe that the process that replaces this one was lost.
        """
        self._reader.join()

    def _read(self) -> None:
        ended = f"process of group {self.name} ({self.peer.where}) {self._hear_all()}"
        self.lost = why = self._given_up or ended
        self._ended.set()
        self._answers.put(ProcessLost(why))
        # All are called even if one raises, because a listener that is not called waits forever.
        with ExitStack() as all_told:
            all_told.callback(self._disconnect)
            if not self._closing:
                for hear in reversed(list(self.on_loss)):
                    all_told.callback(hear, why)
                # Copied to a list, because the loop's thread may move a worker here at the same
                # time.
                for worker in reversed(list(self.workers.values())):
                    all_told.callback(worker.on_loss, ProcessLost(why))

    def _disconnect(self) -> None:
        with self._lock:
            self._connection.close()
            self._socket.close()

    def _hear_all(self) -> str:
        """Read answers until the process ends, and return the reason."""
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
            pass  # Half of a message.
        except TimeoutError:
            self.peer.end(0)
            return "cannot be reached any more"
        except (EOFError, OSError):
            return self.peer.end(END_S)
        except Exception as error:
            self.peer.end(0)
            return f"has said what is not understood: {type(error).__name__}: {one_line(error)}"
        # It is stopped, or too busy to be useful, and must not be found later.
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
            case Left() | Forgot() | Lent() | Loaded() | CallResult() | Refused():
                self._answers.put(answer)
            case Heartbeat():
                pass
