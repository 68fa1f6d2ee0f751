"""Repeats a finished real run in virtual time, to measure the simulator's error."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from jaxinfer.config.cluster import ClusterConfig, InstanceConfig, LinkConfig
from jaxinfer.config.costs import SimulateOptions
from jaxinfer.config.layer_split import shared_layers
from jaxinfer.config.nodes import NetworkPath
from jaxinfer.config.resolve import resolve
from jaxinfer.config.run_file import as_run_file
from jaxinfer.config.site_checks import check_played
from jaxinfer.errors import JaxinferError
from jaxinfer.hardware.catalogue import ITEMSIZES
from jaxinfer.hardware.network import Link
from jaxinfer.report.records import RequestRecord, RunRecord, read_run
from jaxinfer.report.run_folder import run_folders
from jaxinfer.report.summary import figures, number_text
from jaxinfer.serving.batch import Work
from jaxinfer.serving.step_fit import StepFit
from jaxinfer.simulate.cluster import ModelledCluster, ModelledInstance, lanes_between
from jaxinfer.simulate.run import serve
from jaxinfer.simulate.stage_path import StagePath
from jaxinfer.steps.profile import Profile, profile_folder, read_profile
from jaxinfer.steps.shapes import StepLimits
from jaxinfer.steps.times import StepTimes
from jaxinfer.workload.lengths import BenchRequest


@dataclass(frozen=True)
class ProfiledTimes:
    """The step times in a real instance's profile.

    Attributes:
        slowdowns: emulated slowdown of each stage.
        links: link to the next stage, if emulated.
        hidden_bytes: bytes of one token's hidden states.
    """

    limits: StepLimits
    times: Sequence[StepTimes]
    slowdowns: Sequence[float]
    links: Sequence[LinkConfig | None]
    hidden_bytes: int

    def stages(self, work: Work) -> list[float]:
        """Return the seconds of each stage."""
        both = zip(self.times, self.slowdowns, strict=True)
        return [slowdown * times.seconds(work) for times, slowdown in both]

    def hops(self, work: Work) -> list[float]:
        """Return the seconds between stages; hidden states are padded to their bucket."""
        tokens = self.limits.smallest(work.singles, work.tokens, work.sampled).tokens
        num_bytes = tokens * self.hidden_bytes
        return [link.seconds(num_bytes) if link else 0.0 for link in self.links]


def replay(folder: Path, out: Path) -> tuple[RunRecord, RunRecord]:
    """Simulate the run whose files are in ``folder``, into a numbered folder in ``out``.

    Returns:
        The real run and the simulated one.

    Raises:
        JaxinferError: the run cannot be read, is not a real one, or used its prefix cache; or one
            of its instances has no profile, or has attention or FFN groups.
    """
    real = read_run(folder, "real")
    run = real.run
    if "measured_gb_s" not in run:
        raise JaxinferError(f"{folder}: not a real run, or one of an older version")
    if run["lost"] or run.get("restarts") or run["metrics"]["failed"]:
        raise JaxinferError(f"{folder}: the run lost an instance, or requests of it failed")
    if run["metrics"]["cached_tokens"]:
        raise JaxinferError(f"{folder}: the run used its prefix cache, whose hits are not replayed")
    # Its costs are the profile's, not those of a model of the instance.
    config = as_run_file(run["run_file"]).model_copy(update={"simulate": SimulateOptions()})
    site = resolve(config)
    cluster = site.cluster
    for name, instance in cluster.instances.items():
        if instance.is_spread or instance.ffn_groups:
            kind = "attention" if instance.is_spread else "FFN"
            raise JaxinferError(
                f"{folder}: instance {name} has {kind} groups, of whose parts in a step its "
                "profile does not tell: such runs are not replayed"
            )
    check_played(cluster)
    read = {
        name: _instance(
            cluster, cluster.instances[name], described, profile_of(folder, name, described)
        )
        for name, described in run["instances"].items()
    }
    instances = {name: instance for name, (instance, _) in read.items()}
    lanes: dict[tuple[str, str], Sequence[StagePath]] = {}
    capacities: dict[Link, float] = {}
    for names, gb_s in run["measured_gb_s"].items():
        ends = source, dest = tuple(names.split(" -> "))
        paths = _paths(cluster, instances[source], instances[dest], gb_s)
        lanes[ends] = lanes_between(instances[source], instances[dest], paths)
        capacities |= {link: rate for path in paths.values() for link, rate in path.links.items()}
    work = [
        BenchRequest(None, request.prompt_len, len(request.token_times), request.arrival)
        for request in sorted(real.requests, key=_order)
    ]
    fits = {name: fit for name, (_, fit) in read.items() if fit}
    serve(ModelledCluster(instances, lanes, capacities, site, fits), work, out)
    return real, read_run(run_folders(out)[-1], "simulated")


def _order(request: RequestRecord) -> tuple[float, list[int]]:
    """Return a key that sorts requests by arrival; ids count up, whatever else is in them."""
    return request.arrival, [int(number) for number in re.findall(r"\d+", request.id)]


def profile_of(folder: Path, name: str, described: Mapping[str, Any]) -> Profile:
    """Read the profile that an instance of a real run used.

    Raises:
        JaxinferError: the profile no longer exists.
    """
    return read_profile(profile_file(folder, name, described))


def profile_file(
    folder: Path,
    name: str,
    described: Mapping[str, Any],
    kept: Callable[[Path], Path] = lambda path: path,
) -> Path:
    """Return the file of the profile that an instance of a real run used.

    Args:
        folder: folder of the run, which has a copy if the profile existed then.
        kept: returns the file to read, given the path of the profile of whole steps.

    Raises:
        JaxinferError: the profile no longer exists.
    """
    paths = [kept(at / f"{described['profile']}.json") for at in (folder, profile_folder())]
    for path in paths:
        if path.is_file():
            return path
    raise JaxinferError(
        f"{folder}: instance {name}: no profile {paths[-1]}, by which its run went: a replay goes "
        "by measured steps; jaxinfer profile RUNFILE, with the run's file, measures them for all "
        "runs of it"
    )


def _instance(
    cluster: ClusterConfig, config: InstanceConfig, described: Mapping[str, Any], profile: Profile
) -> tuple[ModelledInstance, StepFit | None]:
    """Model an instance as it was; also return the fit that its Balancer used."""
    stages = described["stages"]
    groups = [stage["group"] for stage in stages]
    slowdowns = [cluster.groups[group].slowdown for group in groups]
    limits = StepLimits(
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_pages=-(-described["max_model_len"] // config.page_size),
        page_size=config.page_size,
        given_buckets=config.token_buckets,
    )
    cost = ProfiledTimes(
        limits,
        [StepTimes.fit(limits, profile.points, number) for number in range(len(stages))],
        slowdowns,
        [cluster.link(a, b) for a, b in pairwise(groups)],
        4 * described["hidden_size"],
    )
    heads, size = described["kv_heads"]
    itemsize = ITEMSIZES[stages[0]["dtype"]]
    instance = ModelledInstance(
        config,
        groups,
        [stage["layers"] for stage in stages],
        [stage["num_pages"] for stage in stages],
        2 * heads * size * itemsize,
        cost,
        segments=1,
        # A stage's segments share its devices.
        devices=[number // config.segments for number in range(len(groups))],
    )
    return instance, profile.fit(slowdowns) if profile.has_fits else None


def _paths(
    cluster: ClusterConfig, source: ModelledInstance, dest: ModelledInstance, gb_s: float
) -> dict[tuple[str, str], NetworkPath]:
    """Return the emulated links between two instances' groups, or the rate that the probe found."""
    found = {}
    for i, j, _ in shared_layers(tuple(source.layers), tuple(dest.layers)):
        ends = source.groups[i], dest.groups[j]
        link = cluster.link(*ends)
        rate = (link.gb_s if link else gb_s) * 1e9
        found[ends] = NetworkPath({ends: rate}, link.latency_s if link else 0.0)
    return found


def fidelity(real: RunRecord, simulated: RunRecord) -> Table:
    """Return a table of the figures of both runs, and of the differences."""
    table = Table(box=None, pad_edge=False)
    for column in ("", "real", "simulated", "difference"):
        table.add_column(column, justify="right" if column else "left")
    ours, theirs = figures(simulated), figures(real)
    rows = [
        ("makespan (s)", theirs.wall_s, ours.wall_s),
        *(
            (f"{name.replace('_', ' ').upper()} (s)", getattr(theirs, name), getattr(ours, name))
            for name in ("ttft_p50", "ttft_p99", "tbt_p50", "tbt_p99")
        ),
        ("KV moved (bytes)", theirs.num_bytes, ours.num_bytes),
        ("preemptions", theirs.preemptions, ours.preemptions),
    ]
    for name, truth, found in rows:
        off = f"{found / truth - 1:+.1%}" if truth and found is not None else "-"
        both = ("-" if value is None else number_text(value) for value in (truth, found))
        table.add_row(name, *both, off)
    apart = furthest_apart(real, simulated)
    table.add_row("output tokens over time, furthest apart", "", "", f"{apart:.1%}")
    return table


def overruns(real: RunRecord) -> list[str]:
    """Report instances whose emulated steps were late by more than 1 % of the run.

    Such a run is slower than the devices that it emulates, so its figures differ from a simulation.
    """
    return [
        f"{name}: {late['steps']} steps overran the emulated device, by {late['seconds']:.3g} s in "
        "all: the machine was too slow for it, so the real run is slower than what it emulates "
        "(give its group a larger slowdown)"
        for name, late in real.run["overruns"].items()
        if late["seconds"] > 0.01 * real.wall_s
    ]


def furthest_apart(real: RunRecord, simulated: RunRecord) -> float:
    """Return the largest gap between both runs' output tokens so far, as a share of all tokens."""
    times = [
        np.sort([time for request in run.requests for time in request.token_times])
        for run in (real, simulated)
    ]
    at = np.concatenate(times)
    counts = [np.searchsorted(sorted_times, at, side="right") for sorted_times in times]
    return float(np.abs(counts[0] - counts[1]).max() / len(times[0]))
