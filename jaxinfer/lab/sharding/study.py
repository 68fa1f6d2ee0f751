"""Compares layouts of one model on one mesh: bytes, collectives and seconds."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path

from jaxinfer.errors import JaxinferError
from jaxinfer.hardware.catalogue import ITEMSIZES, Gpu, ModelShape
from jaxinfer.lab.sharding.cache import CompiledCache
from jaxinfer.lab.sharding.compiling import Compiled, LayerJob, as_text, compile_all
from jaxinfer.lab.sharding.crossings import SecondsOf
from jaxinfer.lab.sharding.hlo import Counts, counted
from jaxinfer.lab.sharding.search import Step
from jaxinfer.lab.sharding.targets import CompileTarget
from jaxinfer.models.layouts import Layout, most_ways, ways
from jaxinfer.sharding.collectives import Collective, is_the_compilers, without_reduce_scatter
from jaxinfer.sharding.costs import LayoutCosts, LayoutStepCost, Seconds, at_peaks
from jaxinfer.sharding.dataflow import head_flow, layer_flow
from jaxinfer.sharding.links import Link
from jaxinfer.sharding.shapes import up

# Share by which a collective's bytes may differ from the closed form.
TOLERANCE = 0.01
# The reason why KV cannot be cut by sequences if there is only one.
OF_DECODES = "S of KV pages: a prompt is one sequence, which one device would keep and attend to"


@dataclass(frozen=True)
class LayoutQuestion:
    """The subject of a study of layouts: a model, a mesh, and the steps.

    Attributes:
        mesh: axis -> number of devices.
        tokens: number of tokens of a prompt to prefill.
        sequences: number of sequences that decode.
        context: number of KV entries that each of these sequences sees, including its own.
        links: link of each axis.
    """

    model: ModelShape
    mesh: dict[str, int]
    card: Gpu
    target: CompileTarget
    phases: tuple[str, ...]
    tokens: int
    sequences: int
    context: int
    dtype: str
    links: Mapping[str, Link]

    @property
    def itemsize(self) -> int:
        """Bytes of a number."""
        return ITEMSIZES[self.dtype]

    def job(self, name: str, layout: Layout, phase: str) -> LayerJob:
        """Return the job to compile for a phase, or for the head of decodes."""
        tokens = self.tokens if phase == "prefill" else self.sequences
        padded = up(tokens, most_ways("TS" if phase == "head" else "T", layout, self.mesh))
        context = up(self.context, ways(layout.kv.get("C", ()), self.mesh))
        return LayerJob(name, as_text(layout, list(self.mesh)), phase, padded, context)

    def costs(self, layout: Layout) -> LayoutCosts:
        """Return the costs of a layout by closed forms."""
        return at_peaks(self.model, layout, self.mesh, self.card, self.links, self.itemsize)

    def step(self, costs: LayoutCosts, phase: str, tokens: int | None = None) -> LayoutStepCost:
        """Return the costs of a phase's step, with another number of tokens if given."""
        step = self.asked(phase, tokens)
        return costs.step(step.tokens, step.sequences, step.context)

    def asked(self, phase: str, tokens: int | None = None) -> Step:
        """Return a phase's step, with another number of tokens if given."""
        if phase == "prefill":
            prompt = tokens or self.tokens
            return Step(prompt, 1, 0, prompt)
        sequences = tokens or self.sequences
        return Step(sequences, sequences, self.context - 1, sequences * self.context)


@dataclass(frozen=True)
class LayoutFinding:
    """The findings about a layout in one phase, or about its head, which each step has once.

    Attributes:
        phase: ``prefill``, ``decode`` or ``head``.
        cost: cost by closed forms; for the head, that of the step of decodes.
        kv_bytes: bytes of all KV entries on one device.
        temporary_bytes: bytes of a step's arrays on one device.
        compiled: one layer's collectives by kind, in numbers, as compiled.
        closed: the same by closed forms for that compiler.
        notes: differences of the compiler from the closed forms, or special cases for it.
        padding: description of padding that makes heads, columns and tokens divide.
    """

    layout: str
    phase: str
    cost: LayoutStepCost
    kv_bytes: float
    temporary_bytes: float
    compiled: Counts
    closed: Counts
    notes: tuple[str, ...]
    padding: str

    @property
    def total_bytes(self) -> float:
        """Bytes that one device needs in total."""
        return self.cost.weight_bytes + self.kv_bytes + self.temporary_bytes

    @property
    def seconds(self) -> Seconds:
        """Seconds of the phase's step, or of the head."""
        return self.cost.head if self.phase == "head" else self.cost.step

    @property
    def equal(self) -> bool:
        """True if each kind has as many collectives, and bytes are equal within ``TOLERANCE``."""
        return alike(self.compiled, self.closed)


@dataclass(frozen=True)
class RefusedLayout:
    """A layout that cannot be used in one phase or for the head, with the reason."""

    layout: str
    phase: str
    why: str


def alike(one: Counts, two: Counts) -> bool:
    """Tell whether numbers of collectives are equal, and bytes equal within ``TOLERANCE``."""
    return one.keys() == two.keys() and all(
        one[kind][0] == two[kind][0]
        and abs(one[kind][1] - two[kind][1]) <= TOLERANCE * two[kind][1]
        for kind in one
    )


def closed_forms(
    found: Sequence[Collective], target: CompileTarget
) -> tuple[Counts, tuple[str, ...]]:
    """Return the closed forms for a target's compiler, and notes on what is special about it."""
    notes = []
    if target.is_cpu and any(map(is_the_compilers, found)):
        notes.append("no reduce-scatter on CPU")
        found = without_reduce_scatter(found)
    return counted(found), tuple(notes)


def deviations(compiled: Counts, closed: Counts) -> tuple[str, ...]:
    """Describe how the compiler's collectives differ from the closed forms."""
    if alike(compiled, closed):
        return ()
    if "collective-permute" in compiled:
        return ("collective-permutes, as of collective matmuls",)
    kinds = [kind for kind in {**closed, **compiled} if compiled.get(kind) != closed.get(kind)]
    return (f"other {', '.join(kinds)}: seconds are of the closed form",)


def seconds_of(question: LayoutQuestion, layout: Layout, phase: str) -> SecondsOf:
    """Return a function that gives the seconds of a phase's step from its tokens or sequences."""
    costs = question.costs(layout)
    return cache(lambda count: question.step(costs, phase, count).step.total)


def where_it_fits(
    question: LayoutQuestion, layout: Layout, phase: str, seconds: SecondsOf
) -> SecondsOf:
    """Return ``seconds`` as a function that is infinite if weights and KV do not fit on a card."""
    costs = question.costs(layout)
    room = question.card.memory_gb * 1e9 - costs.weight_bytes

    def found(count: int) -> float:
        step = question.asked(phase, count)
        kept = costs.kept_bytes(step.sequences, step.entries)
        return seconds(count) if kept <= room else math.inf

    return found


def study(
    question: LayoutQuestion,
    layouts: Mapping[str, Layout],
    cache_folder: Path,
    progress: Callable[[int], None] = lambda left: None,
) -> tuple[list[LayoutFinding], list[RefusedLayout]]:
    """Compile and price a layer in each layout and phase; return findings and refused layouts.

    Args:
        layouts: layouts by the names or files that they were read from.
        progress: called with the number of programs left.

    Raises:
        JaxinferError: no layout fits the mesh, the model and the compiler.
    """
    costs, found, refused = {}, [], []
    parts = (*question.phases, "head")
    for name, layout in layouts.items():
        try:
            costs[name] = question.costs(layout)
        except JaxinferError as error:
            refused += [RefusedLayout(name, part, str(error)) for part in parts]
    jobs = []
    for part, (name, cost) in product(parts, costs.items()):
        if part == "prefill" and cost.flow.sequence_ways > 1:
            refused.append(RefusedLayout(name, part, OF_DECODES))
        else:
            jobs.append(question.job(name, layouts[name], part))
    for job, compiled in zip(jobs, _compiled(question, jobs, cache_folder, progress), strict=True):
        if isinstance(compiled, str):
            refused.append(RefusedLayout(job.name, job.part, compiled))
        else:
            found.append(_finding(question, costs[job.name], job, compiled))
    if not any(each.phase in question.phases for each in found):
        reasons = dict.fromkeys(f"layout {each.layout}: {each.why}" for each in refused)
        raise JaxinferError("; ".join(reasons))
    return found, refused


def _compiled(
    question: LayoutQuestion,
    jobs: Sequence[LayerJob],
    cache_folder: Path,
    progress: Callable[[int], None],
) -> list[Compiled | str]:
    q = question
    kept_ones = CompiledCache(cache_folder, q.target, q.mesh, q.model, q.dtype)
    found: dict[LayerJob, Compiled | str] = {
        job: kept for job in jobs if (kept := kept_ones.get(job))
    }
    missing = [job for job in jobs if job not in found]
    progress(len(missing))
    results = compile_all(q.target, q.mesh, q.model, q.dtype, missing)
    for number, (job, result) in enumerate(zip(missing, results, strict=True), 1):
        found[job] = result
        if not isinstance(result, str):
            kept_ones.add(job, result)
        progress(len(missing) - number)
    return [found[job] for job in jobs]


def _finding(
    question: LayoutQuestion, costs: LayoutCosts, job: LayerJob, compiled: Compiled
) -> LayoutFinding:
    flow_of = head_flow if job.part == "head" else layer_flow
    flow = flow_of(costs.flow.model, costs.flow.layout, costs.flow.mesh, job.tokens)
    closed, notes = closed_forms(flow.collectives, question.target)
    cost, step = question.step(costs, job.part), question.asked(job.part)
    ragged = ("experts by ragged_dot",) if compiled.ragged else ()
    return LayoutFinding(
        job.name,
        job.part,
        cost,
        costs.kept_bytes(step.sequences, step.entries),
        compiled.temporaries * question.itemsize,
        dict(compiled.collectives),
        closed,
        (*notes, *deviations(compiled.collectives, closed), *ragged),
        _padding(question, costs.flow.model, job),
    )


def _padding(question: LayoutQuestion, after: ModelShape, job: LayerJob) -> str:
    before, units = question.model, "tokens" if job.part == "prefill" else "sequences"
    asked = question.tokens if job.part == "prefill" else question.sequences
    names = {
        "num_attention_heads": "heads",
        "num_key_value_heads": "KV heads",
        "intermediate_size": "columns",
    }
    said = [
        f"{getattr(before, name)} {words} as {getattr(after, name)}"
        for name, words in names.items()
        if getattr(before, name) != getattr(after, name)
    ]
    if job.tokens != asked:
        said.append(f"{asked} {units if asked > 1 else units[:-1]} as {job.tokens}")
    return ", ".join(said)
