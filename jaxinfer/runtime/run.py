"""A run in the real world, round by round."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict

from jaxinfer.report.metrics import RunMetrics
from jaxinfer.report.progress import RunProgress
from jaxinfer.report.recorder import Recorder
from jaxinfer.request import RequestOutput
from jaxinfer.runtime.cluster import Cluster
from jaxinfer.runtime.efficiency import real_efficiency
from jaxinfer.runtime.request_feed import RequestFeed
from jaxinfer.runtime.stage.sampling_inputs import sampling_of
from jaxinfer.runtime.world import RealWorld
from jaxinfer.serving.instance import Instance
from jaxinfer.serving.kv_shards import KVShards
from jaxinfer.serving.loop import ServingLoop
from jaxinfer.serving.request_state import RequestState
from jaxinfer.serving.step_fit import StepFit
from jaxinfer.serving.system import System
from jaxinfer.serving.world import Event, StepDone
from jaxinfer.workload.predictor import Predict


class Run:
    """Serves the requests of a feed on all instances of a cluster. The run's clock starts at once.

    Args:
        system: system in the state that it has before a run.
        kv: KV shards by instance at the start.
        fits: fits of step times by instance, for the system's predictions.
        watchdog_s: see ``RealWorld``.
        requests: requests that the feed has already read.
        on_output: called with each output once its last token exists.

    Attributes:
        lost: reasons for instances that have failed and are not being restarted.
    """

    def __init__(
        self,
        cluster: Cluster,
        system: System,
        kv: Mapping[str, KVShards],
        fits: Mapping[str, StepFit],
        watchdog_s: float | None,
        feed: RequestFeed,
        requests: Sequence[RequestState],
        recorder: Recorder,
        bar: RunProgress,
        on_output: Callable[[RequestOutput], None],
        predict: Predict | None = None,
    ) -> None:
        self._cluster, self._feed, self._groups = cluster, feed, feed.groups
        self._recorder, self._bar, self._on_output = recorder, bar, on_output
        self._late = cluster.late_compiles
        self._num_failed = 0
        cluster.take_overruns()  # Runs that were not recorded.
        engines = cluster.engines.items()
        self._fits = fits
        self._instances = {name: e.new_instance(kv[name], fits.get(name)) for name, e in engines}
        self._world = RealWorld(
            {name: engine.worker for name, engine in engines},
            requests,
            cluster.channels,
            watchdog_s,
            lambda: feed.groups.more_to_come,
            cluster.restarts,
        )
        self._ledger = ledger = recorder.ledger
        self._loop = ServingLoop(
            ledger.around(self._world) if ledger else self._world,
            self._instances.values(),
            system,
            feed.answers.check_stop,
            self._on_finish,
            self._on_event,
            predict,
            self._renew,
        )
        if ledger:
            ledger.watch(self._loop, cluster.uses.known if cluster.uses else ())

    @property
    def lost(self) -> dict[str, str]:  # noqa: D102
        world = self._world
        return {name: why for name, why in world.lost.items() if name not in world.returning}

    @property
    def kv(self) -> dict[str, KVShards]:
        """Current KV shards of each instance."""
        return {name: instance.kv for name, instance in self._instances.items()}

    def _renew(self, name: str) -> Instance:
        engine, before = self._cluster.engines[name], self._instances[name]
        instance = engine.new_instance(engine.new_kv(), self._fits.get(name))
        instance.follow(before, self._world.now())
        self._instances[name] = instance
        return instance

    def rounds(self) -> Iterator[None]:
        """Serve until all requests have been read and have ended, and yield after each round.

        A caller that stops after a round leaves no step and no transfer in flight.

        Raises:
            Exception: the error that ended reading or serving requests.
        """
        try:
            for _ in self._loop.rounds():
                try:
                    yield
                    self._world.add(self._feed.read(self._bar.update, self._world.is_idle))
                    self._world.add(self._feed.due(self._world.now()))
                except (GeneratorExit, Exception):
                    self._world.drain()
                    raise
                self._bar.requests_known(self._groups.num_parents)
            self._feed.check_all_came()
        finally:
            for instance in self._instances.values():
                instance.kv.on_free = lambda: None  # The loop must not outlive the run.

    def _on_finish(self, request: RequestState) -> None:
        self._world.add(self._groups.released_by(request))
        if self._ledger:
            self._ledger.ended(request)
        if self._cluster.uses:
            self._cluster.uses.ended(request)
        self._recorder.add_request(request, sampling_of(request).parent, request.output_token_ids)
        if siblings := self._groups.done_with(request):
            self._world.add(self._feed.one_ended(request, self._world.now()))
            self._recorder.add_prompt(siblings)
            self._num_failed += any(sibling.error for sibling in siblings)
            self._on_output(self._feed.answers.output(siblings))
            self._bar.request_done()

    def _on_event(self, event: Event) -> None:
        if isinstance(event, StepDone):
            for row in event.batch.rows if self._groups.held_back else ():
                if row.samples:
                    self._world.add(self._groups.released_by(row.request))
        self._recorder.add_event(event, self._loop)
        if isinstance(event, StepDone):
            self._bar.step_done(self._recorder.totals)

    def finish(self) -> RunMetrics:
        """Return the metrics, once all rounds are over."""
        world, stages = self._world, self._cluster.stages
        return self._recorder.finish(
            self._loop,
            self._groups.num_parents,
            self._num_failed,
            preemptions=sum(each.num_preemptions for each in self._instances.values()),
            overruns=self._cluster.take_overruns(),
            lost=world.lost,
            restarts=[asdict(outcome) for outcome in world.restarted],
            num_pages=sum(
                sum(stage.plan.pool_pages) - len(stage.plan.pool_pages)
                for name, engine in self._cluster.engines.items()
                if self._instances[name].options.computes
                for stage in engine.stages
            ),
            compiles=sum(stage.step.compiles for stage in stages),
            compile_s=sum(stage.step.compile_s for stage in stages),
            late_compiles=self._cluster.late_compiles - self._late,
            loop_s=world.now() - world.waited_s - world.launching_s,
            launching_s=world.launching_s,
            role_s={name: i.role_seconds(world.now()) for name, i in self._instances.items()},
            efficiency=real_efficiency([stage.plan for stage in stages]),
        )
