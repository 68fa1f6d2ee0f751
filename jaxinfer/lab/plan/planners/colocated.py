"""Replicas that each serve whole requests: all combinations of parallelism, GPU and scheduling.

This is the space of Vidur-Search (section 7.3 of its paper).
"""

from collections.abc import Iterator, Mapping
from itertools import product
from typing import Any, Literal

from pydantic import Field

from jaxinfer.config.costs import GroupCosts
from jaxinfer.config.run_file import as_run_file
from jaxinfer.lab.plan.candidate import Candidate, Search
from jaxinfer.lab.plan.estimate import guess_rate
from jaxinfer.lab.plan.problem import Problem
from jaxinfer.options.validation import Named, OptionError, Options, did_you_mean

Degrees = tuple[int, ...]


class ColocatedOptions(Options):
    """Options of ``Colocated``.

    Attributes:
        gpus: Number of GPUs of each kind; a candidate uses one kind.
        tensor_parallel, pipeline_parallel: Degrees to try for an instance.
        engines: Sets of engine options to try; you choose their names.
        seqs_per_stage: Values to try for ``max_num_seqs`` divided by the number of stages. By
            default, ``max_num_seqs`` is that of the engine options.
        costs: Step times for each kind, as under ``simulate``. By default, those of the plan file's
            ``run``.
        replicas: Number of instances: as many as fit on the GPUs (``all``), or ``one``.
        system: System of candidates with several instances.
    """

    gpus: Named[int] = Field(min_length=1)
    tensor_parallel: Degrees = Field(default=(1,), strict=False, min_length=1)
    pipeline_parallel: Degrees = Field(default=(1,), strict=False, min_length=1)
    engines: Named[dict[str, Any]] = Field(default={"default": {}}, min_length=1)
    seqs_per_stage: tuple[int, ...] = Field(default=(), strict=False)
    costs: Named[GroupCosts] = Field(default_factory=dict)
    replicas: Literal["all", "one"] = "all"
    system: str = "least_loaded"

    def model_post_init(self, context: object, /) -> None:
        """Refuse numbers below 1."""
        for name in ("tensor_parallel", "pipeline_parallel", "seqs_per_stage"):
            if any(number < 1 for number in getattr(self, name)):
                raise OptionError(f"{name} is {getattr(self, name)}, must be integers from 1 on")
        for kind, count in self.gpus.items():
            if count < 1:
                raise OptionError(f"gpus.{kind} is {count}, must be 1 or more")
        for kind in self.costs:
            if kind not in self.gpus:
                raise OptionError(f"costs.{kind}: gpus has none: {did_you_mean(kind, self.gpus)}")


class Colocated:
    """Tries all combinations for which there are enough GPUs."""

    Options = ColocatedOptions

    def __init__(self, options: ColocatedOptions) -> None:
        self._options = options

    def plan(self, problem: Problem, search: Search) -> Candidate:
        """Return the best combination."""

        def guess(candidate: Candidate) -> float:
            config = as_run_file(problem.run_file(candidate.part))
            work = problem.served(search.costs(candidate).gpus)
            return guess_rate(config, work, problem.targets)

        return search.best(list(self.candidates()), guess=guess)

    def candidates(self) -> Iterator[Candidate]:
        """Yield candidates whose instances have ``tp`` times ``pp`` GPUs."""
        options = self._options
        shapes = product(options.gpus, options.tensor_parallel, options.pipeline_parallel)
        for kind, tp, pp in shapes:
            fit = options.gpus[kind] // (tp * pp)
            if not fit:
                continue
            replicas = 1 if options.replicas == "one" else fit
            for (name, engine), seqs in product(
                options.engines.items(), options.seqs_per_stage or (None,)
            ):
                axes = {
                    "gpu": kind,
                    "tp": tp,
                    "pp": pp,
                    "replicas": replicas,
                    "engine": name,
                    "seqs_per_stage": seqs,
                }
                own = {} if seqs is None else {"max_num_seqs": seqs * pp}
                yield Candidate(axes, self._part(kind, tp, pp, replicas, engine, own))

    def _part(
        self,
        kind: str,
        tp: int,
        pp: int,
        replicas: int,
        engine: Mapping[str, Any],
        own: Mapping[str, Any],
    ) -> dict[str, Any]:
        group = {"kind": kind, "devices": tp * pp * replicas, "tensor_parallel_size": tp}
        place = {"group": "g"} if pp == 1 else {"stages": [{"group": "g"} for _ in range(pp)]}
        costs = self._options.costs.get(kind)
        given = (
            {"groups": {"g": costs.model_dump(mode="json", exclude_unset=True)}} if costs else {}
        )
        return {
            "groups": {"g": group},
            # Not for all engines, because the number that suffices depends on the stages.
            "instances": {"i": {**place, **engine, **own, "replicas": replicas}},
            "system": self._options.system if replicas > 1 else "single",
            "simulate": given,
        }
