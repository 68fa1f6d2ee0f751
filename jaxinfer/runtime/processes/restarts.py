"""Processes that are lost and started again, while the rest of their cluster goes on."""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

from jaxinfer.config.cluster import ClusterConfig
from jaxinfer.config.stages import StageConfig
from jaxinfer.errors import JaxinferError, one_line
from jaxinfer.runtime.kv.outcome import Failed, ProcessLost
from jaxinfer.runtime.processes.pipeline_worker import AnyRemote, PipelineSide, PipelineWorker
from jaxinfer.runtime.processes.process_group import (
    AnotherProcess,
    OtherProcesses,
    wait_until_loaded,
)
from jaxinfer.runtime.processes.remote_worker import NobodyThere, Process, RemoteWorker
from jaxinfer.runtime.stage.sampler import SamplerShape
from jaxinfer.runtime.stage.stage_plan import StageFacts


@dataclass(frozen=True)
class Restarted:
    """There is news of a group's process: ``Restarts.take`` tells it."""

    group: str


@dataclass(frozen=True)
class RestartResult:
    """The outcome of a loss.

    Attributes:
        instances: instances of the process.
        why: the reason why it was lost.
        seconds: time from then until it was ready, or was given up.
        error: the reason why it could not be started; None if it was.
        without: numbers of the shards that its one instance has gone on without.
    """

    group: str
    instances: Sequence[str]
    why: str
    seconds: float
    error: str | None = None
    without: Sequence[int] = ()


@dataclass
class _Home:
    """Processes that are started again together: a group's, or those that share a pipeline.

    Attributes:
        name: of its groups.
        parts: of the cluster, by group; ``processes``: those that have them.
        left: how often they may be started.
        starting: whether a thread is about it, and ``why``: as one before was lost.
        prepared: of each instance, the sampler that the processes have.
        news: an outcome that nobody has taken.
    """

    name: str
    parts: Mapping[str, ClusterConfig]
    left: int
    processes: Mapping[str, Process]
    workers: Mapping[str, AnyRemote]
    sides: Mapping[str, AnotherProcess | PipelineSide]
    starting: bool = False
    why: str = ""
    prepared: Mapping[str, SamplerShape] | None = None
    news: RestartResult | None = None


@dataclass
class _Rest:
    """An instance that can go on without attention groups whose processes are lost.

    Attributes:
        why: as one is lost, while a thread is about it; ``news``: an outcome that nobody has taken.
    """

    worker: PipelineWorker
    why: str | None = None
    news: RestartResult | None = None


class Restarts:
    """Starts lost processes again, as often as their groups say.

    Instances with attention groups in other processes go on without these.

    What has loaded and compiled waits until the loop's thread takes it: from then on, its workers
    and the ways to and from them are those of the new process.

    Args:
        others: has started them at first; ``remotes``: their workers, by instance.
    """

    def __init__(
        self, config: ClusterConfig, others: OtherProcesses, remotes: Mapping[str, AnyRemote]
    ) -> None:
        self._rests: dict[str, _Rest] = {}
        self._others = others
        self._hear: Callable[[Restarted | Failed], object] = lambda news: None
        self._lock = threading.Lock()
        self._closed = False
        self._homes: dict[str, _Home] = {}
        self._of: dict[str, _Home] = {}
        for groups in config.started_together():
            here = {n: w for n, w in remotes.items() if w.pieces[0].process.name in groups}
            sides = {instance: others.side_of(instance) for instance in here}
            pieces = [(n, piece) for n, worker in here.items() for piece in worker.pieces]
            parts = {
                group: _as_planned(
                    config.part(group), {n: p for n, p in pieces if p.process.name == group}
                )
                for group in groups
            }
            processes = {piece.process.name: piece.process for _, piece in pieces}
            left = config.groups[groups[0]].restart
            home = _Home(" and ".join(groups), parts, left, processes, here, sides)
            self._homes[home.name] = home
            self._of |= dict.fromkeys(here, home)
            self._watch(home)
        for name, worker in remotes.items():
            if isinstance(worker, PipelineWorker) and name not in self._of:
                self._rests[name] = _Rest(worker)

    def listen(self, hear: Callable[[Restarted | Failed], object]) -> None:
        """Have a run told of news, by any thread, and of those that nobody has taken.

        Who is being started, or comes to be, has failed: nobody is to find out by a step.
        """
        with self._lock:
            self._hear = hear
            for group, home in self._homes.items():
                if home.news:
                    hear(Restarted(group))
                elif home.starting:
                    self._tell_of_loss(home)

            for name, rest in self._rests.items():
                if rest.news:
                    hear(Restarted(rest.news.group))
                elif rest.why:
                    hear(Failed(name, ProcessLost(rest.why)))

    def _tell_of_loss(self, home: _Home) -> None:
        for name in home.workers:
            self._hear(Failed(name, ProcessLost(home.why)))

    def expect(self, instance: str, why: str) -> bool:
        """Return whether a lost instance is to return; if so, all of its process is lost."""
        if rest := self._rests.get(instance):
            return self._go_on(instance, rest, why)
        home = self._of.get(instance)
        if home is None:
            return False
        for process in home.processes.values():
            if process.lost:  # Its thread may have still to tell of it.
                self._lose(home, process, process.lost)
        with self._lock:
            is_on_its_way = home.starting or home.news is not None
            if not is_on_its_way and home.left:
                for process in home.processes.values():
                    process.give_up(f"instance {instance}: {why}")
            return is_on_its_way or home.left > 0

    def _go_on(self, instance: str, rest: _Rest, why: str) -> bool:
        """Have an instance go on without what is lost of it, if it can."""
        with self._lock:
            if rest.why or rest.news:
                return True
            if groups := rest.worker.lost_lenders:
                rest.why = why
        if not groups:
            # It may have lost the rest after it was told that it could go on.
            rest.worker.give_up(ProcessLost(why))
            return False
        begin = time.perf_counter()

        def go_on() -> None:
            error = None
            try:
                rest.worker.go_on()
            except Exception as lost:
                error = one_line(lost)
                rest.worker.give_up(lost)
            seconds, without = time.perf_counter() - begin, tuple(rest.worker.without)
            with self._lock:
                group, rest.why = " and ".join(groups), None
                rest.news = RestartResult(group, [instance], why, seconds, error, without)
            self._hear(Restarted(group))

        threading.Thread(target=go_on, daemon=True).start()
        return True

    def take(self, group: str) -> RestartResult | None:
        """The news of a group, if there are any; what was started is in use when this returns."""
        with self._lock:
            for rest in self._rests.values():
                if rest.news and rest.news.group == group:
                    news, rest.news = rest.news, None
                    return news
        if (home := self._homes.get(group)) is None:
            return None
        with self._lock:
            outcome, home.news = home.news, None
        if outcome is None or outcome.error:
            return outcome
        assert home.prepared is not None
        for name, worker in home.workers.items():
            for side in home.sides[name].pieces:
                side.move_to(home.processes[side.group])
            for piece in worker.pieces:
                piece.move_to(home.processes[piece.process.name])
            worker.begin_again()
            if home.prepared[name] != worker.sampler:  # Asked for when it was ready.
                with suppress(NobodyThere):  # The first step for it will show it.
                    next(worker.prepare(worker.sampler, wait=False))
        return outcome

    def close(self) -> None:
        """Start none any more."""
        self._closed = True

    def _watch(self, home: _Home) -> None:
        for process in home.processes.values():
            # After the workers and the ways, which are told of the loss first.
            process.on_loss.append(partial(self._lose, home, process))
            if process.lost:
                self._lose(home, process, process.lost)

    def _lose(self, home: _Home, process: Process, why: str) -> None:
        with self._lock:
            if process not in home.processes.values() or home.starting or self._closed:
                return
            if home.news.error if home.news else not home.left:
                return  # Its instances are lost for good, as those of any process.
            home.starting, home.news, home.why = True, None, why
            self._tell_of_loss(home)
        threading.Thread(target=self._start_again, args=(home, why), daemon=True).start()

    def _start_again(self, home: _Home, why: str) -> None:
        begin = time.perf_counter()
        for process in home.processes.values():  # What they have is needed.
            if not process.lost:
                process.give_up(why)
            process.wait_until_told()
        error: str | None = why
        while error and home.left and not self._closed:
            home.left -= 1
            error = self._attempt(home)
        seconds = time.perf_counter() - begin
        with self._lock:
            home.starting = False
            home.news = RestartResult(home.name, [*home.workers], why, seconds, error)
        if not error:
            self._watch(home)
        self._hear(Restarted(home.name))

    def _attempt(self, home: _Home) -> str | None:
        """Start the processes once; return why that failed, or None when they are ready."""
        processes: dict[str, Process] = {}
        try:
            for group, part in home.parts.items():
                # From here on, whoever closes the others closes this one, too.
                processes[group] = self._others.begin_again(group, part)
                if self._closed:
                    raise JaxinferError("closed")
            home.prepared = _get_ready(home, processes)
        except Exception as error:
            for process in processes.values():
                process.close()
                process.wait_until_told()
            is_mistake = isinstance(error, JaxinferError)
            return str(error) if is_mistake else f"{type(error).__name__}: {one_line(error)}"
        home.processes = processes
        return None


def _get_ready(home: _Home, processes: Mapping[str, Process]) -> dict[str, SamplerShape]:
    """Have new processes load, compile and open all that the lost ones had; their samplers.

    Args:
        processes: by group.
    """
    loaded = {group: wait_until_loaded(process) for group, process in processes.items()}
    prepared: dict[str, SamplerShape] = {}
    for name, worker in home.workers.items():
        there = [(piece, piece.process.name) for piece in worker.pieces]
        for piece, group in there:
            for stage, plan in zip(piece.stages, loaded[group].plans[name], strict=True):
                _check_same(name, stage.plan, plan)
        if isinstance(worker, PipelineWorker):
            worker.follow_on([(processes[group], loaded[group]) for _, group in there])
        while prepared.get(name) != (wanted := worker.sampler):
            prepared[name] = wanted
            for piece, group in there:
                for _ in piece.prepare_on(processes[group], wanted):
                    pass
        for side in home.sides[name].pieces:
            side.open_on(processes[side.group])
        for piece, group in there:
            piece.emulate_on(processes[group])
    return prepared


def _as_planned(config: ClusterConfig, workers: Mapping[str, RemoteWorker]) -> ClusterConfig:
    """Return ``config`` with the sizes that free memory and speed decided, as they came out."""
    instances = {}
    for name, worker in workers.items():
        instance, plans = config.instances[name], [stage.plan for stage in worker.stages]
        found: dict[str, object] = {}
        if len(pages := {plan.num_pages for plan in plans}) == 1:
            found["num_pages"] = pages.pop()
        if instance.stages:
            pieces = [plan.layers.stop - plan.layers.start for plan in plans]
            each = instance.segments
            found["stages"] = tuple(
                StageConfig(group=stage.group, layers=sum(pieces[i * each : (i + 1) * each]))
                for i, stage in enumerate(instance.stages)
            )
        instances[name] = instance.model_copy(update=found)
    return config.model_copy(update={"instances": instances})


def _check_same(instance: str, before: StageFacts, now: StageFacts) -> None:
    """Raise JaxinferError where the loop's plan is none of what the new process has."""
    # Pages that the loop does not know of are not used.
    sizes = {name: getattr(before, name) for name in ("num_pages", "kv_bytes", "memory_bytes")}
    if now.num_pages < before.num_pages or replace(now, options=before.options, **sizes) != before:
        raise JaxinferError(
            f"instances.{instance} has another plan than before: {now.num_pages} pages of "
            f"{before.num_pages}, devices {now.devices}, layers {now.layers}"
        )
