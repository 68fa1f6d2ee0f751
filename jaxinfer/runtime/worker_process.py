"""The process of a device group: the usual workers behind a loop over messages.

Started as ``python -m jaxinfer.runtime.worker_process FD PID``. The file descriptor is one end of a
socket whose other end is in the loop's process. PID is the number of the process that started this
one: the loop's or a listening worker. This process ends with either.
"""

import os
import queue
import signal
import sys
import threading
import time
import traceback
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from jaxinfer.checkpoints.checkpoint import open_checkpoint
from jaxinfer.config.groups import GroupConfig
from jaxinfer.errors import JaxinferError, one_line
from jaxinfer.runtime.cluster import Cluster, load_cluster
from jaxinfer.runtime.ffn.ffn_server import FfnServer
from jaxinfer.runtime.ffn.ffn_stage import FfnStage
from jaxinfer.runtime.kv.hidden_states import HiddenStates
from jaxinfer.runtime.kv.kv_endpoint import KVEndpoint
from jaxinfer.runtime.kv.kv_messages import Drop, Offer, OpenEnd, Place, Pull, SlabFailed
from jaxinfer.runtime.kv.outcome import End, Failed, StepEnd
from jaxinfer.runtime.kv.sockets import Address, send
from jaxinfer.runtime.processes.batch_delta import BatchDecoder
from jaxinfer.runtime.processes.messages import (
    Borrow,
    BreakOff,
    CallResult,
    EmulateSteps,
    FollowOn,
    Forget,
    Forgot,
    Heartbeat,
    Hello,
    Launch,
    Left,
    Lend,
    Lent,
    Loaded,
    LoadInstances,
    Measure,
    Move,
    Moved,
    OpenPools,
    Prepare,
    Refused,
    StepEnded,
    WorkerFailed,
)
from jaxinfer.runtime.processes.turns import Turns
from jaxinfer.runtime.spread.lender import Lender
from jaxinfer.runtime.spread.pool_server import PoolServer
from jaxinfer.runtime.spread.spread_stage import SpreadStage
from jaxinfer.runtime.stage.attention_plan import plan_pool
from jaxinfer.runtime.stage.devices import open_groups
from jaxinfer.runtime.stage.stage import Stage
from jaxinfer.runtime.stage.stage_plan import DeviceFacts
from jaxinfer.runtime.worker import Worker
from jaxinfer.serving.world import StepDone

ALIVE_S = 1.0
# A process that lends a pool in place of a lost one is called until the loop has ended it, as for
# silent processes, so that no other is blamed. Only steps wait for it.
LENDER_S = 60.0
# The ends of a step are kept for this many further steps, because a later offer waits for one of
# them.
STEPS_KEPT = 16


class WorkerProcess:
    """Carries out the messages that its process receives, in order.

    An instance with stages in other processes has its own thread. The thread waits for hidden
    states, and then does the work that depends on them: it runs a step, or moves slabs out of the
    instance's pages or into them.

    Args:
        connection: connection to the loop's process.
        parent: number of the process that has started this one.
    """

    def __init__(self, connection: "Connection[Any, Any]", parent: int) -> None:
        self._connection, self._parent = connection, parent
        self._lock = threading.Lock()
        self._cluster: Cluster
        self._groups: Mapping[str, GroupConfig]
        self._model: str
        self._endpoint: KVEndpoint
        self._lent: list[Lender] = []
        self._decoders: dict[str, BatchDecoder] = {}
        # For each instance, the ends of the last steps, by their numbers.
        self._ends: defaultdict[str, dict[int, list[Future[None]]]] = defaultdict(dict)
        self._lanes: dict[str, queue.SimpleQueue[Any]] = {}
        self._instances: dict[int, str] = {}

    def run(self) -> None:
        """Run until the loop's process or the parent has ended, or the connection is closed."""
        threading.Thread(target=self._say_alive, daemon=True).start()
        self._say(Hello.here())
        Turns(self._read, self._take).run()

    def _take(self, message: Any) -> None:
        if lane := self._lane_of(message):
            lane.put(message)
        else:
            self._attempt(message)

    def _attempt(self, message: Any) -> None:
        try:
            try:
                self._do(message)
            except Exception as error:
                self._say(self._failure(message, error))
        except BaseException:
            # If the thread ended alone, this job and all later ones would never be done.
            traceback.print_exc()
            os._exit(1)

    def _lane_of(self, message: Any) -> "queue.SimpleQueue[Any] | None":
        """Return the queue of a message that must be done in order with such an
        instance's steps.
        """
        match message:
            case Launch() | Prepare() | Measure() | Move() | Forget():
                return self._lanes.get(message.instance)
            case Offer(end) | Place(end) | Drop(end):
                return self._lanes.get(self._instances.get(end, ""))
        return None

    def _follow_lane(self, lane: "queue.SimpleQueue[Any]") -> None:
        while True:
            self._attempt(lane.get())

    def _read(self) -> Any:
        """Read a message; exit if the loop's process has ended, even with steps under way."""
        try:
            return self._connection.recv()
        except (EOFError, OSError):
            os._exit(0)  # Threads of JAX may hang at the interpreter's end.
        except Exception:
            traceback.print_exc()  # After an unreadable message, nothing can be done in order.
            os._exit(1)

    def _say(self, answer: Any) -> None:
        try:
            with self._lock:
                send(self._connection, answer)
        except OSError:
            os._exit(0)

    def _say_alive(self) -> None:
        while True:
            time.sleep(ALIVE_S)
            if os.getppid() != self._parent:
                os._exit(0)  # Its child processes may still have its end of the connection.
            self._say(Heartbeat())

    def _failure(
        self, message: Any, error: Exception
    ) -> WorkerFailed | SlabFailed | Forgot | Refused:
        mistake, line = _told(error)
        # Refused answers a message whose sender waits.
        match message:
            case Launch() | Move() | EmulateSteps() | Prepare(wait=False):
                return WorkerFailed(message.instance, mistake, line)
            case Offer() | Pull() | Place() | Drop():
                return SlabFailed(message.end, message.slab, isinstance(message, Offer), line)
            case Forget():
                return Forgot(message.number, line)
        return Refused(line)

    def _do(self, message: Any) -> None:
        match message:
            case Launch():
                self._launch(message)
            case Offer(after=StepEnd() as end):
                self._endpoint.do(message._replace(after=self._end(end)))
            case OpenEnd():
                self._instances[message.end] = message.instance
                self._endpoint.do(message)
                self._say(Left("ends", 0))
            case Offer() | Pull() | Place() | Drop():
                self._endpoint.do(message)
            case LoadInstances():
                self._load(message)
            case FollowOn(instance, address, link):
                worker = self._worker(instance)
                assert worker.hidden
                worker.hidden.before, worker.stages[0].link = address, link
                self._say(Left("stages", 0))
            case Lend():
                self._lend(message)
            case OpenPools():
                while self._lent:
                    lent = self._lent.pop()
                    for left in lent.compile_ahead():
                        self._say(Left(f"compiling {lent.part}", left + len(self._lent)))
            case Borrow(instance, stage, number, address, wait):
                borrower = self._worker(instance).stages[stage]
                assert isinstance(borrower, SpreadStage | FfnStage)
                borrower.borrow(number, address, None if wait else LENDER_S)
                if wait:
                    self._say(Left("pools", 0))
            case BreakOff():
                for spread, number in self._borrowed(message):
                    spread.elsewhere[number].close()
            case Move():
                self._move(message)
            case Measure(instance, measure):
                self._say(CallResult(measure(self._cluster.engines[instance])))
            case Forget():
                self._forget(message)
            case Prepare(instance, sampler, wait):
                for left in self._worker(instance).prepare(sampler):
                    if left and wait:
                        self._say(Left("samplers", left))
                if wait:
                    self._say(Left("samplers", 0))  # After the last one, some work is left.
            case EmulateSteps(instance, stage, seconds):
                self._worker(instance).stages[stage].emulate = seconds

    def _load(self, message: LoadInstances) -> None:
        checkpoint = open_checkpoint(message.model, message.cluster.load_format)

        def progress(what: str, left: int) -> None:
            self._say(Left(what, left))

        self._model, self._groups = message.model, message.cluster.groups
        self._cluster = load_cluster(checkpoint, message.cluster, progress, layers=message.layers)
        workers = {name: self._worker(name) for name in self._cluster.engines}
        stages = {name: worker.stages for name, worker in workers.items()}
        self._decoders = {name: _decoder(here) for name, here in stages.items()}
        self._endpoint = KVEndpoint(stages, self._say, message.host)
        plans = {name: [stage.plan.facts for stage in here] for name, here in stages.items()}
        parts = {name: worker.parts for name, worker in workers.items()}
        addresses = {name: self._open_lane(name, message.host) for name in message.layers}
        self._say(Loaded(plans, parts, addresses))

    def _lend(self, message: Lend) -> None:
        """Load the FFN, or allocate a pool's memory, for a stage in another process."""
        plan, number = message.plan, message.number
        if plan.ffn_group:
            devices = open_groups(self._groups)[plan.ffn_group]
            checkpoint = open_checkpoint(self._model, plan.options.load_format)
            ffn = FfnServer.load(checkpoint, plan, devices, message.host)
            self._lent.append(ffn)
            # Only this process knows how much of its memory is free.
            self._say(Lent(replace(ffn.plan.facts, memory_bytes=None), ffn.address))
            return
        asked = plan.attention[number]
        device = open_groups(self._groups)[asked.group][asked.number]
        pool = plan_pool(plan, asked, device, self._groups[asked.group])
        places = [*plan.attention[:number], pool, *plan.attention[number + 1 :]]
        lent = PoolServer(replace(plan, attention=places), number, message.host)
        self._lent.append(lent)
        known = DeviceFacts(device.platform, device.id, device.device_kind)
        self._say(Lent(replace(pool, device=known), lent.address))

    def _forget(self, message: Forget) -> None:
        """Start again, without pools of lost processes."""
        worker = self._worker(message.instance)
        worker.recover()
        self._ends[message.instance].clear()
        for spread, number in self._borrowed(message):
            del spread.elsewhere[number]
        self._decoders[message.instance] = _decoder(worker.stages)
        self._say(Forgot(message.number))

    def _borrowed(self, message: BreakOff | Forget) -> Iterator[tuple[SpreadStage, int]]:
        """Yield the pools of a message: each one's stage, and its number in the stage.

        A pool that replaces a lost one may have been lost before it was reached.
        """
        for stage, number in message.pools:
            spread = self._worker(message.instance).stages[stage]
            assert isinstance(spread, SpreadStage)
            if number + 1 in spread.elsewhere:
                yield spread, number + 1

    def _move(self, message: Move) -> None:
        instance, number, copies = message
        moves = self._worker(instance).moves
        assert moves

        def done(start: float, error: Exception | None) -> None:
            if error:
                self._say(WorkerFailed(instance, *_told(error)))
                return
            end, num_bytes = time.perf_counter(), moves.num_bytes(copies)
            self._say(Moved(instance, number, start, end, num_bytes))

        moves.start(copies, done)

    def _open_lane(self, instance: str, host: str) -> Address:
        """Prepare for stages in other processes; return the address of hidden states from here."""
        hidden = self._worker(instance).hidden = HiddenStates(host)
        lane = self._lanes[instance] = queue.SimpleQueue()
        threading.Thread(target=self._follow_lane, args=(lane,), daemon=True).start()
        return hidden.address

    def _worker(self, instance: str) -> Worker:
        worker = self._cluster.engines[instance].worker
        assert isinstance(worker, Worker)
        return worker

    def _launch(self, message: Launch) -> None:
        instance, step = message.instance, message.step
        batch = self._decoders[instance].decode(message)
        ends, known = list[Future[None]](), self._ends[instance]
        known[step] = ends
        if len(known) > STEPS_KEPT:
            del known[next(iter(known))]

        def launched(stage: int, ended: End) -> None:
            assert isinstance(ended, Future)
            ends.append(ended)

        post = partial(self._step_ended, instance, step)
        self._worker(instance).launch(batch, message.origin, post, launched, step)

    def _end(self, end: StepEnd) -> "Future[None] | None":
        ends = self._ends[end.instance].get(end.step)
        return ends[end.stage] if ends else None

    def _step_ended(self, instance: str, step: int, found: StepDone | Failed) -> None:
        if isinstance(found, Failed):
            self._say(WorkerFailed(instance, *_told(found.error)))
            return
        stages = self._worker(instance).stages
        overruns = [stage.overruns for stage in stages]
        for stage in stages:
            stage.overruns = []
        counts = [(s.step.compiles, s.step.compile_s, s.step.late_compiles) for s in stages]
        results = (
            found.tokens,
            found.start,
            found.end,
            found.logprobs,
            found.details,
            found.prompt_details,
            found.stages,
        )
        self._say(StepEnded(instance, step, results, overruns, counts))


def _decoder(stages: Sequence[Stage]) -> BatchDecoder:
    return BatchDecoder(sum(len(stage.plan.pool_pages) for stage in stages))


def _told(error: Exception) -> tuple[bool, str]:
    """Return whether an error is the user's mistake, and its message."""
    if isinstance(error, JaxinferError):
        return True, str(error)
    return False, f"{type(error).__name__}: {one_line(error)}"


def main() -> None:
    """Run the process of a device group until the loop's process ends it, ignoring signals."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    sys.path.append(os.getcwd())  # See ``commands.app.main``.
    WorkerProcess(Connection(int(sys.argv[1])), int(sys.argv[2])).run()


if __name__ == "__main__":
    main()
