"""Measures instances on an idle machine, and prepares the fits that runs need."""

import hashlib
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxinfer import __version__
from jaxinfer.errors import JaxinferError
from jaxinfer.files.made_from import PACKAGE, cpu_name, digest_of
from jaxinfer.runtime.cluster import Cluster, Engine, describe_attention
from jaxinfer.runtime.ffn.ffn_stage import FfnStage
from jaxinfer.runtime.processes.pipeline_worker import AnyRemote
from jaxinfer.runtime.processes.process_group import Progress
from jaxinfer.runtime.profiling.measure_steps import measure_steps
from jaxinfer.runtime.profiling.profile_ffn import emulate_parts, measure_parts
from jaxinfer.runtime.stage.stage_plan import StageFacts
from jaxinfer.serving.batch import Batch
from jaxinfer.serving.kv_shards import KVShards
from jaxinfer.serving.step_fit import StepFit
from jaxinfer.steps.profile import (
    Profile,
    load_profile,
    profile_path,
    read_profile,
    store_profile,
)
from jaxinfer.steps.shapes import StepLimits, StepShape
from jaxinfer.steps.times import Part, StepPoint, StepTimes, shape_of

# Number of passes over all steps, and the seconds for them while a run waits.
PASSES, BUDGET_S = 3, 60.0


def profile_key(engine: Engine, model: str) -> dict[str, Any]:
    """Return everything that decides an instance's step times.

    Devices of one kind in this process count as equal; those of another process may be on another
    host.
    """
    plan, options = engine.plan, engine.plan.options
    apart = isinstance(engine.worker, AnyRemote)
    return {
        "model": model,
        "config": _digest(repr(plan.config).encode()),
        "dtype": plan.dtype.name,
        "kv_dtype": plan.kv_dtype.name,
        "stages": [
            {
                "device_kind": stage.devices[0].device_kind,
                "process_of": group if apart else None,
                "devices": len(stage.devices),
                "mesh": [list(axis) for axis in stage.axes.items()],
                "layers": [stage.layers.start, stage.layers.stop],
                "num_pages": stage.num_pages,
                "kernels": stage.config.kernels,
            }
            | ({"attention": places} if (places := describe_attention(stage)) else {})
            | _ffn_key(stage)
            for stage, group in zip(engine.plans, engine.groups, strict=True)
        ],
        "chunk_tokens": options.max_num_batched_tokens,
        "token_buckets": engine.plan.limits.token_buckets,
        "max_num_seqs": options.max_num_seqs,
        "max_model_len": plan.max_model_len,
        "page_size": options.page_size,
        "jax": jax.__version__,
        "jaxlib": version("jaxlib"),
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
        "jaxinfer": __version__,
        "cores": os.cpu_count(),
        "cpu": cpu_name(),
        "code": _code(),
    }


def _ffn_key(stage: StageFacts) -> dict[str, Any]:
    devices = stage.ffn.devices if stage.ffn else []
    return {"ffn": [device.device_kind for device in devices]} if devices else {}


@cache
def _code() -> str:
    """Return a digest of the files that make and run steps: an edit may change step times."""
    folders = ("models", "pallas_kernels", "runtime")
    return _digest("".join(digest_of(PACKAGE / name) for name in folders).encode())


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def profile_name(engine: Engine, model: str) -> str:
    """Return the name of the file with an instance's profile, if there is one."""
    return profile_path(profile_key(engine, model)).stem


def profile_engines(
    engines: Mapping[str, tuple[Engine, str]],
    progress: Progress,
    grids: "Mapping[str, Grid] | None" = None,
    budget_s: float = math.inf,
) -> dict[str, Profile]:
    """Measure instances; nothing else may run meanwhile, and their KV pages are overwritten.

    Other work on the machine can only slow a step down, for a while. The instances therefore take
    turns, so that the passes of each are far apart in time, and the fastest time of each step
    counts.

    Args:
        engines: engines and their models' names, by any key.
        grids: the steps to measure for each key; by default all.
        budget_s: seconds that the passes may take; at least one is made.
    """
    grids = grids or {name: Grid.of(engine) for name, (engine, _) in engines.items()}
    best: dict[str, dict[tuple[Part, ...], StepPoint]] = {name: {} for name in grids}

    def measure(name: str, steps: Sequence[tuple[Part, ...]], part: str, left: int) -> None:
        engine, _ = engines[name]
        for point in measure_steps(engine.worker, engine.new_kv(), engine.plan.limits, steps):
            so_far = best[name].get(point.parts, point)
            best[name][point.parts] = min(so_far, point, key=lambda point: point.seconds)
            left -= 1
            progress(part, left)

    pass_s = {}
    for name, grid in grids.items():
        first = [steps[0] for steps in grid.by_shape]
        part = f"timing a step of each shape of {name}"
        progress(part, len(first))
        measure(name, first, part, len(first))
        once = [best[name][steps[0]].seconds * (len(steps) + 1) for steps in grid.by_shape]
        pass_s[name] = sum(once)
    fitting = (n for n in range(PASSES, 1, -1) if n * sum(pass_s.values()) <= budget_s)
    passes = next(fitting, 1)
    parts = {name: f"profiling {name}, about {passes * s:.0f} s" for name, s in pass_s.items()}
    for name, grid in grids.items():
        progress(parts[name], passes * len(grid.steps))
    for number in range(passes):
        for name, grid in grids.items():
            measure(name, grid.steps, parts[name], (passes - number) * len(grid.steps))
    return {
        name: _profile(grids[name], best[name], engine, profile_key(engine, model))
        for name, (engine, model) in engines.items()
    }


def _profile(
    grid: "Grid", found: Mapping[tuple[Part, ...], StepPoint], engine: Engine, key: dict[str, Any]
) -> Profile:
    prefills = []
    for length in grid.lengths:
        chunks = [found[part,].stages for part in grid.prefill(length)]
        prefills.append((length, tuple(sum(times) for times in zip(*chunks, strict=True))))
    mixed = [(p, d, found[parts].stages) for p, d, parts in grid.mixed]
    ffn, own = measure_parts(engine, grid.steps, PASSES)
    return Profile(key, prefills, mixed, list(found.values()), tuple(ffn), tuple(own))


@dataclass(frozen=True)
class Needs:
    """A cluster of one model, and whether its system needs fits of steps and of attention."""

    cluster: Cluster
    model: str
    fits: bool
    attention: bool

    @property
    def engines(self) -> dict[str, Engine]:
        """The instances to profile: all that compute if the system needs fits, or emulated ones."""
        return {
            name: engine
            for name, engine in self.cluster.engines.items()
            if self.cluster.config.instances[name].computes
            if self.fits
            or self.cluster.is_emulated(name)
            or any(stage.link for stage in engine.stages)
        }


def prepare_times(needs: Mapping[str, Needs], progress: Progress) -> dict[str, dict[str, StepFit]]:
    """Make each instance's fit and set its emulation, from stored profiles or new ones.

    Args:
        needs: clusters and their needs, by any key.
    """
    found: dict[Path, tuple[str, Engine, str]] = {}
    fits: dict[Path, bool] = {}
    for called, need in needs.items():
        for name, engine in need.engines.items():
            path = profile_path(profile_key(engine, need.model))
            label = f"{called}: {name}" if len(needs) > 1 else name
            found.setdefault(path, (label, engine, need.model))
            fits[path] = fits.get(path, False) or need.fits
    missing = {
        path: each
        for path, each in found.items()
        if not path.is_file() or (fits[path] and not read_profile(path).has_fits)
    }
    new = {label: (engine, model) for label, engine, model in missing.values()}
    grids = {label: Grid.of(engine, fits[path]) for path, (label, engine, _) in missing.items()}
    for profile in profile_engines(new, progress, grids, BUDGET_S).values():
        store_profile(profile)
    return {called: _use_profiles(need) for called, need in needs.items()}


def _use_profiles(need: Needs) -> dict[str, StepFit]:
    fits = {}
    for name, engine in need.engines.items():
        profile = load_profile(profile_key(engine, need.model))
        assert profile
        slowdowns = need.cluster.slowdowns(name)
        if need.cluster.is_emulated(name) and isinstance(stage := engine.stages[0], FfnStage):
            if need.fits:
                raise JaxinferError(
                    f"instances.{name}: its system goes by fits of step times, which do not tell "
                    "of the parts of a step: leave out emulate, or ffn"
                )
            emulate_parts(stage, profile, need.cluster.config.groups, *engine.groups)
            continue
        if need.fits:
            fits[name] = profile.fit(slowdowns)
        for stage, slowdown, times in zip(
            engine.stages, slowdowns, step_times(engine, profile), strict=True
        ):
            # With an emulated link, inputs arrive late, so only recorded times tell when a step
            # ends.
            if slowdown != 1 or stage.link:
                stage.emulate = partial(_slowed, times, slowdown)
    return fits


def _slowed(times: StepTimes, slowdown: float, batch: Batch) -> float:
    return slowdown * times.seconds(batch.work)


def step_times(engine: Engine, profile: Profile) -> list[StepTimes]:
    """Fit the step times of each stage of an instance."""
    return [
        StepTimes.fit(plan.limits, profile.points, stage) for stage, plan in enumerate(engine.plans)
    ]


@dataclass(frozen=True)
class Grid:
    """The steps to measure on one instance.

    Attributes:
        limits: limits that decide the shapes.
        lengths: lengths of the prefills to which eq. 2 is fitted.
        mixed: (prefill context, decode context, parts) of the steps to which eq. 3 is fitted.
        others: steps with only decodes and steps with chunks of each bucket, several of each shape.
    """

    limits: StepLimits
    lengths: list[int]
    mixed: list[tuple[int, int, tuple[Part, ...]]]
    others: list[tuple[Part, ...]]

    @classmethod
    def of(cls, engine: Engine, fits: bool = True) -> "Grid":
        """Choose four to eight values of each kind, up to what the instance can hold.

        Args:
            fits: also choose steps to fit eqs. 2 and 3; otherwise the other steps suffice.
        """
        limits, kv = engine.plan.limits, engine.new_kv()
        budget = limits.max_num_batched_tokens
        room = kv.num_pages * kv.page_size
        longest = min(engine.plan.max_model_len, room) - 1
        lengths = _spread(max(min(budget, longest) // 4, 2), longest, 8) if fits else []
        others: list[tuple[Part, ...]] = []
        for bucket in limits.row_buckets:
            rows = min(bucket, kv.num_pages)  # A small pool never has as many.
            most = min(longest, kv.num_pages // rows * kv.page_size - 1)
            others += [((context, 1),) * rows for context in _spread(0, most, 3)]
        for tokens in limits.token_buckets:
            if tokens <= longest:
                others += [((c, tokens),) for c in _spread(0, longest - tokens, 3)]
            else:
                sizes = {longest // share for share in (1, 2, 4)} - {0, 1}
                others += [_prompts(tokens, size, limits.max_chunks, kv) for size in sorted(sizes)]
        mixed: list[tuple[int, int, tuple[Part, ...]]] = []
        rows = min(limits.row_buckets[-1] // 2, budget // 2)
        chunk = min(longest, kv.num_pages // 2 * kv.page_size)
        for tokens in limits.token_buckets:
            middle = min(longest, kv.num_pages // (rows + 2) * kv.page_size - 1) // 2
            if rows and middle > 0 and 2 <= tokens - rows <= chunk:
                others.append((*[(middle, 1)] * rows, (0, tokens - rows)))
        for prefill in _spread(0, max(longest - budget, 0), 4) if fits else []:
            count = min(budget, longest - prefill)
            spare = kv.num_pages - kv.pages_for(prefill + count)
            contexts = _spread(0, min(longest, spare // max(rows, 1) * kv.page_size - 1), 4)
            mixed.append((prefill, 0, ((prefill, count),)))
            if rows and spare >= rows and count > rows + 1:
                mixed += [
                    (prefill, rows * c, (*[(c, 1)] * rows, (prefill, count - rows)))
                    for c in contexts
                ]
        return cls(limits, lengths, mixed, others)

    def prefill(self, length: int) -> list[Part]:
        """Return the chunks into which a prompt of this length is cut if it runs alone."""
        budget = self.limits.max_num_batched_tokens
        return [(start, min(budget, length - start)) for start in range(0, length, budget)]

    @property
    def by_shape(self) -> list[list[tuple[Part, ...]]]:
        """The steps to measure, each once, grouped by shape."""
        chunks = [(part,) for length in self.lengths for part in self.prefill(length)]
        found: dict[StepShape, list[tuple[Part, ...]]] = {}
        for parts in dict.fromkeys([*chunks, *(parts for *_, parts in self.mixed), *self.others]):
            found.setdefault(shape_of(self.limits, parts), []).append(parts)
        return list(found.values())

    @property
    def steps(self) -> list[tuple[Part, ...]]:
        """The steps to measure, as one list."""
        return [parts for steps in self.by_shape for parts in steps]


def _prompts(tokens: int, size: int, most: int, kv: KVShards) -> tuple[Part, ...]:
    """Return prompts of ``size`` tokens: ``tokens`` tokens together, or as many as fit."""
    parts: list[Part] = []
    pages = kv.num_pages
    while len(parts) < most and (count := min(size, tokens, pages * kv.page_size)) > 1:
        parts.append((0, count))
        tokens -= count
        pages -= kv.pages_for(count)
    return tuple(parts)


def _spread(low: int, high: int, count: int) -> list[int]:
    """Return about ``count`` whole numbers from ``low`` to ``high``, evenly spaced."""
    return sorted({round(value) for value in np.linspace(low, max(high, low), count)})
