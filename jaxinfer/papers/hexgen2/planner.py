"""HexGen-2: prefill and decode instances on unlike GPUs, and the flow between them (section 3)."""

from collections.abc import Mapping
from dataclasses import replace
from math import inf
from typing import Any, Literal

from pydantic import Field

from jaxinfer.checkpoints.modelled import model_shape
from jaxinfer.config.cluster import InstanceConfig
from jaxinfer.config.costs import GroupCosts
from jaxinfer.config.nodes import read_hardware
from jaxinfer.config.run_file import as_run_file
from jaxinfer.errors import JaxinferError
from jaxinfer.hardware.catalogue import Catalogue
from jaxinfer.lab.plan.candidate import Axis, Candidate, Search
from jaxinfer.lab.plan.problem import Problem
from jaxinfer.options.validation import Named, OptionError, Options, did_you_mean, within
from jaxinfer.papers.hexgen2.baselines import genetic, guided, most_gpus, random_swaps, starts
from jaxinfer.papers.hexgen2.capacity import Capacity, GroupRole, Modelled
from jaxinfer.papers.hexgen2.certify import Certified, best_plan, certify, mix_of, rent
from jaxinfer.papers.hexgen2.flow import KVNetwork, pair_flow, shared_flow
from jaxinfer.papers.hexgen2.full_steps import LengthStats
from jaxinfer.papers.hexgen2.gpus import Site
from jaxinfer.papers.hexgen2.integer_programs import within_nodes
from jaxinfer.papers.hexgen2.moves import size
from jaxinfer.papers.hexgen2.refine import Effort, Scored, Scorer
from jaxinfer.papers.hexgen2.run_file import as_part, names_of
from jaxinfer.papers.hexgen2.table1 import Table1

# Options of the engine that the planner's step times and pools do not model.
_UNKNOWN = ("token_buckets", "num_pages")
# Changes that are rated at most by sums of capacities, which is quick.
_SCORED = 100_000
# Methods that draw random numbers.
_DRAWN = {"restarts": ("programs",), "seed": ("programs", "random_swaps", "genetic")}


class HexGen2PlannerOptions(Options):
    """Options of ``HexGen2Planner``.

    Attributes:
        prefill, decode: Engine options of the instances of each role.
        tensor_parallel: Degrees to try for a stage, all within one node.
        measured: Step times for each GPU, such as ``phases`` from a profile; each stage is then one
            GPU.
        most_gpus: Largest number of GPUs of an instance.
        budget: Dollars per hour for renting GPUs of the hardware file; a GPU costs its share of its
            node's price.
        method: Search method: two integer programs, improved by small changes (``programs``); the
            paper's partition with guided swaps; or one of two baselines.
        costs: Step times that guide the paper's search: the simulator's, or those of the paper's
            Table 1.
        network: Network model that guides the paper's search: cards shared by the instances of a
            node, or a separate link for each pair. The reported figures of the plan use modelled
            costs and a shared network.
        restarts: With ``programs``, number of further searches that start from random changes of
            the best plan.
        seed: Seed of the random changes; the method ``hexgen2`` makes none.
        flows: Largest number of changes that are rated exactly, with a flow computation.
    """

    prefill: dict[str, Any] = Field(default_factory=dict)
    decode: dict[str, Any] = Field(default_factory=dict)
    tensor_parallel: tuple[int, ...] = Field(default=(1, 2, 4, 8), strict=False, min_length=1)
    measured: Named[GroupCosts] = Field(default_factory=dict)
    most_gpus: int = Field(default=8, ge=1)
    budget: float | None = Field(default=None, gt=0)
    method: Literal["programs", "hexgen2", "random_swaps", "genetic"] = "programs"
    costs: Literal["modelled", "table1"] = "modelled"
    network: Literal["shared", "pairs"] = "shared"
    restarts: int = Field(default=10, ge=0)
    seed: int = 0
    flows: int = Field(default=500, ge=1)

    def model_post_init(self, context: object, /) -> None:
        """Refuse degrees below 1, and options without effect."""
        if min(self.tensor_parallel) < 1:
            raise OptionError(f"tensor_parallel is {self.tensor_parallel}, must be from 1 on")
        if self.measured and self.tensor_parallel != (1,):
            raise OptionError(
                f"tensor_parallel is {self.tensor_parallel}, must be [1] beside measured, which is "
                "of one GPU"
            )
        if self.method != "programs" and self.budget is not None:
            raise OptionError(f"method is {self.method}, which rents nothing: leave out budget")
        for name, methods in _DRAWN.items():
            if name in self.model_fields_set and self.method not in methods:
                useful = " and ".join(methods)
                raise OptionError(
                    f"{name}: has no use with method {self.method}, only with {useful}"
                )
        if self.method == "programs" and (self.costs, self.network) != ("modelled", "shared"):
            raise OptionError(
                f"method is programs, whose plans are by modelled costs and a shared network, not "
                f"by {self.costs} and {self.network}"
            )


class HexGen2Planner:
    """Finds one plan by its flow; the search then simulates the plan."""

    Options = HexGen2PlannerOptions

    def __init__(self, options: HexGen2PlannerOptions) -> None:
        self._options = options

    def plan(self, problem: Problem, search: Search) -> Candidate:
        """Return the plan with the largest flow found; its axes include the certificate."""
        return self.candidate(problem, self.certified(problem))

    def certified(self, problem: Problem) -> Certified:
        """Return the groups and flows of the plan that was found, without a simulation.

        Raises:
            JaxinferError: the plan file has no hardware file, or the model fits nowhere.
        """
        options = self._options
        capacity = self.capacity(problem)
        layer_bytes = capacity.layer_bytes
        whole = layer_bytes * capacity.model.num_hidden_layers
        network = KVNetwork(capacity.site, layer_bytes)
        effort = Effort(_SCORED, options.flows)
        if options.method == "programs":
            bound = inf
            if options.budget is not None:
                site, bound = rent(capacity, whole, options.most_gpus, options.budget)
                capacity = capacity.on(site)
            best = best_plan(
                capacity, network, whole, options.most_gpus, effort, options.restarts, options.seed
            )
            return best if bound == inf else replace(best, bound=bound)
        engine = capacity.engines["decode"]
        guide: Capacity = capacity
        if options.costs == "table1":
            guide = Table1(
                capacity.site,
                capacity.model,
                capacity.lengths,
                capacity.degrees,
                engine.max_num_seqs,
            )
        flow_of = shared_flow if options.network == "shared" else pair_flow
        found = self._compared(Scorer(guide, network, flow_of, effort), capacity)
        scorer = Scorer(capacity, network, shared_flow, effort)
        most = max(options.most_gpus, *(size(group) for group, _ in found.plan))
        cells = within_nodes(capacity, whole, most)
        return certify(scorer, found.plan, mix_of(capacity, whole, most, cells.flow), cells.bound)

    def _compared(self, scorer: Scorer, capacity: Modelled) -> Scored:
        """Search by the paper's method, or by one of the baselines."""
        options = self._options
        plans = starts(scorer, capacity.model, capacity.lengths)
        most = most_gpus(plans, options.most_gpus)
        if options.method == "hexgen2":
            return guided(scorer, plans, most)
        search = random_swaps if options.method == "random_swaps" else genetic
        return search(scorer, plans, most, options.seed)

    def capacity(self, problem: Problem) -> Modelled:
        """Return a model of the rates at which groups serve the plan file's workload."""
        common = as_run_file(problem.run)
        costs = common.simulate
        if costs.hardware is None:
            raise JaxinferError("run.simulate.hardware is missing: the nodes that are planned for")
        hardware = read_hardware(costs.hardware, common.own)
        own = Catalogue(hardware.gpus, hardware.models)
        known = common.own.and_those_of("the run file", own)
        if problem.goal.requests_per_gpu:
            raise OptionError(
                "goal.requests_per_gpu: this planner plans for all of the workload: give "
                "run.workload.limit"
            )
        lengths = LengthStats.of(problem.work)
        if not lengths.decodes:
            raise JaxinferError("run.workload: all outputs have one token, which needs no decode")
        engines: dict[GroupRole, InstanceConfig] = {
            "prefill": self._engine(problem, "prefill"),
            "decode": self._engine(problem, "decode"),
        }
        model = model_shape(common.require_model(), known)
        options, site = self._options, Site(hardware, known, problem.prices)
        for name in options.measured:
            if name not in (there := {node.gpu for node in site.nodes}):
                raise OptionError(f"planner.measured.{name}: {did_you_mean(name, there)}")
        by_gpu = costs.model_copy(update={"groups": options.measured})
        return Modelled(site, model, engines, by_gpu, lengths, options.tensor_parallel)

    def _engine(self, problem: Problem, role: GroupRole) -> InstanceConfig:
        own: Mapping[str, Any] = getattr(self._options, role)
        given = {**problem.run.get("engine", {}), **own}
        if name := next((name for name in _UNKNOWN if name in given), None):
            where = f"planner.{role}" if name in own else "run.engine"
            raise OptionError(f"{where}: {name} has no place in this planner")
        try:
            return InstanceConfig.model_validate({**given, "group": role})
        except JaxinferError as error:
            raise within(f"planner.{role}", error) from None

    def candidate(self, problem: Problem, found: Certified) -> Candidate:
        """Return the plan that was found, as part of a run file."""
        capacity, options = self.capacity(problem), self._options
        site, flow = capacity.site, found.flow
        own: dict[GroupRole, Mapping[str, Any]] = {
            "prefill": options.prefill,
            "decode": options.decode,
        }
        prompt = capacity.lengths.prompt
        part = as_part(
            site, found.groups, flow, own, prompt, capacity.prefill_tokens, options.measured
        )
        used = [found.groups[number] for number in sorted({i for pair in flow.pairs for i in pair})]
        roles = [placed.role for placed in used]
        axes: dict[str, Axis] = {
            "prefills": roles.count("prefill"),
            "decodes": roles.count("decode"),
            "flow": round(flow.total, 4),
        }
        caching = any(each.enable_prefix_caching for each in capacity.engines.values())
        shared = caching and any(problem.hits_of(problem.work))
        if shared:  # Capacities count whole prompts, of which a cache may hold any share.
            axes |= {"bound": "none: prompts share prefixes", "gap": None, "within_nodes": None}
        else:
            axes |= {
                "bound": round(found.bound, 4),
                "gap": round(found.gap, 4),
                "within_nodes": round(found.within, 4),
            }
        prices = site.usd_per_gpu
        if prices is not None:
            hourly = sum(n * prices[node] for p in used for node, n in p.group)
            axes["usd_per_hour_used"] = round(hourly, 2)
            axes["usd_per_1000_requests"] = round(hourly / 3.6 / flow.total, 5)
        if not shared:
            axes |= {f"per_{name}": round(value, 5) for name, value in found.per_gpu.items()}
        names = names_of(found.groups, flow)
        axes["full_instances"] = ", ".join(
            f"{names[number]} {price:.3g}" for number, price in flow.per_request.items()
        )
        axes["full_links"] = ", ".join(
            f"{' '.join(map(str, link))} {price:.3g}/GB/s" for link, price in flow.per_gb_s.items()
        )
        return Candidate(axes, part)
