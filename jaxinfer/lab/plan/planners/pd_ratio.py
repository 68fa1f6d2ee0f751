"""Numbers and sharding of instances that prefill and that decode.

The joint optimisation of "Disaggregated Prefill and Decoding Inference System for Large Language
Model Serving on Multi-Vendor GPUs", section III-C: first with closed forms, as in the paper, and
then with simulations. The closed forms give a rate for each ratio (as if no prompt were in a
cache), and decide which ratios are not simulated.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from statistics import mean
from typing import Any

from pydantic import Field

from jaxinfer.config.resolve import resolve
from jaxinfer.config.run_file import as_run_file
from jaxinfer.config.site import model_site
from jaxinfer.errors import JaxinferError
from jaxinfer.lab.plan.candidate import Candidate, Search
from jaxinfer.lab.plan.problem import Problem
from jaxinfer.options.validation import Options
from jaxinfer.serving.batch import Work
from jaxinfer.simulate.cluster import ModelledInstance, model_cluster
from jaxinfer.simulate.costs.model import CostModel
from jaxinfer.simulate.targets import RequestTargets, Targets, gap_limits, limits
from jaxinfer.workload.lengths import BenchRequest

# Largest share of the time in which prefill instances may be busy; queues grow without limit
# towards 1.
UTILISATION = 0.8
# Largest assumed error of the closed forms, a rule of thumb; candidates beyond it are given up.
SLACK = 1.5


class PhaseSide(Options):
    """The instances of one phase.

    Attributes:
        kind: kind of the GPUs.
        most: largest number of instances.
        tensor_parallel: degrees of tensor parallelism to try.
        engine: engine options of the instances, in addition to the common ones.
    """

    kind: str
    most: int = Field(ge=1)
    tensor_parallel: tuple[int, ...] = Field(default=(1,), strict=False, min_length=1)
    engine: dict[str, Any] = Field(default_factory=dict)


class PDRatioOptions(Options):
    """Options of ``PDRatio``.

    Attributes:
        prefill, decode: For each phase, the GPUs' ``kind``, the largest number of instances
            (``most``), ``tensor_parallel`` degrees and ``engine`` options.
        gpus: Largest number of GPUs in total.
        link_gb_s: Bandwidth between the two phases, in 10^9 bytes per second.
    """

    prefill: PhaseSide
    decode: PhaseSide
    gpus: int | None = Field(default=None, ge=2)
    link_gb_s: float = Field(default=12.5, gt=0)


@dataclass(frozen=True)
class PhaseRates:
    """Requests per second that one instance of each phase can serve, according to closed forms."""

    prefill: float
    decode: float

    def of(self, prefills: int, decodes: int) -> float:
        """Return the requests per second that these numbers of instances can serve."""
        return min(UTILISATION * prefills * self.prefill, decodes * self.decode)


def prefill_rate(
    cost: CostModel, work: Sequence[BenchRequest], budget: int, hits: Sequence[int] | None = None
) -> float:
    """Return the prompts per second of an instance that is never idle and computes one at a time.

    Args:
        hits: number of tokens of each prompt that the instance's cache has.
    """

    def seconds(begin: int, length: int) -> float:
        chunks = [(start, min(budget, length - start)) for start in range(begin, length, budget)]
        return sum(max(cost.stages(_prefill(start, count))) for start, count in chunks)

    parts = [(b, item.prompt_len) for b, item in zip(hits or [0] * len(work), work, strict=True)]
    by_part = {part: seconds(*part) for part in set(parts)}
    return 1 / mean(by_part[part] for part in parts)


def packed_rate(
    cost: CostModel, work: Sequence[BenchRequest], budget: int, hits: Sequence[int] | None = None
) -> float:
    """Return the prompts per second of an instance that has a queue, so that all steps are full.

    Args:
        hits: number of tokens of each prompt that the instance's cache has.
    """
    seconds, room, ended = 0.0, budget, 0
    chunks: list[tuple[int, int]] = []
    for index, item in enumerate(work, 1):
        start = hits[index - 1] if hits else 0
        while start < item.prompt_len:
            count = min(room, item.prompt_len - start)
            chunks.append((start, count))
            start, room = start + count, room - count
            ended += start == item.prompt_len
            if not room or (index == len(work) and start == item.prompt_len):
                step = Work(budget - room, 0, len(chunks), ended, 0, chunks)
                seconds += max(cost.stages(step))
                room, ended, chunks = budget, 0, []
    return len(work) / seconds


def finite_rate(rate: float, requests: int, late_s: float, share: float) -> float:
    """Return the arrival rate at which ``requests`` requests are served in time at ``rate``.

    Args:
        late_s: seconds that the last request of the first ``share`` may wait.
    """
    seconds = share * requests / rate - late_s if rate else math.inf
    return requests / seconds if seconds > 0 else math.inf


def allowances(
    targets: Targets, work: Sequence[BenchRequest]
) -> tuple[list[tuple[float, float]], list[tuple[float, float]]]:
    """Return the limits for the first and the last token of a request, in seconds, with shares.

    A percentile of all gaps does not tell which requests may wait for one of their tokens.
    """
    longest = max(item.max_tokens for item in work)
    first: list[tuple[float, float]] = []
    last: list[tuple[float, float]] = []
    gaps: list[tuple[float, float]] = []
    for metric, seconds, share in limits(targets):
        if metric == "ttft":
            first.append((seconds, share))
        elif metric in ("e2e", "normalised"):
            last.append((seconds * (longest if metric == "normalised" else 1), share))
        elif metric == "tpot" or (metric == "tbt" and isinstance(targets, RequestTargets)):
            gaps.append((seconds * (longest - 1), share))
    both = [(a + b, s + t - 1) for (a, s), (b, t) in product(first, gaps) if s + t > 1]
    return first + last, last + both


def decode_rate(
    cost: CostModel, work: Sequence[BenchRequest], most: int, entries: float, tbt_s: float | None
) -> float:
    """Return the requests per second of an instance that only decodes; infinite if none decodes.

    Args:
        most: largest number of sequences.
        entries: number of KV entries in all pages.
        tbt_s: longest allowed step in seconds.
    """
    # The first token comes from the prefill instance.
    tokens = sum(item.max_tokens - 1 for item in work)
    if not tokens:
        return math.inf
    outputs = tokens / len(work)
    # Mean number of entries that a randomly drawn token sees.
    context = sum((i.max_tokens - 1) * (i.prompt_len + i.max_tokens / 2) for i in work) / tokens
    best = 0.0
    for batch in range(1, int(min(most, entries / context)) + 1):
        seconds = max(cost.stages(_decodes(batch, round(batch * context))))
        if tbt_s is not None and seconds > tbt_s:
            break
        best = max(best, batch / seconds / outputs)
    return best


def mixed_rate(slow: float, fast: float, share: float) -> float:
    """Return the overall rate if one share of requests is served at one rate, the rest at another.

    If the mean request allows no slow rate, shorter ones may still be served at the fast rate.
    """
    if not slow or math.isinf(fast):
        return fast
    return 1 / (share / slow + (1 - share) / fast)


def _prefill(start: int, count: int) -> Work:
    return Work(count, 0, 1, 1, 0, [(start, count)])


def _decodes(batch: int, context: int) -> Work:
    return Work(batch, batch, batch, batch, context, [], batch)


class PDRatio:
    """Tries all ratios that the closed forms allow."""

    Options = PDRatioOptions

    def __init__(self, options: PDRatioOptions) -> None:
        self._options = options
        self._most: dict[tuple[object, ...], float] = {}

    def plan(self, problem: Problem, search: Search) -> Candidate:
        """Return the best ratio."""
        return search.best(list(self.candidates(problem)), self.most)

    def most(self, candidate: Candidate) -> float:
        """Return the requests per second above which a candidate is assumed to miss the targets."""
        return self._most[candidate.key]

    def candidates(self, problem: Problem) -> Iterator[Candidate]:
        """Yield ratios, with the rates that the closed forms give for them."""
        options = self._options
        degrees = product(options.prefill.tensor_parallel, options.decode.tensor_parallel)
        for prefill_tp, decode_tp in degrees:
            counts = (range(1, side.most + 1) for side in (options.prefill, options.decode))
            rates_of = self._rates(problem, prefill_tp, decode_tp)
            for p, d in product(*counts):
                gpus = p * prefill_tp + d * decode_tp
                if options.gpus and gpus > options.gpus:
                    continue
                found = rates_of(gpus)
                rates = found.one_by_one if found else None
                axes = {
                    "prefills": p,
                    "prefill_tp": prefill_tp,
                    "decodes": d,
                    "decode_tp": decode_tp,
                    "closed_form": rates.of(p, d) if rates else None,
                }
                part = self._part(p, prefill_tp, d, decode_tp)
                candidate = Candidate(axes, part, (p, prefill_tp, d, decode_tp))
                most = most_rate(problem.targets, found, p, d) if found else math.inf
                self._most[candidate.key] = most
                yield candidate

    def _rates(
        self, problem: Problem, prefill_tp: int, decode_tp: int
    ) -> Callable[[int], "FoundRates | None"]:
        """Return a function that finds the rates of one instance of each phase, by number of GPUs.

        The rates are for the requests with which a candidate is simulated. They are None if the
        candidate cannot be simulated; its evaluation says why.
        """
        try:
            data = problem.run_file(self._part(1, prefill_tp, 1, decode_tp))
            modelled = model_cluster(model_site(resolve(as_run_file(data)))).instances
        except JaxinferError:
            return lambda gpus: None
        here, there = modelled["prefill0"], modelled["decode0"]
        by_count: dict[int, FoundRates] = {}

        def found(gpus: int) -> FoundRates | None:
            try:
                work = problem.served(gpus)
            except JaxinferError:
                return None
            if len(work) not in by_count:
                by_count[len(work)] = rates_of_work(problem, here, there, work)
            return by_count[len(work)]

        return found

    def _part(self, prefills: int, prefill_tp: int, decodes: int, decode_tp: int) -> dict[str, Any]:
        options = self._options
        sides = (
            ("prefill", options.prefill, prefills, prefill_tp),
            ("decode", options.decode, decodes, decode_tp),
        )
        return {
            "groups": {
                name: {"kind": side.kind, "devices": count * tp, "tensor_parallel_size": tp}
                for name, side, count, tp in sides
            },
            "links": [{"between": ["prefill", "decode"], "gb_s": options.link_gb_s}],
            "instances": {
                name: {"group": name, "replicas": count, **side.engine}
                for name, side, count, _ in sides
            },
            "system": {
                "name": "disaggregated",
                "prefill": ["prefill"],
                "decode": ["decode"],
                "max_in_prefill": 1_000_000,
            },
        }


@dataclass(frozen=True)
class FoundRates:
    """The rates of one instance of each phase.

    Attributes:
        one_by_one: rates if prompts are computed one by one.
        full: largest rates that a queue and a cache allow.
        work: requests for which these rates were found.
    """

    one_by_one: PhaseRates
    full: PhaseRates
    work: Sequence[BenchRequest]


def rates_of_work(
    problem: Problem, here: ModelledInstance, there: ModelledInstance, work: Sequence[BenchRequest]
) -> FoundRates:
    """Return the rates of an instance that prefills (``here``) and one that decodes (``there``)."""
    budget = here.config.max_num_batched_tokens
    caching = [each.config.enable_prefix_caching for each in (here, there)]
    hits = problem.hits_of(work) if any(caching) else None
    one_by_one = prefill_rate(here.cost, work, budget)
    cached = hits if caching[0] else None
    full = max(rate(here.cost, work, budget, cached) for rate in (prefill_rate, packed_rate))
    entries = there.num_tokens
    # Shared pages are stored once, so the number of requests that fit is unknown.
    room = math.inf if caching[1] and any(hits or ()) else entries

    def decode(tbt_s: float | None, entries: float) -> float:
        return decode_rate(there.cost, work, there.config.max_num_seqs, entries, tbt_s)

    gaps = gap_limits(problem.targets)
    within = [decode(limit.seconds, entries) for limit in gaps]
    most, shared = decode(None, entries), decode(None, room)
    # Requests without this limit may be decoded in steps of any length.
    bounds = [mixed_rate(decode(g.seconds, room), shared, g.share) for g in gaps]
    return FoundRates(
        PhaseRates(one_by_one, min(within, default=most)),
        PhaseRates(full, min(bounds, default=shared)),
        work,
    )


def most_rate(targets: Targets, found: FoundRates, prefills: int, decodes: int) -> float:
    """Return the arrival rate that the targets allow, given each phase's rates and ``SLACK``."""
    first, last = allowances(targets, found.work)
    full = found.full
    phases = (UTILISATION * prefills * full.prefill, first), (decodes * full.decode, last)
    rates = [
        finite_rate(SLACK * rate, len(found.work), late_s, share)
        for rate, until in phases
        for late_s, share in until
    ]
    return min(rates, default=math.inf)
