"""Chooses shapes and numbers of prefill and decode instances (DistServe, section 4).

Our readings where the paper is silent: tensor parallelism divides the heads and stays within one
node, pipeline parallelism divides the layers, and a shape fits if its pools hold the longest
request. The phases' separate results are checked by simulating the whole, since requests that miss
the targets in each phase add up.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

from pydantic import Field

from jaxinfer.checkpoints.modelled import model_shape
from jaxinfer.config.costs import GroupCosts
from jaxinfer.config.run_file import as_run_file
from jaxinfer.errors import JaxinferError
from jaxinfer.hardware.catalogue import ModelShape
from jaxinfer.lab.plan.candidate import Axis, Bound, Candidate, Search
from jaxinfer.lab.plan.problem import Problem
from jaxinfer.options.validation import Named, OptionError, Options
from jaxinfer.papers.distserve.shapes import (
    InstanceShape,
    Part,
    chain,
    groups_of,
    instance_part,
    joined,
    link,
    num_nodes,
    packed,
)

PHASES = ("prefill", "decode")
# A tolerance, because a prefill instance that sometimes has to wait may form better batches.
SLACK = 1.1
# Name of the source from which a decode instance that is alone gets its KV, without delay.
_SOURCE = "prompts"
_SOURCE_GPU = {
    "bf16_tflops": 1.0,
    "memory_gb": 1e9,
    "memory_gb_s": 1.0,
    "link": "none",
    "link_gb_s": 1.0,
    "watts": 1.0,
}
_INSTANT_GB_S = 1e9
_INSTANT_S = 1e-9
# More entries than decode instances that keep their targets leave unfetched.
_SOURCE_PAGES = 2**16


class DistServePlannerOptions(Options):
    """Limits on the GPUs of instances.

    Attributes:
        kind: Kind of all GPUs.
        gpus_per_node: Number of GPUs in a node.
        nodes: Largest number of nodes that an instance may span.
        nic_gb_s: Bandwidth between nodes, in 10^9 bytes per second.
        costs: Step times for each degree of tensor parallelism to try. By default, all degrees are
            tried with the costs of the plan file's ``run``.
    """

    kind: str
    gpus_per_node: int = Field(ge=1)
    nodes: int = Field(default=1, ge=1)
    nic_gb_s: float = Field(gt=0)
    costs: Named[GroupCosts] = Field(default_factory=dict)

    def model_post_init(self, context: object, /) -> None:
        """Refuse costs whose key is not a degree."""
        for degree in self.costs:
            if not degree.isdecimal():
                raise OptionError(f"costs.{degree}: must be tensor parallelism, a number of GPUs")


class HighOptions(DistServePlannerOptions):
    """Options of ``DistServeHigh``.

    Attributes:
        rate: Requests per second that all instances together must serve.
    """

    rate: float = Field(gt=0)


class LowOptions(DistServePlannerOptions):
    """Options of ``DistServeLow``.

    Attributes:
        rate: Requests per second that all units together must serve; by default, there is one unit.
    """

    rate: float | None = Field(default=None, gt=0)


class Space:
    """Shapes of a model's instances, and the run files' parts for them.

    Raises:
        JaxinferError: the goal does not suit these planners, or the model or the GPU is unknown.
    """

    def __init__(self, options: DistServePlannerOptions, problem: Problem) -> None:
        if problem.goal.maximise != "gpu":
            raise JaxinferError("goal: this planner finds the best rate by GPUs, maximise: gpu")
        common = as_run_file(problem.run)
        self._model: ModelShape = model_shape(common.require_model(), common.own)
        self._link_gb_s = common.own.gpu(options.kind).link_gb_s
        self._options = options

    @property
    def degrees(self) -> list[int]:
        """How many GPUs a stage may have: the numbers that divide the heads."""
        heads = self._model.num_attention_heads, self._model.num_key_value_heads
        most = self._options.gpus_per_node
        return [tp for tp in range(1, most + 1) if not any(count % tp for count in heads)]

    def shapes(self) -> Iterator[InstanceShape]:
        """Yield the shapes of single instances, in the order of Algorithm 1."""
        options = self._options
        for tp, pp in products(options.nodes, options.gpus_per_node):
            if tp in self.degrees and not self._model.num_hidden_layers % pp:
                yield packed(tp, pp, options.gpus_per_node)

    def pairs(self) -> Iterator[tuple[InstanceShape, InstanceShape]]:
        """Yield shapes of prefill and decode with equal layers on each node (Algorithm 2)."""
        options, layers = self._options, self._model.num_hidden_layers
        for nodes in range(1, options.nodes + 1):
            stages = [n for n in range(1, options.gpus_per_node + 1) if not layers % (nodes * n)]
            own = [InstanceShape(tp, (n,) * nodes) for tp, n in product(self.degrees, stages)]
            for pair in product(own, own):
                if sum(shape.gpus for shape in pair) <= options.gpus_per_node * nodes:
                    yield pair

    def refused(self, *shapes: InstanceShape) -> str | None:
        """Return why these shapes are impossible, ignoring memory; None if they are possible."""
        options = self._options
        for shape in shapes:
            if len(shape.stages) > options.nodes:
                return (
                    f"{shape.pp} stages of {shape.tp} GPUs need {len(shape.stages)} nodes of "
                    f"{options.gpus_per_node}, an instance may span {options.nodes}"
                )
            if options.costs and str(shape.tp) not in options.costs:
                known = ", ".join(options.costs)
                return f"planner.costs: none of {shape.tp} GPUs, there are those of {known}"
        return None

    def alone(self, phase: str, shape: InstanceShape) -> Candidate:
        """Return a candidate in which one instance serves one phase of all requests.

        The other phase takes no time.
        """
        axes = {"placed": phase, **_axes(phase, shape, 1)}
        part = self._instance(phase, shape)
        links = chain(groups_of(phase, shape), self._options.nic_gb_s)
        more: dict[str, Any] = {"outputs": 1}
        if phase == "prefill":
            part = joined([part, {"system": "single"}], links)
        else:
            links += [link((_SOURCE, group), _INSTANT_GB_S) for group in groups_of(phase, shape)]
            part = joined([part, _source(), _one_unit(_SOURCE, phase)], links)
            more = {"uncounted": (_SOURCE,)}
        return Candidate(axes, part, (phase, shape), self.refused(shape), **more)

    def units(self, prefill: InstanceShape, decode: InstanceShape, count: int = 1) -> Candidate:
        """Return ``count`` units of one instance per phase, whose stages share nodes."""
        names = [groups_of(*each) for each in zip(PHASES, (prefill, decode), strict=True)]
        rate = self._link_gb_s * min(prefill.by_node[0], decode.by_node[0])
        links = [link(ends, rate) for ends in zip(*names, strict=True)]
        per_node, each = self._options.gpus_per_node, prefill.by_node[0] + decode.by_node[0]
        nodes = len(prefill.stages) * num_nodes([each] * count, per_node)
        axes: dict[str, Axis] = {"placed": "units"}
        axes |= _axes("prefill", prefill, count) | _axes("decode", decode, count)
        axes["provisioned"] = nodes * per_node
        axes["stranded"] = nodes * per_node - count * (prefill.gpus + decode.gpus)
        system = _system(
            [{phase: f"{phase}{number}" for phase in PHASES} for number in range(count)]
        )
        part = self._together((prefill, decode), (count, count), links, system)
        key = ("units", prefill, decode, count)
        return Candidate(axes, part, key, self.refused(prefill, decode))

    def cluster(
        self, shapes: Sequence[InstanceShape], counts: Sequence[int], carry: float
    ) -> Candidate:
        """Return a candidate with these numbers of prefill and decode instances, on any nodes.

        Args:
            carry: requests per second that each phase can serve alone.
        """
        options = self._options
        names = [groups_of(*each) for each in zip(PHASES, shapes, strict=True)]
        links = [link(ends, options.nic_gb_s) for ends in product(*names)]
        axes: dict[str, Axis] = {"placed": "whole"}
        pieces: list[int] = []
        for phase, shape, count in zip(PHASES, shapes, counts, strict=True):
            axes |= _axes(phase, shape, count)
            pieces += shape.by_node * count
        provisioned = num_nodes(pieces, options.gpus_per_node) * options.gpus_per_node
        axes |= {"phases_carry": carry, "provisioned": provisioned}
        axes["stranded"] = provisioned - sum(pieces)
        key = ("whole", *shapes, *counts)
        part = self._together(shapes, counts, links, _one_unit(*PHASES))
        return Candidate(axes, part, key)

    def _together(
        self,
        shapes: Sequence[InstanceShape],
        counts: Sequence[int],
        links: Sequence[Part],
        system: Part,
    ) -> Part:
        parts, own = [], []
        for phase, shape, count in zip(PHASES, shapes, counts, strict=True):
            parts.append(self._instance(phase, shape, count))
            own += chain(groups_of(phase, shape), self._options.nic_gb_s)
        return joined([*parts, system], [*own, *links])

    def _instance(self, phase: str, shape: InstanceShape, replicas: int = 1) -> Part:
        given = self._options.costs.get(str(shape.tp))
        costs = given.model_dump(mode="json", exclude_unset=True) if given else {}
        layers = self._model.num_hidden_layers
        return instance_part(phase, shape, self._options.kind, layers, costs, replicas)


class DistServeHigh:
    """Finds the best instance of each phase per GPU, then how many the rate needs (Algorithm 1).

    It is for clusters in which KV may be sent between any two nodes.
    """

    Options = HighOptions

    def __init__(self, options: HighOptions) -> None:
        self._options = options

    def plan(self, problem: Problem, search: Search) -> Candidate:
        """Return the whole cluster, which serves the rate."""
        space = Space(self._options, problem)
        shapes, counts, carried = [], [], []
        for phase in PHASES:
            alone = {shape: space.alone(phase, shape) for shape in space.shapes()}
            best = search.best(list(alone.values()))
            (score,) = search.scores([best])
            shapes.append(next(s for s, each in alone.items() if each.key == best.key))
            counts.append(math.ceil(self._options.rate / score.rate))
            carried.append(counts[-1] * score.rate)
        whole = space.cluster(shapes, counts, min(carried))
        return replace(whole, wanted=self._options.rate)


class DistServeLow:
    """Finds the best unit, per GPU, of two instances that share nodes (Algorithm 2).

    It is for clusters in which KV is not sent between nodes: stages with the same layers are on the
    same node, and a request stays in its unit.
    """

    Options = LowOptions

    def __init__(self, options: LowOptions) -> None:
        self._options = options

    def plan(self, problem: Problem, search: Search) -> Candidate:
        """Return as many units as the rate needs."""
        space = Space(self._options, problem)
        pairs = {pair: space.units(*pair) for pair in space.pairs()}
        best = search.best(list(pairs.values()), self._bound(problem, space, search))
        if self._options.rate is None:
            return best
        (score,) = search.scores([best])
        pair = next(pair for pair, each in pairs.items() if each.key == best.key)
        whole = space.units(*pair, math.ceil(self._options.rate / score.rate))
        return replace(whole, wanted=self._options.rate)

    def _bound(self, problem: Problem, space: Space, search: Search) -> Bound:
        """Return a bound: a unit's first tokens come no sooner than those of its prefill instance
        alone.

        That instance is quickly simulated, and bounds all units that contain it, if it serves the
        same requests, whatever the number of GPUs.
        """
        if problem.goal.requests_per_gpu:
            return lambda candidate: math.inf
        shapes = list(dict.fromkeys(prefill for prefill, _ in space.pairs()))
        scores = search.scores([space.alone("prefill", shape) for shape in shapes])
        rates = {s: score.rate for s, score in zip(shapes, scores, strict=True)}
        keys = {space.units(*pair).key: rates[pair[0]] for pair in space.pairs()}
        return lambda candidate: SLACK * keys[candidate.key]


def products(nodes: int, gpus_per_node: int) -> Iterator[tuple[int, int]]:
    """Yield degrees of tensor and pipeline parallelism, in the order of Algorithm 1's loops."""
    for tp in range(1, gpus_per_node + 1):
        for pp in range(1, nodes * gpus_per_node // tp + 1):
            yield tp, pp


def _axes(phase: str, shape: InstanceShape, count: int) -> dict[str, Axis]:
    return {f"{phase}_tp": shape.tp, f"{phase}_pp": shape.pp, f"{phase}_instances": count}


def _source() -> Part:
    return {
        "gpus": {_SOURCE: _SOURCE_GPU},
        "groups": {_SOURCE: {"kind": _SOURCE}},
        "instances": {_SOURCE: {"group": _SOURCE, "num_pages": _SOURCE_PAGES}},
        "simulate": {"groups": {_SOURCE: {"linear": {"step_s": _INSTANT_S}, "reserve_gb": 0.0}}},
    }


def _one_unit(prefill: str, decode: str) -> Part:
    """Return the option that lets all replicas of both hand KV over to each other."""
    return _system([{"prefill": [prefill], "decode": [decode]}])


def _system(units: Sequence[Part]) -> Part:
    return {"system": {"name": "distserve", "units": list(units)}}
