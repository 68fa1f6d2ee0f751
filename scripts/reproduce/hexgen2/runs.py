"""HexGen-2's clusters, workloads, plans and runs."""

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from jaxinfer.config.run_file import as_run_file
from jaxinfer.lab.plan.problem import Problem, load_problem
from jaxinfer.papers.hexgen2.capacity import GroupRole, Modelled, signature_of
from jaxinfer.papers.hexgen2.certify import Certified
from jaxinfer.papers.hexgen2.flow import Flow, KVNetwork, PlacedGroup, shared_flow
from jaxinfer.papers.hexgen2.gpus import Group, Site
from jaxinfer.papers.hexgen2.planner import HexGen2Planner, HexGen2PlannerOptions
from jaxinfer.papers.hexgen2.run_file import as_part
from jaxinfer.papers.hexgen2.stages import Shape
from jaxinfer.report.metrics import RunMetrics
from jaxinfer.simulate.run import simulate
from jaxinfer.workload.lengths import BenchRequest
from jaxinfer.workload.synthetic import is_of_class
from scripts.reproduce.reproduction import Inputs, Work
from scripts.tables import CONFIGS

PLAN, CLUSTERS = CONFIGS / "plan" / "hexgen2.yaml", CONFIGS / "clusters"
CLASSES = ("HPLD", "HPHD", "LPHD", "LPLD")
# "online" has requests of all classes, at 75 % of the cluster's rate.
WORKLOADS = (*CLASSES, "online")
REQUESTS, LOAD = 1000, 0.75
# If instances have hundreds of requests at once, runs of 1,000 are mostly ramp and drain.
MANY = 2000
LLAMA, OPT = "llama-2-70b", "opt-30b"
# 100 Gb/s between nodes, as Figure 4 only shows a drawing; and 10 Gb/s.
FAST, SLOW = 12.5, 1.25
TRACE = "azure_conversation.csv"
GPUS = {"H100-SXM": "H100", "A100-80G-SXM": "A100", "L40": "L40", "RTX-A6000": "A6000"}


@dataclass(frozen=True)
class HexGen2Engine:
    """Assumed limits of the paper's engine.

    Attributes:
        step_s: seconds of each step.
        seqs: number of decodes of an instance at a time.
        prefill_tokens: largest number of tokens of a prefill step.
    """

    step_s: float = 0.020
    seqs: int = 32
    prefill_tokens: int = 8192


LIMITED, FREE = HexGen2Engine(), HexGen2Engine(0.0, 256)


def of_class(trace: Work, name: str) -> list[BenchRequest]:
    """Return the requests of a class, all at the start; those of all classes for ``online``."""
    chosen = [item for item in trace if name == "online" or is_of_class(item, name)]  # type: ignore[arg-type]
    return [replace(item, arrival=0.0) for item in chosen]


def draw(trace: Work, name: str, count: int = REQUESTS) -> list[BenchRequest]:
    """Draw different requests of a class; if it has fewer, some are repeated."""
    there, rng = of_class(trace, name), random.Random(0)
    return rng.sample(there, count) if count <= len(there) else rng.choices(there, k=count)


def poisson(work: Work, rate: float) -> list[BenchRequest]:
    """Return the same requests with Poisson arrivals at this rate."""
    rng, now, found = random.Random(1), 0.0, []
    for item in work:
        now += rng.expovariate(rate)
        found.append(replace(item, arrival=now))
    return found


@dataclass(frozen=True)
class HexGen2Cluster:
    """Nodes, a model and an engine.

    Attributes:
        hardware: path of the hardware file.
        model: name of the model.
        engine: limits of the engine.
    """

    hardware: Path
    model: str = LLAMA
    engine: HexGen2Engine = LIMITED

    def problem(self, work: Work, settings: Sequence[str] = ()) -> Problem:
        """Return the plan file's problem for these requests."""
        return load_problem(
            PLAN,
            [
                f"run.model={self.model}",
                f"run.simulate.hardware={self.hardware}",
                f"run.simulate.step_s={self.engine.step_s}",
                f"planner.decode.max_num_seqs={self.engine.seqs}",
                f"planner.prefill.max_num_batched_tokens={self.engine.prefill_tokens}",
                *settings,
            ],
        ).for_work(work, 1.0)


class Clusters:
    """The paper's clusters, with any network.

    Args:
        folder: folder for their files.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def setting(
        self, name: str, model: str = LLAMA, engine: HexGen2Engine = LIMITED, nic_gb_s: float = FAST
    ) -> HexGen2Cluster:
        """Return a cluster of configs/clusters, like ``heterogeneous_1``, with another network."""
        data = yaml.safe_load((CLUSTERS / f"hexgen2_{name}.yaml").read_text(encoding="utf-8"))
        return self._cluster(f"{name}_{nic_gb_s}", data, model, engine, nic_gb_s)

    def four_h100(self, engine: HexGen2Engine = LIMITED) -> HexGen2Cluster:
        """Return the cluster of Table 4: four H100s in one node, for OPT-30B."""
        nodes = {"h100": {"gpu": "H100-SXM", "gpus": 4}}
        return self._cluster("four_h100", _made_up(nodes), OPT, engine, FAST)

    def of_size(self, gpus: int, nic_gb_s: float = FAST) -> HexGen2Cluster:
        """Return nodes of eight GPUs, with equally many nodes of each of four kinds."""
        nodes = {
            f"n{number}": {"gpu": list(GPUS)[number % len(GPUS)], "gpus": 8}
            for number in range(gpus // 8)
        }
        return self._cluster(f"{gpus}_{nic_gb_s}", _made_up(nodes), LLAMA, LIMITED, nic_gb_s)

    def _cluster(
        self, name: str, data: dict[str, Any], model: str, engine: HexGen2Engine, nic_gb_s: float
    ) -> HexGen2Cluster:
        for node in data["nodes"].values():
            node["nic_gb_s"] = nic_gb_s
        path = self._folder / f"{name}.yaml"
        path.write_text(yaml.safe_dump(data, sort_keys=False), encoding="utf-8")
        return HexGen2Cluster(path, model, engine)


def _made_up(nodes: dict[str, Any]) -> dict[str, Any]:
    return {"source": "made up", "latency_s": 5e-5, "nodes": nodes}


def both(inputs: Inputs) -> tuple[Work, Clusters]:
    """Return the trace, and the clusters, whose files are kept."""
    folder = inputs.kept / "clusters"
    folder.mkdir(exist_ok=True)
    return inputs.work(TRACE), Clusters(folder)


@dataclass(frozen=True)
class Given:
    """A group of a given plan.

    Attributes:
        role: whether it prefills or decodes.
        group: its GPUs by node.
        stages: for each stage, the number of its node in the group, and its number of GPUs.
    """

    role: GroupRole
    group: Group
    stages: Shape


# Table 2, Llama-2-70B in setting 1: "H100 + A100, 1/2" and so on (TP/PP), with the nodes of the
# file.
H, A, L, R = range(4)
TABLE_2 = [
    Given("prefill", ((H, 1), (A, 1)), ((0, 1), (1, 1))),
    Given("prefill", ((A, 2), (R, 2)), ((0, 2), (1, 2))),
    Given("prefill", ((L, 4),), ((0, 4),)),
    Given("decode", ((H, 1), (A, 1)), ((0, 1), (1, 1))),
    Given("decode", ((A, 2), (R, 2)), ((0, 2), (1, 2))),
    Given("decode", ((L, 4),), ((0, 2), (0, 2))),
]


def alike(role: GroupRole, count: int, *stages: int) -> list[Given]:
    """Return ``count`` equal groups on the first node, with stages of these numbers of GPUs."""
    shape = tuple((0, tp) for tp in stages)
    return [Given(role, ((0, sum(stages)),), shape)] * count


def placed(capacity: Modelled, plan: Sequence[Given]) -> list[PlacedGroup]:
    """Place each group's layers and stages in the order with the highest rate."""
    found = []
    for given in plan:
        signature = signature_of(capacity.site, given.group)
        orders = dict.fromkeys([given.stages, given.stages[::-1]])
        ways = [capacity.carried_by(signature, shape, given.role) for shape in orders]
        best = max(ways, key=lambda carried: carried.rate)
        found.append(PlacedGroup(given.group, given.role, best))
    return found


@dataclass(frozen=True)
class Planned:
    """A plan for a workload.

    Attributes:
        problem: the planner's problem.
        flow: planned requests per second.
        part: the planned part of a run file.
        words: the plan in words.
        bound: upper bound on the flow of all plans; None if unknown.
    """

    problem: Problem
    flow: float
    part: Mapping[str, Any]
    words: str
    bound: float | None = None

    @property
    def tokens_s(self) -> float:
        """Planned output tokens per second."""
        work = self.problem.work
        return self.flow * sum(item.max_tokens for item in work) / len(work)

    def run(self, work: Work) -> RunMetrics:
        """Serve requests."""
        return simulate(as_run_file(self.problem.run_file(self.part)), work)

    def saturated(self) -> RunMetrics:
        """Serve all requests, which arrive at once."""
        return self.run(self.problem.work)

    def online(self, peak: float) -> RunMetrics:
        """Serve requests at 75 % of this peak rate."""
        return self.run(poisson(self.problem.work, LOAD * peak))


def tokens_s(metrics: RunMetrics) -> float:
    """Return output tokens per second without ramp and drain."""
    assert metrics.steady_output_tok_s is not None
    return metrics.steady_output_tok_s


def requests_s(metrics: RunMetrics) -> float:
    """Return requests per second without ramp and drain."""
    assert metrics.steady_requests_s is not None
    return metrics.steady_requests_s


def throughput(plan: Planned, workload: str) -> float:
    """Return output tokens per second: all at once, or at 75 % of that rate for ``online``."""
    metrics = plan.saturated()
    if workload == "online":
        metrics = plan.online(requests_s(metrics))
    return tokens_s(metrics)


def planned(cluster: HexGen2Cluster, work: Work) -> Planned:
    """Plan a cluster by our planner."""
    problem = cluster.problem(work)
    planner = planner_of(problem)
    found = planner.certified(problem)
    part = planner.candidate(problem, found).part
    site = planner.capacity(problem).site
    return Planned(problem, found.flow.total, part, words_of(site, found), found.bound)


def fixed(
    cluster: HexGen2Cluster, work: Work, plan: Sequence[Given], equal: bool = False
) -> Planned:
    """Return a given plan, with the planner's layers and flows for these requests.

    Args:
        equal: whether each pair gets an equal share, instead of the planner's flow.
    """
    problem = cluster.problem(work)
    capacity = planner_of(problem).capacity(problem)
    groups = placed(capacity, plan)
    flow = shared_flow(groups, KVNetwork(capacity.site, capacity.layer_bytes))
    shares = flow
    if equal:
        sides = [[i for i, g in enumerate(groups) if g.role == r] for r in ("prefill", "decode")]
        shares = Flow(1.0, {(i, j): 1.0 for i in sides[0] for j in sides[1]})
    own: dict[GroupRole, Mapping[str, Any]] = {
        "prefill": problem.planner["prefill"],
        "decode": problem.planner["decode"],
    }
    prompt = capacity.lengths.prompt
    part = as_part(capacity.site, groups, shares, own, prompt, capacity.prefill_tokens)
    used = sorted({number for pair in shares.pairs for number in pair})
    return Planned(problem, flow.total, part, _words(capacity.site, [groups[n] for n in used]))


def colocated(like: Planned, instances: Mapping[str, Any] | None = None, seqs: int = 32) -> Planned:
    """Serve whole requests on a plan's instances, or on others, by the least load."""
    there = like.part["instances"] if instances is None else instances
    own = {"max_num_seqs": seqs, "max_num_batched_tokens": 4096}
    made = {name: {"stages": instance["stages"], **own} for name, instance in there.items()}
    part = {**like.part, "instances": made, "system": {"name": "least_loaded"}}
    return Planned(like.problem, 0.0, part, like.words)


def planner_of(problem: Problem) -> HexGen2Planner:
    """Return a plan file's planner."""
    given = {name: value for name, value in problem.planner.items() if name != "name"}
    return HexGen2Planner(HexGen2PlannerOptions.model_validate(given))


def words_of(site: Site, found: Certified) -> str:
    """Return the groups that requests go through, in short."""
    used = sorted({number for pair in found.flow.pairs for number in pair})
    return _words(site, [found.groups[number] for number in used])


def _words(site: Site, groups: Sequence[PlacedGroup]) -> str:
    sides = []
    for role in ("prefill", "decode"):
        names = Counter(_name(site, group) for group in groups if group.role == role)
        each = (f"{count} x {name}" if count > 1 else name for name, count in names.items())
        sides.append("; ".join(each))
    return " / ".join(sides)


def _name(site: Site, group: PlacedGroup) -> str:
    stages = []
    for node, tp, _, _ in group.layers(site):
        gpu = GPUS[site.nodes[node].gpu]
        stages.append(f"{tp}{gpu}" if tp > 1 else gpu)
    return "+".join(stages)
