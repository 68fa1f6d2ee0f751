"""Checks our own hand-offs with the conformance kit's golden KV."""

from collections.abc import Mapping, Sequence

import jax
import numpy as np

from jaxinfer.lab.conformance import GoldenModel, KVLayout, Side
from jaxinfer.lab.conformance.formats import FORMATS
from jaxinfer.lab.conformance.golden import FORMER
from jaxinfer.lab.conformance.layout import LayerPages, Order
from jaxinfer.lab.conformance.side import Pool
from jaxinfer.pallas_kernels.choice import keys_by_token
from jaxinfer.pallas_kernels.kv_pages import KVPages
from jaxinfer.runtime.stage.stage import Stage

# The only request that is handed over.
REQUEST = 1


def golden_model(sides: Sequence[Sequence[Stage]]) -> tuple[GoldenModel | None, str]:
    """Return the kit's model for the instances of all sides, or None and the reason for it."""
    plan = sides[0][0].plan
    tokens = max(s.plan.num_pages * s.plan.limits.page_size for stages in sides for s in stages)
    layers = sum(len(stage.kv) for stage in sides[0])
    try:
        return GoldenModel(layers, plan.num_kv_heads, plan.config.head_dim, (), tokens), ""
    except ValueError as error:
        return None, f"golden entries are left out: {error}"


def layout_of(stages: Sequence[Stage]) -> KVLayout:
    """Describe the layout of an instance's pools in the kit's terms."""
    plan = stages[0].plan
    keys: Order = "HND" if keys_by_token(plan.config.kernels) else "HDN"
    return KVLayout(
        tp=plan.kv_ways,
        stages=tuple(len(stage.kv) for stage in stages),
        page_size=plan.limits.page_size,
        kv_dtype=plan.kv_dtype.name,
        keys=keys,
    )


class GoldenEnd:
    """The kit's adapter to one instance: it sets and reads the instance's pages."""

    def __init__(
        self, model: GoldenModel, stages: Sequence[Stage], table: Sequence[int], length: int,
        number: int,
    ) -> None:  # fmt: skip
        self._stages = stages
        self.side = Side(model, layout_of(stages), stages[0].plan.num_pages, FORMER + 1 + number)
        self.side.add(REQUEST, length, list(table))

    def write(self) -> None:
        """Copy all pages of the side to the instance."""
        layers = [(stage, index) for stage in self._stages for index in range(len(stage.kv))]
        for layer, (stage, index) in enumerate(layers):
            old, kv = stage.kv[index], [self._whole(layer, part) for part in (0, 1)]
            arrays = [
                jax.device_put(pool.pages.view(was.dtype), was.sharding)
                for pool, was in zip(kv, (old.keys, old.values), strict=True)
            ]
            if old.key_scale_PK is not None and old.value_scale_PK is not None:
                both = zip(kv, (old.key_scale_PK, old.value_scale_PK), strict=True)
                arrays += [jax.device_put(pool.scale_PK, was.sharding) for pool, was in both]
            stage.kv[index] = KVPages(*arrays)

    def read(self) -> None:
        """Copy the instance's pages to the side."""
        self.side.load(self._pools())

    def _whole(self, layer: int, part: int) -> Pool:
        """Return the pages of all devices together."""
        ranks = [pair[part] for shard, pair in self.side.pools.items() if shard.layer == layer]
        pages = np.concatenate([pool.pages for pool in ranks], axis=1)
        scales = [pool.scale_PK for pool in ranks if pool.scale_PK is not None]
        return Pool(pages, np.concatenate(scales, axis=1) if scales else None)

    def _pools(self) -> Mapping[LayerPages, tuple[Pool, Pool]]:
        kv = [layer for stage in self._stages for layer in stage.kv]
        ways, storage = self.side.layout.tp, FORMATS[self.side.layout.kv_dtype].storage
        found = {}
        for shard in self.side.pools:
            pages = kv[shard.layer]
            parts = []
            for array, scale in (
                (pages.keys, pages.key_scale_PK),
                (pages.values, pages.value_scale_PK),
            ):
                mine = np.split(np.asarray(array).view(storage), ways, axis=1)[shard.rank]
                cut = [] if scale is None else np.split(np.asarray(scale), ways, axis=1)
                parts.append(Pool(mine, cut[shard.rank] if cut else None))
            found[shard] = parts[0], parts[1]
        return found
