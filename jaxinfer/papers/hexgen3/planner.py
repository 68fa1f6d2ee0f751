"""Chooses sizes of pools for prefill, attention and FFN (HexGen-3, MegaScale-Infer).

Prompts are computed by instances of the first pool. A device group of the second pool and one of
the third form a decode instance, whose steps are computed as micro-batches. The candidates use the
system ``disaggregated``.

A closed form decides which sizes are not simulated (arXiv 2601.21351): a step of decodes takes at
least as long as its attention, its FFN, or its hidden states on the link, whichever is longest,
however many micro-batches there are.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Annotated, Any

from pydantic import Field

from jaxinfer.config.resolve import resolve
from jaxinfer.config.run_file import as_run_file
from jaxinfer.config.site import model_site
from jaxinfer.errors import JaxinferError
from jaxinfer.lab.plan.candidate import Candidate, Search
from jaxinfer.lab.plan.planners.pd_ratio import (
    FoundRates,
    PhaseSide,
    most_rate,
    rates_of_work,
)
from jaxinfer.lab.plan.problem import Problem
from jaxinfer.options.validation import OptionError, Options
from jaxinfer.serving.batch import Work
from jaxinfer.simulate.cluster import ModelledInstance, model_cluster
from jaxinfer.simulate.costs.model import Padded, Pipeline
from jaxinfer.simulate.ffn import ModelledFfnStage

Counts = tuple[Annotated[int, Field(ge=1)], ...]


class PoolSide(Options):
    """GPUs of one side of a decode instance.

    Attributes:
        kind: kind of the GPUs.
        devices: numbers of GPUs of one instance to try.
    """

    kind: str
    devices: Counts = Field(default=(1,), strict=False, min_length=1)


class HexGen3Options(Options):
    """Options of ``HexGen3Planner``.

    Attributes:
        prefill: For prefill instances, the GPUs' ``kind``, the largest number of instances
            (``most``), ``tensor_parallel`` degrees and ``engine`` options.
        attention, ffn: For the two groups of a decode instance, the GPUs' ``kind`` and the numbers
            of ``devices`` to try.
        pairs: Largest number of decode instances.
        micro_batches: Numbers of micro-batches to try.
        engine: Options of decode instances, in addition to the common ones.
        gpus: Largest number of GPUs in total.
        link_gb_s: Bandwidth from the prefill pool to the attention pool, in 10^9 bytes per second.
        exchange_gb_s, exchange_s: Bandwidth, in 10^9 bytes per second, and latency, in seconds,
            between attention and FFN.
    """

    prefill: PhaseSide
    attention: PoolSide
    ffn: PoolSide
    pairs: int = Field(default=1, ge=1)
    micro_batches: Counts = Field(default=(1, 2), strict=False, min_length=1)
    engine: dict[str, Any] = Field(default_factory=dict)
    gpus: int | None = Field(default=None, ge=3)
    link_gb_s: float = Field(default=50.0, gt=0)
    exchange_gb_s: float = Field(default=50.0, gt=0)
    exchange_s: float = Field(default=1e-5, ge=0)

    def model_post_init(self, context: Any, /) -> None:
        """Refuse engine options that the planner sets for each candidate."""
        for where, engine in (("prefill.engine", self.prefill.engine), ("engine", self.engine)):
            for name in ("group", "stages", "replicas", "micro_batches"):
                if name in engine:
                    raise OptionError(f"{where}.{name}: leave it out, the planner sets it")


@dataclass(frozen=True)
class Shape:
    """The GPUs of a prefill instance, and of both sides of a decode instance."""

    prefill: int
    attention: int
    ffn: int


@dataclass(frozen=True)
class LeastTimes:
    """A cost model with the least possible step times of an instance with an FFN group."""

    stages_: Sequence[ModelledFfnStage]

    def stages(self, work: Work) -> list[float]:
        """Return the least seconds of each stage, whatever its micro-batches.

        Attention, FFN and link are each busy for at least as long as in a step without
        micro-batches, because each micro-batch reads the weights again.
        """
        found = []
        for stage in self.stages_:
            part = stage.part(work)
            layer = max(part.attention, part.ffn, part.exchange)
            found.append(stage.attention.layers * layer + stage.attention.besides(work))
        return found

    def hops(self, work: Work) -> list[float]:
        """Return 0 seconds for each hop between stages."""
        return [0.0] * (len(self.stages_) - 1)


class HexGen3Planner:
    """Tries all sizes of the three pools that the closed form allows."""

    Options = HexGen3Options

    def __init__(self, options: HexGen3Options) -> None:
        self._options = options
        self._most: dict[tuple[object, ...], float] = {}

    def plan(self, problem: Problem, search: Search) -> Candidate:
        """Return the best sizes."""
        return search.best(list(self.candidates(problem)), self.most)

    def most(self, candidate: Candidate) -> float:
        """Return the requests per second above which a candidate is assumed to miss the targets."""
        return self._most[candidate.key]

    def candidates(self, problem: Problem) -> Iterator[Candidate]:
        """Yield sizes, with the rates and the limit on decodes that the closed forms give."""
        options = self._options
        sizes = product(
            options.prefill.tensor_parallel, options.attention.devices, options.ffn.devices
        )
        for shape in (Shape(*each) for each in sizes):
            modelled = self._modelled(problem, shape)
            by_count: dict[int, FoundRates] = {}
            counts = product(range(1, options.prefill.most + 1), range(1, options.pairs + 1))
            for prefills, pairs in counts:
                gpus = prefills * shape.prefill + pairs * (shape.attention + shape.ffn)
                if options.gpus and gpus > options.gpus:
                    continue
                found = _rates(problem, modelled, gpus, by_count) if modelled else None
                most = most_rate(problem.targets, found, prefills, pairs) if found else math.inf
                for micro_batches in options.micro_batches:
                    axes = {
                        "prefills": prefills,
                        "prefill_tp": shape.prefill,
                        "pairs": pairs,
                        "attention": shape.attention,
                        "ffn": shape.ffn,
                        "micro_batches": micro_batches,
                        "closed_form": found.one_by_one.of(prefills, pairs) if found else None,
                    }
                    part = self._part(shape, prefills, pairs, micro_batches)
                    key = shape, prefills, pairs, micro_batches
                    self._most[key] = most
                    yield Candidate(axes, part, key)

    def _modelled(
        self, problem: Problem, shape: Shape
    ) -> tuple[ModelledInstance, ModelledInstance] | None:
        """Return an instance of each phase; the decode one's step times leave out padding.

        None if they cannot be simulated; the evaluation of their candidates says why.
        """
        try:
            data = problem.run_file(self._part(shape, 1, 1, 1))
            modelled = model_cluster(model_site(resolve(as_run_file(data)))).instances
        except JaxinferError:
            return None
        here, there = modelled["prefill0"], modelled["decode0"]
        # Steps without the tokens that pad them are shorter.
        cost = there.cost.cost if isinstance(there.cost, Padded) else there.cost
        assert isinstance(cost, Pipeline)
        stages = [stage for stage in cost.parts if isinstance(stage, ModelledFfnStage)]
        return here, replace(there, cost=LeastTimes(stages))

    def _part(self, shape: Shape, prefills: int, pairs: int, micro_batches: int) -> dict[str, Any]:
        options = self._options
        sides = (
            ("attention", options.attention, shape.attention),
            ("ffn", options.ffn, shape.ffn),
        )
        groups: dict[str, dict[str, Any]] = {
            name: {"kind": side.kind, "devices": devices, "replicas": pairs}
            for name, side, devices in sides
        }
        groups["prefill"] = {
            "kind": options.prefill.kind,
            "devices": prefills * shape.prefill,
            "tensor_parallel_size": shape.prefill,
        }
        exchange = {"gb_s": options.exchange_gb_s, "latency_s": options.exchange_s}
        return {
            "groups": groups,
            "links": [
                {"between": ["prefill", "attention"], "gb_s": options.link_gb_s},
                {"between": ["attention", "ffn"]} | exchange,
            ],
            "instances": {
                "prefill": {"group": "prefill", "replicas": prefills, **options.prefill.engine},
                "decode": {
                    "stages": [{"group": "attention", "ffn": "ffn"}],
                    "replicas": pairs,
                    "micro_batches": micro_batches,
                    **options.engine,
                },
            },
            "system": {
                "name": "disaggregated",
                "prefill": ["prefill"],
                "decode": ["decode"],
                "max_in_prefill": 1_000_000,
            },
        }


def _rates(
    problem: Problem,
    modelled: tuple[ModelledInstance, ModelledInstance],
    gpus: int,
    by_count: dict[int, FoundRates],
) -> FoundRates | None:
    """Return the rates of one instance of each phase, for the requests of this number of GPUs."""
    try:
        work = problem.served(gpus)
    except JaxinferError:
        return None
    if len(work) not in by_count:
        by_count[len(work)] = rates_of_work(problem, *modelled, work)
    return by_count[len(work)]
