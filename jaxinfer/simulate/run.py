"""Simulates a workload on a modelled cluster: the serving loop in virtual time."""

import gc
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from jaxinfer.caches.eviction import later_uses
from jaxinfer.config.groups import GroupConfig
from jaxinfer.config.resolve import resolve
from jaxinfer.config.run_file import RunFile
from jaxinfer.config.site import model_site
from jaxinfer.config.site_values import SiteGroup
from jaxinfer.errors import JaxinferError
from jaxinfer.report.metrics import RunMetrics
from jaxinfer.report.recorder import Recorder
from jaxinfer.serving.loop import ServingLoop
from jaxinfer.serving.request_state import RequestState
from jaxinfer.serving.world import Event, StepDone
from jaxinfer.simulate.beyond import BeyondMeasured
from jaxinfer.simulate.cluster import ModelledCluster, model_cluster
from jaxinfer.simulate.requests import ModelledRequests
from jaxinfer.simulate.runs import DecodeRuns
from jaxinfer.simulate.world import SimulatedWorld
from jaxinfer.workload.lengths import BenchRequest

OnRequest = Callable[[RequestState, Sequence[float]], None]


def simulate(
    config: RunFile,
    work: Sequence[BenchRequest],
    run_dir: str | Path | None = None,
    on_request: OnRequest = lambda request, times: None,
    about: Mapping[str, object] | None = None,
) -> RunMetrics:
    """Serve requests of given lengths on the cluster that a run file describes.

    Args:
        run_dir: gets a numbered folder with the run's files, as a real run does.
        on_request: called with each request that has ended, and the times of its tokens.
        about: additional entries of ``run.json``, as JSON values.

    Raises:
        JaxinferError: the run file does not describe a valid cluster, or a request can never fit.
    """
    cluster = prepare(config)
    return serve(cluster, work, run_dir, on_request, about=about)


def prepare(config: RunFile) -> ModelledCluster:
    """Return everything that ``serve`` needs except requests.

    Raises:
        JaxinferError: the run file does not describe a valid cluster.
    """
    return model_cluster(model_site(resolve(config)))


def serve(
    cluster: ModelledCluster,
    work: Sequence[BenchRequest],
    run_dir: str | Path | None = None,
    on_request: OnRequest = lambda request, times: None,
    start: float = 0.0,
    about: Mapping[str, object] | None = None,
    on_step: Callable[[StepDone], None] | None = None,
    in_runs: bool = True,
) -> RunMetrics:
    """Serve on a modelled cluster; ``compiles`` and related figures are 0.

    Args:
        start: start time in seconds, see ``SimulatedWorld``; ``wall_s`` still counts from 0.
        about: see ``simulate``.
        on_step: called with each step that has ended; it must also work for decodes that advance
            together.
        in_runs: whether steps that only decode may be launched without the loop; the result is the
            same.
    """
    site, modelled = cluster.resolved, cluster.instances
    assert site
    system = site.new_system()
    longest = cluster.site.model.max_position_embeddings if cluster.site else None
    requests = ModelledRequests(work, site.run_file.workload, site.instances, longest)
    alike = not system.needs_decode_rows, requests.has_tokens, requests.num_output
    configs = ((name, each.config) for name, each in modelled.items())
    uses = later_uses((name, config.eviction, config.page_size) for name, config in configs)
    instances = [
        each.new_instance(name, cluster.fits.get(name), *alike, uses=uses)
        for name, each in modelled.items()
    ]
    arriving: Iterable[RequestState] = requests.by_arrival()
    if uses:
        arriving = list(arriving)
        uses.begin(arriving)
    world = SimulatedWorld(cluster, arriving, start)
    waiting, beyond = requests.by_ends(), BeyondMeasured(modelled)

    def on_finish(request: RequestState) -> None:
        if request.error:
            raise JaxinferError(request.error)
        if ledger:
            ledger.ended(request)
        if uses:
            uses.ended(request)
        if waiting:
            for number in waiting.ended(request.id):
                world.add(requests.after_an_end(number, request, world.now()))
        recorder.add_request(request, request.id)
        (times,) = recorder.add_prompt([request])
        on_request(request, times)

    def on_event(event: Event) -> None:
        recorder.add_event(event, loop)
        if isinstance(event, StepDone):
            beyond.add_step(event)
            if on_step:
                on_step(event)

    def describe() -> dict[str, object]:
        return describe_run(cluster, work) | dict(about or {})

    keeps, counts = site.run_file.ledger, site.counts_transfer
    with Recorder(run_dir, describe, counts, keeps_ledger=keeps, hears=False) as recorder:
        ledger = recorder.ledger
        seen = ledger.around(world) if ledger else world
        looks = run_dir or on_step or any(each.measured for each in modelled.values())
        totals, alone = recorder.totals, not (waiting or uses)
        runs = DecodeRuns(world, seen, on_event, None if looks else totals.add_run, alone)
        given = requests.check_stop, on_finish, on_event, requests.predict, None
        loop = ServingLoop(seen, instances, system, *given, runs if in_runs else None)
        if ledger:
            ledger.watch(loop)
        # Opening a folder calls git and reads files; that is not part of the loop.
        started = time.perf_counter()
        with _rare_collections():
            loop.run()
        loop_s = time.perf_counter() - started
        return recorder.finish(
            loop,
            len(requests),
            0,
            overruns={},
            lost={},
            preemptions=sum(instance.num_preemptions for instance in instances),
            num_pages=sum(each.pool_pages for each in modelled.values() if each.config.computes),
            loop_s=loop_s,
            launching_s=0.0,
            compiles=0,
            compile_s=0.0,
            late_compiles=0,
            role_s={i.name: i.role_seconds(world.now()) for i in instances},
            efficiency=cluster.efficiency,
            beyond=beyond.found(),
        )


def _played(group: SiteGroup | GroupConfig) -> str:
    slower = f", {group.slowdown:g} times slower" if group.slowdown != 1 else ""
    return f"{group.kind}{slower}"


def describe_run(cluster: ModelledCluster, work: Sequence[BenchRequest]) -> dict[str, object]:
    """Describe the cluster and the workload, as JSON values."""
    from jaxinfer.report.origin import FACTS, asked_for  # Only the requests that are kept.

    site, modelled = cluster.resolved, cluster.site
    assert site
    config = site.run_file
    placement, groups = modelled and modelled.placement, (modelled or site.cluster).groups
    costs = config.simulate.model_dump(
        exclude=None if placement else {"hardware": True, "groups": {"__all__": {"node"}}}
    )
    gpus = ", ".join(f"{name} ({_played(group)})" for name, group in groups.items())
    return {
        "model": config.model,
        "system": dict(config.system),
        "ttft_counts_transfer": site.counts_transfer,
        "emulated": [f"simulated on {gpus}"],
        **asked_for(config, work, FACTS),
        "simulate": costs,
        "instances": cluster.describe(),
        "links": [link.model_dump() for link in config.links],
        **({"hardware": placement.describe()} if placement else {}),
    }


@contextmanager
def _rare_collections() -> Iterator[None]:
    """Have Python search for cyclic garbage less often: each search visits all requests and pages.

    Threads of the same process are affected, too, but for nothing except memory.
    """
    first, *others = gc.get_threshold()
    gc.set_threshold(max(first, 100_000) if first else 0, *others)
    try:
        yield
    finally:
        gc.set_threshold(first, *others)
