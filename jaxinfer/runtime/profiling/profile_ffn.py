"""Measures the parts of steps whose FFN is on another group, to emulate slower devices."""

import time
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp

from jaxinfer.config.groups import GroupConfig
from jaxinfer.runtime.cluster import Engine
from jaxinfer.runtime.ffn.emulated_ffn import EmulatedFfn, PartSeconds
from jaxinfer.runtime.ffn.ffn_stage import FfnStage
from jaxinfer.runtime.profiling.measure_steps import measure_steps
from jaxinfer.steps.profile import Profile
from jaxinfer.steps.times import Part, StepPoint, StepTimes

# One of the FFN takes little time; the first one includes memory allocation.
_FFN_PASSES = 20


def measure_parts(
    engine: Engine, steps: Sequence[tuple[Part, ...]], passes: int
) -> tuple[list[tuple[int, float]], list[StepPoint]]:
    """Measure an instance's FFN and other parts, if it has one stage and both are in this process.

    Nothing else may run meanwhile. The fastest of several passes counts, as other work can only
    slow a part down.

    Returns:
        See ``Profile.ffn`` and ``Profile.own``.
    """
    (stage, *more) = engine.stages
    if more or not isinstance(stage, FfnStage):
        return [], []
    best: dict[tuple[Part, ...], StepPoint] = {}
    stage.leaves_out_ffn = True
    for _ in range(passes):
        for point in measure_steps(engine.worker, engine.new_kv(), stage.plan.limits, steps):
            so_far = best.get(point.parts, point)
            best[point.parts] = min(so_far, point, key=lambda point: point.seconds)
    stage.leaves_out_ffn = False
    return _measure_ffn(stage), list(best.values())


def _measure_ffn(stage: FfnStage) -> list[tuple[int, float]]:
    plan, found = stage.plan, dict[int, float]()
    buckets = dict.fromkeys(shape.tokens for shape in plan.limits.shapes())
    for _ in range(_FFN_PASSES):
        for tokens in buckets:
            y_TD = jnp.zeros((tokens, plan.config.hidden_size), plan.dtype)
            y_TD = jax.block_until_ready(jax.device_put(y_TD, plan.whole))
            for layer in range(len(stage.layers)):
                start = time.perf_counter()
                jax.block_until_ready(stage.compute_ffn(layer, y_TD, tokens))
                seconds = time.perf_counter() - start
                found[tokens] = min(found.get(tokens, seconds), seconds)
    return list(found.items())


def emulate_parts(
    stage: FfnStage, profile: Profile, groups: Mapping[str, GroupConfig], own: str
) -> None:
    """Let a stage's parts take as long as the slowdowns of their groups require.

    Args:
        own: the stage's own group.
    """
    assert stage.plan.ffn_group
    times = StepTimes.fit(stage.plan.limits, profile.own, 0)
    slowdowns = groups[own].slowdown, groups[stage.plan.ffn_group].slowdown
    seconds = PartSeconds(times, dict(profile.ffn), len(stage.layers), slowdowns)
    stage.emulated = EmulatedFfn(seconds)
