"""Costs of a plan, from shapes and compiled steps, before any weights are loaded."""

import math
import re
import time
from collections import Counter
from dataclasses import dataclass

from jaxinfer.runtime.ffn.ffn_step import FfnStep
from jaxinfer.runtime.spread.head_pools import head_pools
from jaxinfer.runtime.spread.spread_step import SpreadStep
from jaxinfer.runtime.stage.kv_cache import shard_bytes
from jaxinfer.runtime.stage.sampler import SamplerShape
from jaxinfer.runtime.stage.stage_plan import StagePlan
from jaxinfer.runtime.stage.step import CompiledStep, Key
from jaxinfer.serving.features.head_slices import most_pages
from jaxinfer.steps.shapes import StepShape

_COLLECTIVE = re.compile(
    r" = (\(?[^=]*?) (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)"
    r"(?:-start)?\("
)
_ARRAY = re.compile(r"(pred|[a-z]+)(\d*)\[([\d,]*)\]")


@dataclass(frozen=True)
class ParameterGroup:
    """Parameters that differ only in their layer; ``*_bytes`` count all of them together."""

    path: str
    count: int
    shape: tuple[int, ...]
    dtype: str
    spec: str
    total_bytes: int
    device_bytes: int


@dataclass(frozen=True)
class StepCost:
    """A compiled step, including its sampler.

    Attributes:
        temporary_bytes: bytes of activations, per device.
        collectives: kind -> (number, bytes of their results per device); a collective in a loop
            counts once.
        compile_s: seconds to compile; short if the persistent cache has the step.
    """

    shape: StepShape
    temporary_bytes: int
    collectives: dict[str, tuple[int, int]]
    compile_s: float


def parameter_groups(plan: StagePlan) -> list[ParameterGroup]:
    """Return the parameters in the model's order, grouped over layers."""
    groups: dict[tuple[str, str], list[str]] = {}
    for path, array in plan.parameters.items():
        folded = re.sub(r"\.\d+\.", ".*.", path)
        groups.setdefault((folded, str(array)), []).append(path)
    found = []
    for (folded, _), paths in groups.items():
        first = plan.parameters[paths[0]]
        total = math.prod(first.shape) * first.dtype.itemsize
        spec = getattr(first.sharding, "spec", "")
        found.append(
            ParameterGroup(
                folded,
                len(paths),
                first.shape,
                first.dtype.name,
                ", ".join(_axes(axis) for axis in spec),
                total * len(paths),
                shard_bytes(first) * len(paths),
            )
        )
    return found


def _axes(place: str | tuple[str, ...] | None) -> str:
    """Return the names of mesh axes, joined by ``+``."""
    return "+".join(place) if isinstance(place, tuple) else place or "-"


def step_costs(plan: StagePlan) -> list[StepCost]:
    """Compile the largest step with prefill and the largest step of only decodes."""
    step = FfnStep(plan) if plan.ffn else CompiledStep(plan)
    if plan.attention:
        step = SpreadStep(plan, head_pools(plan))
    shapes = plan.limits.shapes()
    chosen = dict.fromkeys([shapes[0], next(s for s in shapes if not s.chunks)])
    return [_cost(step, shape) for shape in chosen]


def _cost(step: CompiledStep, shape: StepShape) -> StepCost:
    start = time.perf_counter()
    parts = step.compile_parts(Key(shape, SamplerShape()))
    seconds = time.perf_counter() - start
    memory = [part.memory_analysis() for part in parts]
    text = "\n".join(part.as_text() or "" for part in parts)
    temporary = max(each.temp_size_in_bytes for each in memory if each)
    return StepCost(shape, temporary, collectives(text), seconds)


def collectives(hlo: str) -> dict[str, tuple[int, int]]:
    """Count the collectives in a compiled module's text: kind -> (number, bytes of results)."""
    count: Counter[str] = Counter()
    size: Counter[str] = Counter()
    for result, kind in _COLLECTIVE.findall(hlo):
        count[kind] += 1
        size[kind] += sum(map(_array_bytes, _ARRAY.findall(result)))
    return {kind: (number, size[kind]) for kind, number in count.items()}


def _array_bytes(array: tuple[str, str, str]) -> int:
    _, bits, dims = array
    return int(bits or 8) // 8 * math.prod(int(n) for n in dims.split(",") if n)


def longest_request(plan: StagePlan) -> int:
    """Return the largest number of prompt and output tokens of one request."""
    pages = plan.num_pages - 1
    if plan.attention:
        pages = most_pages([count - 1 for count in plan.pool_pages], plan.num_kv_heads)
    # The last token needs no KV entry.
    return min(plan.max_model_len, pages * plan.limits.page_size + 1)


def weight_bytes_per_device(plan: StagePlan) -> int:
    """Return the bytes that parameters take on one device, without other uses of its memory."""
    return sum(map(shard_bytes, plan.parameters.values()))
