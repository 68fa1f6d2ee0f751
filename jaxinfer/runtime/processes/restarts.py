"""Restarts lost processes while the rest of their cluster continues."""

import threading
import time
from collections.abc import Mapping, Sequence
from functools import partial

from jaxinfer.config.cluster import ClusterConfig
from jaxinfer.config.processes import part_of, started_together
from jaxinfer.errors import JaxinferError, one_line
from jaxinfer.runtime.kv.outcome import Failed, ProcessLost
from jaxinfer.runtime.processes.pipeline_worker import AnyRemote, PipelineWorker
from jaxinfer.runtime.processes.process import Process
from jaxinfer.runtime.processes.process_group import OtherProcesses
from jaxinfer.runtime.processes.remote_worker import RemoteWorker
from jaxinfer.runtime.processes.restart_groups import (
    DegradedInstance,
    Hear,
    PoolRestart,
    Restarted,
    RestartGroup,
    RestartResult,
    WorkerRestart,
)


class Restarts:
    """Restarts lost processes, as often as their groups allow.

    Instances with attention groups in other processes continue without lost groups until these are
    back.

    A process that has loaded and compiled waits until the loop's thread takes it. From then on, the
    workers and channels are those of the new process.

    Args:
        others: starts the processes, as at the beginning.
        remotes: workers of the processes, by instance.
    """

    def __init__(
        self, config: ClusterConfig, others: OtherProcesses, remotes: Mapping[str, AnyRemote]
    ) -> None:
        self._others = others
        self._hear: Hear = lambda news: None
        self._lock = threading.Lock()
        self._closed = False
        self._homes: dict[str, RestartGroup] = {}
        self._of: dict[str, WorkerRestart] = {}
        self._rests = {
            n: DegradedInstance(w) for n, w in remotes.items() if isinstance(w, PipelineWorker)
        }
        for groups in started_together(config):
            here = {n: w for n, w in remotes.items() if w.pieces[0].process.name in groups}
            if here:
                rests = [self._rests[name] for name in here if name in self._rests]
                home = _home_of(config, groups, here, others, rests)
                self._of |= dict.fromkeys(here, home)
                self._add(home)
        for rest in self._rests.values():
            if rest.worker.needs_all:
                continue  # It is lost with any of them.
            rest.lenders = [
                PoolRestart(each.name, {each.name: part}, times, {each.name: each}, rest, others)
                for each in rest.worker.lending
                if (times := config.groups[each.name].restart)
                for part in [part_of(config, each.name)]
            ]
            for lender in rest.lenders:
                self._add(lender)

    def _add(self, home: RestartGroup) -> None:
        self._homes[home.name] = home
        self._watch(home)

    def listen(self, hear: Hear) -> None:
        """Call ``hear``, from any thread, on news of restarts, and at once on news not yet taken.

        A process that is being restarted counts as lost; this reports it before a step fails.
        """
        with self._lock:
            self._hear = hear
            threads = [home.thread for home in self._homes.values()]
            threads += [rest.thread for rest in self._rests.values()]
            for thread in threads:
                if thread and thread.ident is None:
                    thread.start()  # The thread that was about to start it was interrupted.
            for group, home in self._homes.items():
                if home.news:
                    hear(Restarted(group))
                elif home.starting:
                    home.tell_of_loss(hear)
            for name, rest in self._rests.items():
                if rest.news:
                    hear(Restarted(rest.news.group))
                elif rest.why:
                    hear(Failed(name, ProcessLost(rest.why)))

    def expect(self, instance: str, why: str) -> bool:
        """Return whether a lost instance will return; if so, its whole process counts as lost."""
        rest = self._rests.get(instance)
        return bool(rest and self._go_on(instance, rest, why)) or self._return(instance, why)

    def _return(self, instance: str, why: str) -> bool:
        """Return whether an instance that cannot continue will return; if so, end its process."""
        if rest := self._rests.get(instance):
            # It may have lost the rest after it was told to continue.
            rest.worker.give_up(ProcessLost(why))
        home = self._of.get(instance)
        if home is None:
            return False
        for process in home.processes.values():
            if process.lost:  # Its thread may still have to report that.
                self._lose(home, process, process.lost)
        with self._lock:
            is_on_its_way = home.starting or home.news is not None
            if not is_on_its_way and home.left:
                for process in home.processes.values():
                    process.give_up(f"instance {instance}: {why}")
            return is_on_its_way or home.left > 0

    def goes_without(self, instance: str) -> tuple[tuple[int, ...], bool]:
        """Return the lost shards of an instance's KV, and whether any will return."""
        if (rest := self._rests.get(instance)) is None:
            return (), False
        # A process that is not missed yet returns nothing that is lost by now.
        with self._lock:
            gone = (each for each in rest.lenders if each.is_clear)
            returns = any(each.starting or each.is_ready for each in gone)
        return tuple(rest.worker.without), returns

    def _go_on(self, instance: str, rest: DegradedInstance, why: str) -> bool:
        """Let an instance continue without its lost parts, if it can."""
        with self._lock:
            if rest.why or rest.news:
                return True
            if not (groups := rest.worker.lost_lenders):
                return False
            work = partial(self._have_go_on, instance, rest, why, groups)
            rest.why, rest.thread = why, threading.Thread(target=work, daemon=True)
            rest.thread.start()
        return True

    def _have_go_on(
        self, instance: str, rest: DegradedInstance, why: str, groups: Sequence[str]
    ) -> None:
        begin = time.perf_counter()
        error = None
        try:
            rest.worker.go_on()
        except Exception as lost:
            error = one_line(lost)
        # Otherwise, the restarted processes report it.
        is_told_here = not (error and self._return(instance, error))
        seconds, without = time.perf_counter() - begin, tuple(rest.worker.without)
        with self._lock:
            group, rest.why = " and ".join(groups), None
            if is_told_here:
                rest.news = RestartResult(group, [instance], why, seconds, error, without)
        self._hear(Restarted(group))
        for home in rest.lenders:
            if home.news:  # It exists before it can be used.
                self._hear(Restarted(home.name))

    def take(self, group: str) -> RestartResult | None:
        """Return the result of a group's restart if it has ended; the process is then in use."""
        with self._lock:
            for rest in self._rests.values():
                if rest.news and rest.news.group == group:
                    news, rest.news = rest.news, None
                    return news
            home = self._homes.get(group)
            if home is None or not home.news or not (home.news.error or home.is_clear):
                return None
            outcome, home.news = home.news, None
        if not outcome.error:
            try:
                home.use()
                for lender in home.lenders:
                    self._watch(lender)
            except BaseException:
                # Partly in use, for example after an interrupt: others must be started for them.
                for process in home.processes.values():
                    process.give_up(f"{outcome.why}; interrupted as it came to be in use again")
                raise
        return outcome

    def close(self) -> None:
        """Start no more processes."""
        self._closed = True

    def _watch(self, home: RestartGroup) -> None:
        for process in home.processes.values():
            # After the workers and channels, which are told of the loss first.
            process.on_loss.append(partial(self._lose, home, process))
            if process.lost:
                self._lose(home, process, process.lost)

    def _lose(self, home: RestartGroup, process: Process, why: str) -> None:
        with self._lock:
            if process not in home.processes.values() or home.starting or self._closed:
                return
            if not home.is_wanted or (home.news.error if home.news else not home.left):
                return  # Its instances are lost for good, like those of any process.
            thread = threading.Thread(target=self._start_again, args=(home, why), daemon=True)
            home.starting, home.news, home.why, home.thread = True, None, why, thread
            home.tell_of_loss(self._hear)
            thread.start()

    def _start_again(self, home: RestartGroup, why: str) -> None:
        begin = time.perf_counter()
        home.end(why)
        error: str | None = why
        while error and home.left and home.is_wanted and not self._closed:
            home.left -= 1
            error = self._attempt(home)
        seconds = time.perf_counter() - begin
        with self._lock:
            home.starting = False
            if not error or home.is_wanted:  # Otherwise, it returns with its instance, or never.
                home.news = RestartResult(home.name, [*home.instances], why, seconds, error)
        if not error:
            self._watch(home)
        self._hear(Restarted(home.name))

    def _attempt(self, home: RestartGroup) -> str | None:
        """Start the processes once; return why that failed, or None when they are ready."""
        processes: dict[str, Process] = {}
        try:
            for group, part in home.parts.items():
                # From here on, this one is closed together with the others.
                processes[group] = self._others.begin_again(group, part)
                if self._closed:
                    raise JaxinferError("closed")
            home.get_ready(processes)
        except Exception as error:
            for process in processes.values():
                process.close()
                process.wait_until_told()
            is_mistake = isinstance(error, JaxinferError)
            return str(error) if is_mistake else f"{type(error).__name__}: {one_line(error)}"
        home.processes = {group: processes[group] for group in home.processes}
        return None


def _home_of(
    config: ClusterConfig,
    groups: list[str],
    workers: Mapping[str, AnyRemote],
    others: OtherProcesses,
    rests: Sequence[DegradedInstance],
) -> WorkerRestart:
    """Return the home of one group, or of groups that share an instance, with its instances."""
    sides = {instance: others.side_of(instance) for instance in workers}
    pieces = [(name, piece) for name, worker in workers.items() for piece in worker.pieces]
    parts = {
        group: _as_planned(
            part_of(config, group), {n: p for n, p in pieces if p.process.name == group}
        )
        for group in groups
    }
    # Other instances continue without theirs.
    lenders = [each for r in rests if r.worker.needs_all for each in r.worker.lending]
    needed = [*(piece.process for _, piece in pieces), *lenders]
    processes = {process.name: process for process in needed}
    left = config.groups[needed[0].name].restart
    name = " and ".join(groups)
    return WorkerRestart(name, parts, left, processes, workers, sides, others, rests)


def _as_planned(config: ClusterConfig, workers: Mapping[str, RemoteWorker]) -> ClusterConfig:
    """Return ``config`` with the sizes that were chosen by free memory and speed."""
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
                stage.model_copy(
                    update={"layers": sum(pieces[i * each : (i + 1) * each]), "share": None}
                )
                for i, stage in enumerate(instance.stages)
            )
        instances[name] = instance.model_copy(update=found)
    return config.model_copy(update={"instances": instances})
