"""Measures attention on each device with KV heads, for systems that place heads by attention time.

It follows Hetis, section 5.1: decodes with various numbers of heads and cache sizes, on each
device.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future

import jax
import numpy as np

from jaxinfer.runtime.cluster import Engine
from jaxinfer.runtime.processes.pipeline_worker import PipelineWorker
from jaxinfer.runtime.processes.process_group import Progress
from jaxinfer.runtime.profiling.measure_steps import new_batch
from jaxinfer.runtime.profiling.profile import Needs, profile_key
from jaxinfer.runtime.spread.lender_client import padded
from jaxinfer.runtime.spread.spread_inputs import SpreadInputs
from jaxinfer.runtime.spread.spread_stage import SpreadStage
from jaxinfer.runtime.spread.spread_step import HeadSplit
from jaxinfer.runtime.stage.stage import put_whole
from jaxinfer.serving.kv_shards import KVShards
from jaxinfer.steps.attention_profile import (
    AttentionProfile,
    ShardPoints,
    load_attention,
    store_attention,
)

PASSES = 3
# Numbers of heads, each half of the next, and sizes of cache for each.
_HEADS, _CONTEXTS = 8, 4
# Numbers of pairs of a token and a KV head, and of KV entries before each token.
_Point = tuple[int, int]


def prepare_attention(needs: Mapping[str, Needs], progress: Progress) -> None:
    """Give engines whose system places heads their attention fits, from stored or new profiles."""
    for need in needs.values():
        for name, engine in need.cluster.engines.items():
            options = need.cluster.config.instances[name]
            halves = options.half_batches == "by_time"
            if options.is_spread and (need.attention or halves):
                key = profile_key(engine, need.model)
                profile = load_attention(key)
                if profile is None:
                    profile = profile_attention(name, engine, need.model, progress)
                    store_attention(profile)
                slowdowns = dict(zip(engine.groups, need.cluster.slowdowns(name), strict=True))
                engine.attention[:] = profile.fits(slowdowns)
                engine.dense[:] = profile.dense(slowdowns) if halves else []


def profile_attention(
    name: str, engine: Engine, model: str, progress: Progress
) -> AttentionProfile:
    """Measure all shards; nothing else may run meanwhile, and their KV pages are overwritten."""
    what = f"profiling attention of {name}"
    if isinstance(engine.worker, PipelineWorker):
        progress(what, 1)
        found = [points for part in engine.worker.measure(shard_points) for points in part]
        progress(what, 0)
    else:
        found = shard_points(engine, lambda group, left: progress(f"{what} on {group}", left))
    return AttentionProfile(profile_key(engine, model), found)


def shard_points(
    engine: Engine, progress: Progress = lambda group, left: None
) -> list[ShardPoints]:
    """Measure attention on the shards of the stages that this process has.

    Args:
        progress: called with each group, with 1 before its measurement and 0 after it.
    """
    found: list[ShardPoints] = []
    kv = engine.new_kv()
    for stage, group in zip(engine.stages, engine.groups, strict=True):
        if not isinstance(stage, SpreadStage):
            found.append(ShardPoints(group, []))  # All heads are in one place.
            continue
        first = len(found)
        for number, where in enumerate([group, *(each.group for each in stage.plan.attention)]):
            progress(where, 1)
            found.append(_ShardTimes(stage, kv, first, number).points(where))
            progress(where, 0)
    return found


class _ShardTimes:
    """Times of one device of a spread stage.

    Args:
        kv: empty pools.
        first: number of the stage's first shard.
        number: number of the device in the stage.
    """

    def __init__(self, stage: SpreadStage, kv: KVShards, first: int, number: int) -> None:
        self._stage, self._kv, self._first, self._number = stage, kv, first, number
        self._shard = kv.shards[first + number]
        self._slices = kv.shards[first].slices

    def points(self, group: str) -> ShardPoints:
        """Return the fastest of several passes: other work on the machine can only slow
        one down.
        """
        todo = list(self._grid())
        attention: dict[_Point, float] = {}
        exchange: dict[int, float] = {}
        for _ in range(PASSES):
            for heads, context in todo:
                inputs = self._inputs(heads, context)
                self._attention_s(inputs)  # The first run after another shape takes longer.
                seconds = self._attention_s(inputs)
                at = heads, context
                attention[at] = min(attention.get(at, seconds), seconds)
                if self._number and self._number not in self._stage.elsewhere:
                    seconds = min(self._exchange_s(inputs) for _ in range(2))
                    exchange[heads] = min(exchange.get(heads, seconds), seconds)
        return ShardPoints(
            group,
            [(heads, heads * (context + 1), s) for (heads, context), s in attention.items()],
            list(exchange.items()),
            [] if self._number else self._dense(),
        )

    def _grid(self) -> Iterator[_Point]:
        """Return points up to the limits of the pool and of a step."""
        limits, size = self._stage.step.limits, self._kv.page_size
        most = min(limits.row_buckets[-1] * len(self._slices), self._shard.num_free_pages)
        for heads in sorted({max(most >> halved, 1) for halved in range(_HEADS)}):
            pages = min(self._shard.num_free_pages // heads, limits.max_pages)
            contexts = np.linspace(min(size, pages * size - 1), pages * size - 1, _CONTEXTS)
            for context in sorted({int(value) for value in contexts}):
                yield heads, context

    def _inputs(self, heads: int, context: int) -> SpreadInputs:
        """Return a step of decodes, each with as many heads here as the model has."""
        each = len(self._slices)
        counts = [min(each, heads - begun) for begun in range(0, heads, each)]
        placements: list[list[Sequence[int]]] = [[()] * len(self._kv.shards) for _ in counts]
        for placement, count in zip(placements, counts, strict=True):
            placement[self._first + self._number] = self._slices[:count]
        batch = new_batch(self._kv, [(context, 1)] * len(counts), placements)
        shape = self._stage.step.limits.shape_for(batch)
        inputs = self._stage.inputs(batch, shape, {}, self._first)
        assert isinstance(inputs, SpreadInputs)
        for row in batch.rows:
            row.hold.release()
        return inputs

    def _attention_s(self, inputs: SpreadInputs) -> float:
        """Return the mean seconds of attention per layer.

        If the device is in another process, this includes sending and receiving.
        """
        stage, number = self._stage, self._number
        if number in stage.elsewhere:
            return self._elsewhere_s(inputs)
        there = stage.pools[number].sharding
        piece = jax.device_put(self._piece(inputs), there)
        tables = jax.device_put(inputs.tables[number], there)
        jax.block_until_ready((piece, tables))
        layers = len(stage.step.windows)
        start = time.perf_counter()
        for layer in range(layers):
            out = stage.attend_here(number, layer, inputs.pairs, piece, tables)
            if stage.pools[number].mesh.devices.flat[0].platform == "cpu":
                out.block_until_ready()  # A CPU may compute several layers at once.
        out.block_until_ready()
        return (time.perf_counter() - start) / layers

    def _elsewhere_s(self, inputs: SpreadInputs) -> float:
        stage = self._stage
        begun = stage.begin(self._number, inputs)
        layers = len(stage.step.windows)
        # One for each layer, because a copy in the host's memory is kept.
        pieces = [jax.device_put(self._piece(inputs), stage.plan.devices[0]) for _ in range(layers)]
        jax.block_until_ready(pieces)
        start = time.perf_counter()
        for layer, piece in enumerate(pieces):
            out = stage.attend(self._number, layer, inputs.pairs, piece, begun)
            assert isinstance(out, Future)
            found = padded(out.result(), inputs.pairs.tokens)
            jax.device_put(found, stage.plan.whole).block_until_ready()
        return (time.perf_counter() - start) / layers

    def _exchange_s(self, inputs: SpreadInputs) -> float:
        """Return the seconds to send a layer's queries, keys and values there and its outputs back.

        This is measured once per layer, in a row, as between layers.
        """
        plan, there = self._stage.plan, self._stage.pools[self._number].sharding
        cut = HeadSplit(plan, 1, inputs.pairs.tokens)
        piece = jax.device_put(self._piece(inputs), plan.devices[0])
        out = jax.device_put(np.zeros((cut.R, cut.G, cut.H), plan.dtype), there)
        jax.block_until_ready((piece, out))
        layers = len(self._stage.step.windows)
        start = time.perf_counter()
        for _ in range(layers):
            jax.block_until_ready(jax.device_put(piece, there))
            jax.block_until_ready(put_whole(out, plan))
        return (time.perf_counter() - start) / layers

    def _dense(self) -> list[tuple[int, float]]:
        """Return the seconds of a layer without attention, by tokens; the mean without
        the first.
        """
        stage, found = self._stage, dict[int, float]()
        for shape in stage.step.limits.shapes():
            *_, padding = stage.padding(shape)
            x_TD = stage.zeros(shape.tokens, stage.plan.config.hidden_size, dtype=np.float32)
            for _ in range(PASSES + 1):
                chain = stage.chain(shape, padding, None if stage.plan.layers.first else x_TD)
                chain.enter(0)
                chain.wait()
                start = time.perf_counter()
                for layer in range(1, len(stage.layers)):
                    chain.enter(layer)
                chain.wait()
                seconds = (time.perf_counter() - start) / max(len(stage.layers) - 1, 1)
                found[shape.tokens] = min(found.get(shape.tokens, seconds), seconds)
        return sorted(found.items())

    def _piece(self, inputs: SpreadInputs) -> np.ndarray:
        cut = HeadSplit(self._stage.plan, 1, inputs.pairs.tokens)
        return np.zeros((cut.R, cut.G + 2, cut.H), cut.dtype)
