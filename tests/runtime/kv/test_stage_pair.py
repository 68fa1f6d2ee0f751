"""Channels gather, move, scatter and check slabs, compared with arrays on the host."""

from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from stage_cases import H, entries, pages_of, plans
from waiting import HANG_S, wait_until

from jaxinfer import JaxinferError
from jaxinfer.pallas_kernels.kv_pages import LARGEST, KVPages
from jaxinfer.runtime.kv.channel import Channel
from jaxinfer.runtime.kv.checksums import compare
from jaxinfer.runtime.kv.kv_endpoint import ThisProcess
from jaxinfer.runtime.kv.slab import SLAB_TOKENS, SlabDest, SlabFormat, SlabSource
from jaxinfer.runtime.kv.stage_pair import StagePair
from jaxinfer.runtime.stage.stage_plan import StagePlan
from jaxinfer.serving.batch import Transfer

TOKENS = 300


class Pair:
    """Two instances, their pages, and a request that has all of a table in each stage's."""

    def __init__(self, kv_heads: int, source: dict[str, Any], dest: dict[str, Any]) -> None:
        rng = np.random.default_rng(0)
        self.plans = plans(kv_heads, source, dest)
        self.stages: list[list[Any]] = [
            [SimpleNamespace(plan=plan, kv=pages_of(plan, rng), transfers={}) for plan in stages]
            for stages in self.plans
        ]
        self.tables = [
            [1 + rng.permutation(plan.num_pages - 1) for plan in ps] for ps in self.plans
        ]
        self.holds: list[Any] = [
            SimpleNamespace(tables=[[table.tolist()] for table in tables]) for tables in self.tables
        ]

    def form(self, i: int = 0, j: int = 0) -> SlabFormat:
        return SlabFormat.between(self.plans[0][i], self.plans[1][j])

    def move(self, start: int, stop: int, i: int = 0, j: int = 0, verify: bool = False) -> None:
        """Have a channel move tokens from one stage to one, until they lie in its pages."""
        here = ThisProcess({"a": self.stages[0], "b": self.stages[1]})
        pair = StagePair.between(self.plans[0][i], self.plans[1][j], i, j, ("g", "h"), None)
        channel = Channel(("a", "b"), (here, here), [pair], verify, ["device"])
        posted: SimpleQueue[Any] = SimpleQueue()
        try:
            assert channel.probe("a -> b") > 0
            transfer = self.transfer(start, stop)
            channel.send(transfer, posted.put)
            for _ in range(channel.num_slabs(transfer)):
                channel.place(posted.get(timeout=HANG_S))
            wait_until(lambda: not channel._slabs)
            assert posted.empty()
        finally:
            here.close()

    def transfer(self, start: int, stop: int) -> Transfer:
        request: Any = SimpleNamespace(id="r7")
        return Transfer(request, 0, "a", "b", *self.holds, start, stop, 0.0)

    def entries(self, end: int, stage: int, layer: int) -> np.ndarray:
        where = self.stages[end][stage]
        return entries(where.kv[layer], where.plan, self.tables[end][stage], TOKENS)


# Both instances, the stages of each that KV goes between, and which layers these share.
Case = tuple[int, dict[str, Any], dict[str, Any], int, int, list[tuple[int, int]]]
ALL = [(n, n) for n in range(4)]
CASES: dict[str, Case] = {
    "stages": (
        2, {"page_size": 8, "layers": [3, 1], "tp": 1},
        {"page_size": 12, "layers": [1, 3], "tp": 1}, 0, 1, [(1, 0), (2, 1)],
    ),
    "other stages": (
        2, {"page_size": 16, "layers": [1, 3], "tp": 1},
        {"page_size": 8, "layers": [3, 1], "tp": 1}, 1, 0, [(0, 1), (1, 2)],
    ),
    # Three heads, which two devices pad to four.
    "padded": (3, {"page_size": 16, "tp": 1}, {"page_size": 8}, 0, 0, ALL),
    "from padded": (3, {"page_size": 32}, {"page_size": 16, "tp": 1}, 0, 0, ALL),
    # Keys lie otherwise, and pages do not divide each other.
    "layout": (2, {"page_size": 24, "kernels": "interpret"}, {"page_size": 64, "tp": 1}, 0, 0, ALL),
    "from layout": (
        3, {"page_size": 20, "tp": 1}, {"page_size": 12, "kernels": "interpret"}, 0, 0, ALL,
    ),
    "narrower": (2, {"page_size": 16}, {"page_size": 10, "dtype": "bfloat16"}, 0, 0, ALL),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_what_is_sent_lies_in_its_pages_and_nothing_else_changes(name: str) -> None:
    kv_heads, source, dest, i, j, layers = CASES[name]
    pair = Pair(kv_heads, dict(source), dict(dest))
    itemsize = 2 if name == "narrower" else 4
    assert pair.form(i, j).dtype.itemsize == itemsize
    assert pair.form(i, j).token_bytes == 2 * len(layers) * kv_heads * H * itemsize
    before = [pair.entries(1, j, n) for n in range(len(pair.stages[1][j].kv))]
    pair.move(3, 290, i, j, verify=True)
    wanted = {there: pair.entries(0, i, here) for here, there in layers}
    for layer, old in enumerate(before):
        found = pair.entries(1, j, layer)
        if layer in wanted:
            sent = wanted[layer][:, 3:290]
            if itemsize == 2:
                sent = sent.astype(ml_dtypes.bfloat16).astype(np.float32)
            np.testing.assert_array_equal(found[:, 3:290], sent)
        else:
            np.testing.assert_array_equal(found, old)
        np.testing.assert_array_equal(found[:, :3], old[:, :3])
        np.testing.assert_array_equal(found[:, 290:], old[:, 290:])


@pytest.mark.parametrize("ranks", [(4, 2), (2, 4)])
def test_two_ranks_of_four_are_one_of_two(ranks: tuple[int, int]) -> None:
    """The rule of the multi-vendor paper's figure 4, for both ways: 2i and 2i + 1 beside i."""
    pair = Pair(
        4, *({"page_size": size, "tp": tp} for size, tp in zip((16, 24), ranks, strict=True))
    )
    pair.move(0, SLAB_TOKENS)
    position = np.arange(SLAB_TOKENS)
    held = []
    for end, size in enumerate((16, 24)):
        page, offset = pair.tables[end][0][position // size], position % size
        values = pair.stages[end][0].kv[3].values
        shards = sorted(values.addressable_shards, key=lambda shard: shard.index[1].start or 0)
        held.append([np.asarray(shard.data)[page, :, offset] for shard in shards])
    four, two = held if ranks == (4, 2) else held[::-1]
    for i in range(2):
        np.testing.assert_array_equal(np.concatenate(four[2 * i : 2 * i + 2], axis=1), two[i])


def test_slabs_lie_by_heads_where_devices_divide_them() -> None:
    for kv_heads, shape in ((2, (2, 4, SLAB_TOKENS, 1, H)), (3, (2, 4, SLAB_TOKENS, 3, H))):
        pair = Pair(kv_heads, {"page_size": 64, "tp": 1}, {"page_size": 64})
        form, (dest,) = pair.form(), pair.plans[1]
        assert form.sharding(dest).shard_shape(form.shape) == shape


def test_a_difference_is_named_by_its_layer_in_the_model() -> None:
    """Only sent entries are compared: the rest of a page behind them does not count."""
    kv_heads, source, dest, i, j, _ = CASES["stages"]
    pair = Pair(kv_heads, dict(source), dict(dest))
    form, transfer, size = pair.form(i, j), pair.transfer(20, 40), pair.plans[1][j].limits.page_size
    taken = SlabSource(pair.stages[0][i], form, True).take(pair.tables[0][i].tolist(), 20, 40)
    sent = np.asarray(taken[1])

    def check(found: np.ndarray) -> None:
        compare(transfer, (20, 40), form.first, j, size, sent, found)

    check(sent.copy())
    changed = sent.copy()
    changed[:, 20:] += 1
    check(changed)
    changed[1, 19] += 1
    page = pair.tables[1][j][39 // 12]
    with pytest.raises(
        JaxinferError,
        match=f"request 'r7' from a to b: layer 2, page {page} of b \\(token 39\\) is not what",
    ):
        check(changed)
    # Of several, the first one is named.
    changed[1, 12:] += 1
    page = pair.tables[1][j][32 // 12]
    with pytest.raises(
        JaxinferError, match=f"layer 2, page {page} of b \\(token 32\\) is not what"
    ):
        check(changed)


def test_ways_that_want_the_same_share_what_is_compiled() -> None:
    """Three destinations of one kind and one in bfloat16: a source compiles two programs."""
    pair = Pair(2, {"page_size": 16}, {"page_size": 8})
    source, dest = pair.stages[0][0], pair.stages[1][0]
    (narrow,) = Pair(2, {"page_size": 16}, {"page_size": 8, "dtype": "bfloat16"}).stages[1]
    others = [SimpleNamespace(plan=dest.plan, kv=dest.kv, transfers={}) for _ in range(2)]
    for there in (dest, *others, narrow):
        form = SlabFormat.between(source.plan, there.plan)
        SlabSource(source, form, True)
        SlabDest(there, form, True)
    assert len(source.transfers) == 2
    # The scatter, and the gather that reads back.
    assert [len(there.transfers) for there in (dest, *others, narrow)] == [2, 2, 2, 2]


def page_extremes(kv: KVPages) -> KVPages:
    """Pages whose heads have their largest value somewhere, and a scale that no other has."""

    def scaled(entries: jax.Array, factor: float) -> tuple[jax.Array, jax.Array]:
        rng, largest = np.random.default_rng(entries.size), LARGEST[entries.dtype.name]
        drawn = np.float32(rng.uniform(-largest, largest, entries.shape)).astype(entries.dtype)
        drawn.reshape(*drawn.shape[:2], -1)[:, :, 7] = largest
        scale = np.float32(factor * rng.permutation(np.prod(drawn.shape[:2])) + factor)
        return jnp.asarray(drawn), jnp.asarray(scale.reshape(drawn.shape[:2]))

    (keys, key_scale), (values, value_scale) = scaled(kv.keys, 1e-4), scaled(kv.values, 1e-3)
    found = KVPages(keys, values, key_scale, value_scale)
    return jax.tree.map(lambda x, old: jax.device_put(x, old.sharding), found, kv)


def token_scales(kv: KVPages, plan: StagePlan, table: np.ndarray, count: int) -> np.ndarray:
    """Return the scales of ``entries``, [2, token, KV head, 1]: 1 where entries have none."""
    page, heads = table[np.arange(count) // plan.limits.page_size], slice(plan.num_kv_heads)
    if kv.key_scale_PK is None:
        return np.ones((2, count, plan.num_kv_heads, 1), np.float32)
    both = kv.key_scale_PK, kv.value_scale_PK
    return np.stack([np.asarray(scale)[page, heads, None] for scale in both])


def half_step(kind: str, x: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """Return the most that rounding moves a value; e4m3 has three bits of mantissa."""
    return scale / 2 if kind == "int8" else np.maximum(np.abs(x) / 16, scale * 2.0**-10)


@pytest.mark.parametrize(
    ("source", "dest"),
    [
        ({"kv_cache_dtype": "int8", "tp": 1}, {"kv_cache_dtype": "int8", "tp": 1}),
        (
            {"kv_cache_dtype": "fp8", "tp": 1},
            {"kv_cache_dtype": "fp8", "kernels": "interpret", "tp": 1},
        ),
        ({"kv_cache_dtype": "fp8"}, {"kv_cache_dtype": "int8", "tp": 1}),
        ({"kv_cache_dtype": "int8", "kernels": "interpret", "tp": 1}, {"tp": 1}),
    ],
    ids=["int8", "fp8", "fp8 padded to int8", "int8 to float32"],
)
def test_entries_of_8_bits_arrive_with_their_scales(
    source: dict[str, Any], dest: dict[str, Any]
) -> None:
    """Entries are within the rounding of their new page, whose largest entry decides its scale."""
    pair = Pair(3, {"page_size": 24, **source}, {"page_size": 16, **dest})
    for (stage,) in pair.stages:
        if stage.kv[0].key_scale_PK is not None:
            stage.kv = [page_extremes(layer) for layer in stage.kv]

    def read(end: int, layer: int) -> tuple[np.ndarray, np.ndarray]:
        (stage,), (table,) = pair.stages[end], pair.tables[end]
        scale = token_scales(stage.kv[layer], stage.plan, table, TOKENS)
        return entries(stage.kv[layer], stage.plan, table, TOKENS) * scale, scale

    sent, before = ([read(end, layer)[0] for layer in range(4)] for end in (0, 1))
    pair.move(3, 290)
    kind = pair.plans[1][0].kv_dtype.name
    for layer in range(4):
        found, scale = read(1, layer)
        # Three tokens of another sender lie before, in the same page.
        wanted = np.concatenate([before[layer][:, :3], sent[layer][:, 3:290]], axis=1)
        np.testing.assert_array_equal(found[:, 304:], before[layer][:, 304:])
        if kind == "float32":
            np.testing.assert_array_equal(found[:, :290], wanted)
            continue
        assert not found[:, 290:304].any()
        for first in range(0, 290, 16):
            page = slice(first, min(first + 16, 290))
            largest = np.abs(wanted[:, page]).max((1, 3))
            np.testing.assert_allclose(scale[:, first, :, 0], largest / LARGEST[kind], rtol=0.07)
            # Twice: those before, and what lies in a page in which two slabs meet.
            change = np.abs(found[:, page] - wanted[:, page])
            assert (change <= 2.1 * half_step(kind, wanted[:, page], scale[:, page])).all()


def test_nothing_is_read_back_unless_it_is_asked_for() -> None:
    pair = Pair(2, {"page_size": 64}, {"page_size": 64})
    form, (source, dest) = pair.form(), (stages[0] for stages in pair.stages)
    tables = [table[0].tolist() for table in pair.tables]
    array, checksum = SlabSource(source, form, False).take(tables[0], 0, 10)
    assert checksum is None
    arrived = jax.device_put(array, form.sharding(dest.plan))
    assert SlabDest(dest, form, False).place(arrived, tables[1], 0, 10) is None
