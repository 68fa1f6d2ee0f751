"""Hetis: stages of one kind of GPUs, and the slowest GPUs only for attention (section 4.1).

Prefill times of the kinds of GPUs decide how layers are divided, and which GPUs get none. Of all
numbers of instances and splits of stages, those with the fastest full step of their largest stage
are simulated.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

from pydantic import Field

from jaxinfer.checkpoints.modelled import model_shape
from jaxinfer.config.cluster import InstanceConfig
from jaxinfer.config.nodes import Hardware, read_hardware
from jaxinfer.config.run_file import as_run_file
from jaxinfer.config.stage_part import StagePart, stored_sizes
from jaxinfer.errors import JaxinferError
from jaxinfer.hardware.catalogue import Catalogue, ModelShape
from jaxinfer.lab.plan.candidate import Axis, Candidate, Search
from jaxinfer.lab.plan.layers import even_times
from jaxinfer.lab.plan.problem import Problem
from jaxinfer.options.validation import Named, OptionError, Options, did_you_mean
from jaxinfer.papers.hetis.primaries import Grouping, ShareRule, groupings
from jaxinfer.serving.batch import Work
from jaxinfer.simulate.costs.model import make_stage


class HetisPlannerOptions(Options):
    """Options of ``HetisPlanner``.

    Attributes:
        seconds: Seconds of a prefill on one GPU of each kind; by default, as simulated.
        most_slower: Share by which the slowest stage may slow down when a GPU gives up its layers.
            The paper uses 5 %; its text lost the symbol.
        rule: Time to which ``most_slower`` relates: that with all GPUs (``cumulative``), or that of
            the previous step (``stepwise``).
        simulated: Number of candidates to simulate, the fastest first.
    """

    seconds: Named[float] = Field(default_factory=dict)
    most_slower: float = Field(default=0.05, ge=0)
    rule: ShareRule = "cumulative"
    simulated: int = Field(default=8, ge=1)

    def model_post_init(self, context: object, /) -> None:
        """Refuse times that are not positive."""
        for name, seconds in self.seconds.items():
            if not seconds > 0:
                raise OptionError(f"seconds.{name} is {seconds:g}, must be above 0")


@dataclass(frozen=True)
class GpuKinds:
    """The cluster's GPUs by kind, the fastest first.

    Attributes:
        names: names of the GPUs.
        counts: number of GPUs of each kind.
        seconds: seconds of a prefill on one GPU of each kind.
        nodes: for each kind, the node of each GPU.
    """

    names: Sequence[str]
    counts: Sequence[int]
    seconds: Sequence[float]
    nodes: Sequence[Sequence[str]]


class HetisPlanner:
    """Ranks groupings by a full step of their largest stage, and simulates the best ones."""

    Options = HetisPlannerOptions

    def __init__(self, options: HetisPlannerOptions) -> None:
        self._options = options

    def plan(self, problem: Problem, search: Search) -> Candidate:
        """Return the best of the simulated candidates."""
        return search.best(self.candidates(problem))

    def candidates(self, problem: Problem) -> list[Candidate]:
        """Return the groupings with the fastest steps, the fastest first.

        Raises:
            JaxinferError: the plan file has no hardware file, or no grouping fits its nodes.
        """
        costs = StageTimes(problem)
        kinds, options = self._kinds(costs), self._options
        found: list[tuple[float, Grouping]] = []
        for grouping in groupings(kinds.counts, kinds.seconds, options.most_slower, options.rule):
            seconds = costs.of_largest(kinds.names, grouping)
            if seconds < inf and _stands(kinds, grouping):
                found.append((seconds, grouping))
        if not found:
            raise JaxinferError(
                "no grouping of the hardware file's GPUs holds a stage of one kind on its nodes"
            )
        found.sort(key=lambda each: each[0])
        return [
            self._candidate(kinds, costs, seconds, grouping)
            for seconds, grouping in found[: options.simulated]
        ]

    def _kinds(self, costs: "StageTimes") -> GpuKinds:
        """Return the kinds of GPUs, the fastest first."""
        nodes: dict[str, list[str]] = {}
        for name, node in costs.hardware.nodes.items():
            nodes.setdefault(node.gpu, []).extend([name] * node.gpus)
        given = self._options.seconds
        for name in given:
            if name not in nodes:
                raise OptionError(f"planner.seconds.{name}: {did_you_mean(name, nodes)}")
        if given and (left := [name for name in nodes if name not in given]):
            raise OptionError(f"planner.seconds: has nothing of {left[0]}")
        seconds = given or {name: costs.of_layer(name, 1) for name in nodes}
        names = sorted(nodes, key=lambda name: seconds[name])
        return GpuKinds(
            names,
            [len(nodes[name]) for name in names],
            [seconds[name] for name in names],
            [nodes[name] for name in names],
        )

    def _candidate(
        self, kinds: GpuKinds, costs: "StageTimes", seconds: float, grouping: Grouping
    ) -> Candidate:
        part: dict[str, Any] = {
            "groups": {},
            "instances": {},
            "simulate": {"groups": {}},
            "system": "hetis",
        }
        for number in range(grouping.instances):
            _add_instance(part, number, kinds, costs, grouping)
        splits = [
            f"{tp}x{pp} {name}"
            for (tp, pp), name in zip(grouping.splits, kinds.names, strict=True)
            if tp
        ]
        attention = [
            f"{count // grouping.instances - tp * pp} {name}"
            for (tp, pp), name, count in zip(
                grouping.splits, kinds.names, kinds.counts, strict=True
            )
            if count // grouping.instances > tp * pp
        ]
        axes: dict[str, Axis] = {
            "instances": grouping.instances,
            "stages": ", ".join(splits),
            "attention": ", ".join(attention),
            "step_s": float(f"{seconds:.6g}"),
        }
        return Candidate(axes, part)


class StageTimes:
    """The times that stages take for a full prefill step, by the simulator's own costs."""

    def __init__(self, problem: Problem) -> None:
        common = as_run_file(problem.run)
        if common.simulate.hardware is None:
            raise JaxinferError("run.simulate.hardware is missing: the nodes that are planned for")
        self.hardware: Hardware = read_hardware(common.simulate.hardware, common.own)
        own = Catalogue(self.hardware.gpus, self.hardware.models)
        known = common.own.and_those_of("the run file", own)
        self.model: ModelShape = model_shape(common.require_model(), known)
        self._engine = InstanceConfig.model_validate(
            {**problem.run.get("engine", {}), "group": "any"}
        )
        self._costs = common.simulate
        self._gpus = {node.gpu: node.as_gpu(known) for node in self.hardware.nodes.values()}
        self._found: dict[tuple[str, int], float] = {}

    def of_layer(self, gpu: str, tp: int) -> float:
        """Return a layer's seconds on ``tp`` GPUs; infinite if they do not divide the heads."""
        key = gpu, tp
        if key not in self._found:
            self._found[key] = self._layer(gpu, tp)
        return self._found[key]

    def _layer(self, gpu: str, tp: int) -> float:
        model, engine = self.model, self._engine
        if model.num_attention_heads % tp or model.num_key_value_heads % tp:
            return inf
        total, T = model.num_hidden_layers, engine.max_num_batched_tokens
        sizes = stored_sizes(model, engine.weight_dtype, engine.kv_cache_dtype)
        part = StagePart(self._gpus[gpu], gpu, model, total, 1.0, False, False, tp, *sizes)
        return make_stage(part, self._costs).seconds(Work(T, 0, 1, 1, 0, [(0, T)])) / total

    def of_largest(self, names: Sequence[str], grouping: Grouping) -> float:
        """Return the seconds of a grouping's largest stage if layers are divided evenly in time.

        The result is infinite if one of the grouping's stages is impossible.
        """
        speed = 0.0
        for name, (tp, pp) in zip(names, grouping.splits, strict=True):
            if tp:
                seconds = self.of_layer(name, tp)
                if seconds == inf:
                    return inf
                speed += pp / seconds
        stages, layers = sum(pp for _, pp in grouping.splits), self.model.num_hidden_layers
        return layers / speed if 0 < stages <= layers else inf


def _stands(kinds: GpuKinds, grouping: Grouping) -> bool:
    """Tell whether each stage's GPUs are on one node."""
    return all(
        len(set(stage)) == 1
        for number in range(grouping.instances)
        for stages, _ in _nodes(kinds, grouping, number)
        for stage in stages
    )


def _nodes(
    kinds: GpuKinds, grouping: Grouping, number: int
) -> Iterator[tuple[list[Sequence[str]], Sequence[str]]]:
    """Yield for each kind the nodes of an instance's stages, and those of GPUs without layers."""
    for nodes, count, (tp, pp) in zip(kinds.nodes, kinds.counts, grouping.splits, strict=True):
        each = count // grouping.instances
        here = nodes[number * each : (number + 1) * each]
        yield [here[i * tp : (i + 1) * tp] for i in range(pp)], here[tp * pp :]


def _add_instance(
    part: dict[str, Any], number: int, kinds: GpuKinds, costs: StageTimes, grouping: Grouping
) -> None:
    """Add an instance's groups on their nodes; each GPU without layers serves all stages."""
    name = f"hetis{number}"
    stages: list[dict[str, Any]] = []
    times: list[float] = []
    attention: list[str] = []

    def add_group(group: str, kind: str, devices: int, node: str) -> None:
        part["groups"][group] = {"kind": kind, "devices": devices}
        part["simulate"]["groups"][group] = {"node": node}

    for kind, (tp, _), (here, others) in zip(
        kinds.names, grouping.splits, _nodes(kinds, grouping, number), strict=True
    ):
        for nodes in here:
            add_group(f"{name}_{len(stages)}", kind, tp, nodes[0])
            times.append(costs.of_layer(kind, tp))
            stages.append({"group": f"{name}_{len(stages)}"})
        for node in others:
            add_group(f"{name}_attention{len(attention)}", kind, 1, node)
            attention.append(f"{name}_attention{len(attention)}")
    total = costs.model.num_hidden_layers
    layers = even_times(total, [0.0] * len(times), times, [total] * len(times))
    assert layers, "stages are not more than layers"
    part["instances"][name] = {
        "stages": [
            {**stage, "layers": count, "attention": attention}
            for stage, count in zip(stages, layers, strict=True)
        ]
    }
