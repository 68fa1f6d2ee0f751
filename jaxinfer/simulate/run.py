"""A workload on a modelled cluster: the serving loop in virtual time."""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

from jaxinfer.config import RunFile
from jaxinfer.errors import JaxinferError
from jaxinfer.report.metrics import RunMetrics, RunTotals, run_metrics
from jaxinfer.report.run_folder import RunFolder
from jaxinfer.serving.loop import ServingLoop
from jaxinfer.serving.request_state import RequestState
from jaxinfer.serving.step_fit import StepFit
from jaxinfer.serving.world import Event, StepDone, TransferDone
from jaxinfer.simulate.cluster import ModelledCluster, model_cluster
from jaxinfer.simulate.nodes import place_groups
from jaxinfer.simulate.world import SimulatedWorld
from jaxinfer.systems.registry import make_system
from jaxinfer.workload.lengths import BenchRequest

OnRequest = Callable[[RequestState, Sequence[float]], None]


def simulate(
    config: RunFile,
    work: Sequence[BenchRequest],
    run_dir: str | Path | None = None,
    on_request: OnRequest = lambda request, times: None,
) -> RunMetrics:
    """Serve requests of given lengths on the cluster that a run file describes.

    Args:
        run_dir: gets a numbered folder with the run's files, as a real run does.
        on_request: called with each request that has ended, and when its tokens were there.

    Raises:
        JaxinferError: the cluster cannot be what the run file says, or a request can never fit.
    """
    named = config.cluster().instances
    system = make_system(config.system, named)
    cluster = model_cluster(config, system.routes(named))
    relative = config.simulate.fit == "relative"
    fits = {name: cluster.fit(name, relative) for name in named} if system.needs_fits else {}
    return serve(config, cluster, fits, work, run_dir, on_request)


def serve(
    config: RunFile,
    cluster: ModelledCluster,
    fits: Mapping[str, StepFit],
    work: Sequence[BenchRequest],
    run_dir: str | Path | None,
    on_request: OnRequest = lambda request, times: None,
) -> RunMetrics:
    """The same on a cluster that has been modelled; ``compiles`` and the like are 0.

    Args:
        fits: by instance, what the system may predict with.
    """
    system = make_system(config.system, cluster.instances)
    counts = config.metrics.counts_transfer(system)
    _check_lengths(config, work)
    has_tokens = any(item.prompt_token_ids for item in work)
    instances = [
        modelled.new_instance(name, fits.get(name), not system.needs_decode_rows, has_tokens)
        for name, modelled in cluster.instances.items()
    ]
    world = SimulatedWorld(
        {name: modelled.cost for name, modelled in cluster.instances.items()},
        {name: modelled.segments for name, modelled in cluster.instances.items()},
        {name: modelled.devices for name, modelled in cluster.instances.items()},
        cluster.lanes,
        cluster.capacities,
        _by_arrival(work),
    )
    totals, started = RunTotals(), time.perf_counter()
    with ExitStack() as stack:
        folder = None
        if run_dir:
            description = describe(config, cluster.describe(), counts)
            folder = stack.enter_context(RunFolder(Path(run_dir), description))

        def on_finish(request: RequestState) -> None:
            if request.error:
                raise JaxinferError(request.error)
            times = request.metrics.delivered(counts)
            totals.add_request(request, times)
            on_request(request, times)
            if folder:
                folder.add_request(request, counts)

        def on_event(event: Event) -> None:
            if isinstance(event, StepDone):
                totals.add_step(event)
                if folder:
                    folder.add_step(event, loop.hand_offs.moving)
            elif folder and isinstance(event, TransferDone):
                folder.add_transfer(event, loop.instances)

        loop = ServingLoop(world, instances, system, on_finish=on_finish, on_event=on_event)
        loop.run()
        metrics = run_metrics(
            totals, len(work), 0, world.now(), waited_s=world.now(), launching_s=0.0,
            preemptions=sum(instance.num_preemptions for instance in instances),
            num_pages=sum(sum(m.num_pages) - len(m.num_pages) for m in cluster.instances.values()),
            compiles=0, compile_s=0.0, late_compiles=0,
        )  # fmt: skip
        metrics.loop_s = time.perf_counter() - started
        if folder:
            folder.finish(asdict(metrics), {}, {}, system.report())
    return metrics


def _check_lengths(config: RunFile, work: Sequence[BenchRequest]) -> None:
    """Raises JaxinferError where there is none, or one is longer than an instance takes."""
    if not work:
        raise JaxinferError("no requests")
    limits = [options.max_model_len for options in config.cluster().instances.values()]
    longest = min((limit for limit in limits if limit), default=math.inf)
    for number, item in enumerate(work):
        if item.prompt_len + item.max_tokens > longest:
            raise JaxinferError(
                f"request {number}: {item.prompt_len} prompt and {item.max_tokens} output tokens, "
                f"max_model_len is {longest}"
            )


def _by_arrival(work: Sequence[BenchRequest]) -> Iterator[RequestState]:
    """One by one, so that those that have ended are forgotten."""
    for number in sorted(range(len(work)), key=lambda number: work[number].arrival):
        item = work[number]
        tokens = item.prompt_token_ids or ()
        yield RequestState(str(number), item.prompt_len, item.max_tokens, item.arrival, tokens)


def describe(config: RunFile, instances: object, counts: bool) -> dict[str, object]:
    """What runs where, as JSON values."""
    placement = place_groups(config.cluster(), config.simulate, config.own)
    groups = placement.cluster.groups if placement else config.groups
    costs = config.simulate.model_dump(
        exclude=None if placement else {"hardware": True, "groups": {"__all__": {"node"}}}
    )
    gpus = {name: group.kind for name, group in groups.items()}
    return {
        "model": config.model,
        "system": dict(config.system),
        "ttft_counts_transfer": counts,
        "emulated": [f"all: simulated on {', '.join(f'{n} ({k})' for n, k in gpus.items())}"],
        "simulate": costs,
        "instances": instances,
        "links": [link.model_dump() for link in config.links],
        **({"hardware": placement.describe()} if placement else {}),
    }
