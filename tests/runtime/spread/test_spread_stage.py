"""A stage whose KV heads lie on several devices: logits of every architecture while heads move.

Logits are held to Hugging Face transformers', see ``test_architectures``.
"""

import threading
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from waiting import HANG_S

from jaxinfer.checkpoints.checkpoint import open_checkpoint
from jaxinfer.config.cluster import ClusterConfig, InstanceConfig
from jaxinfer.config.groups import GroupConfig
from jaxinfer.pallas_kernels.choice import keys_by_token
from jaxinfer.runtime.cluster import Engine
from jaxinfer.runtime.explain import longest_request
from jaxinfer.runtime.kv.sockets import LOOPBACK
from jaxinfer.runtime.spread.pool_client import PoolClient
from jaxinfer.runtime.spread.pool_server import PoolServer
from jaxinfer.runtime.spread.slice_move import Copies, SliceCopies
from jaxinfer.runtime.spread.spread_stage import SpreadStage
from jaxinfer.runtime.spread.spread_step import HeadSplit
from jaxinfer.runtime.stage import attention_plan
from jaxinfer.runtime.stage.cluster_plan import plan_cluster
from jaxinfer.runtime.stage.load_weights import load_parameters
from jaxinfer.runtime.stage.parts import PartInputs
from jaxinfer.runtime.stage.sampler import PLAIN_SAMPLER
from jaxinfer.runtime.stage.stage import Stage
from jaxinfer.runtime.stage.step import Key
from jaxinfer.serving.batch import Batch, Row, Transfer
from jaxinfer.serving.request_state import RequestState
from jaxinfer.serving.system import MoveSlices

DATA = Path(__file__).parents[2] / "data" / "architectures"
CASES = sorted(folder.name for folder in DATA.iterdir() if folder.is_dir())
# Windows of some layers, experts, learned positions, biases with a window, norms of heads.
UNLIKE = ("gemma3", "mixtral", "opt", "qwen2_window", "qwen3")
# Chunks, and a decode. No edge but the last is one of pages.
PIECES = [33, 2, 1, 39]
POOL = {"page_size": 5, "num_pages": 40, "max_model_len": 100}
WHOLE: Any = SimpleNamespace(without=())


class Spread:
    """A stage and one request, whose heads lie on this device or that.

    Without attention devices, it is an ordinary stage.

    Args:
        lends: attention devices lend their pools as another process would, by a socket.
    """

    def __init__(
        self, name: str, attention: int = 1, primary: int = 1, lends: bool = False, **options: Any
    ) -> None:
        checkpoint = open_checkpoint(str(DATA / name))
        groups = [f"a{number}" for number in range(attention)]
        config = ClusterConfig(
            groups={"p": GroupConfig(devices=primary)} | {each: GroupConfig() for each in groups},
            instances={
                "x": InstanceConfig(
                    stages=[{"group": "p", "attention": groups}],  # type: ignore[arg-type]
                    enable_prefix_caching=False,
                    max_num_seqs=2,
                    max_num_batched_tokens=64,
                    **POOL | {"dtype": "float32"} | options,
                )
            },
        )
        ((self.plan,),) = plan_cluster(checkpoint.config, config).values()
        self.lent = []
        if lends:
            self.lent = [PoolServer(self.plan, number, LOOPBACK) for number in range(attention)]
            places = [replace(place, device=None) for place in self.plan.attention]
            self.plan = replace(self.plan, attention=places)
        (self.parameters,) = load_parameters(checkpoint, [self.plan])
        self.stage = (SpreadStage if attention else Stage)(self.plan, self.parameters)
        self.kv = Engine("x", WHOLE, [self.plan], ["p"]).new_kv()
        for number, pool in enumerate(self.lent, 1):
            left = [*pool.compile_ahead()]
            assert left == [*range(len(left) - 1, -1, -1)]
            self.stage.elsewhere[number] = PoolClient(pool.address, "lent")
        self.moves = SliceCopies([self.stage])
        self.moves.compile_ahead()

    def serve(self, tokens: np.ndarray, seed: int = 0) -> np.ndarray:
        """Logits of all tokens; before each piece but the first, some heads have moved.

        What lies in the pages is the same before a move and after it, bit for bit.
        """
        rng = np.random.default_rng(seed)
        shards = len(self.kv.shards)
        heads = self.plan.num_kv_heads if shards > 1 else 1
        request = RequestState("r", len(tokens), 9, prompt_token_ids=tokens.tolist())
        at = rng.integers(0, shards, heads)
        placement = [np.flatnonzero(at == shard).tolist() for shard in range(shards)]
        hold = self.kv.reserve(len(tokens), placement=placement)
        assert hold
        found = []
        for start, stop in pairwise(np.cumsum([0, *PIECES]).tolist()):
            if start:
                to = np.where(rng.random(heads) < 0.6, rng.integers(0, shards, heads), at)
                before = self.entries(hold, start)
                self._move(request, hold, start, at, to)
                for there, then in zip(self.entries(hold, start), before, strict=True):
                    np.testing.assert_array_equal(there.view(np.uint8), then.view(np.uint8))
                at = to
            row = Row(request, start, stop - start, False, False, 0, hold)
            found.append(self._step(Batch("x", [row], 0, 1, 0))[: stop - start])
        self.served = self.entries(hold, stop)
        hold.release()
        assert self.kv.num_in_use == 0
        return np.concatenate(found)

    def entries(self, hold: Any, count: int) -> list[np.ndarray]:
        """Keys and values of so many tokens [L, K, T, H], and scales [L, K, P] of 8 bits."""
        spread = isinstance(self.stage, SpreadStage)
        layers = []
        for layer in range(self.plan.config.num_hidden_layers):
            heads: dict[int, list[np.ndarray]] = {}
            for shard, table in enumerate(hold.tables):
                kv = self.stage.kv[shard if spread else layer]
                if spread:
                    kv = (self.lent[shard - 1]._kv if self.lent and shard else kv)[layer]
                kernels = self.stage.pools[shard].kernels if spread else self.plan.config.kernels
                for piece, page_M in table.items():
                    used = page_M[: self.kv.pages_for(count)]
                    found = [np.asarray(x)[used] for x in kv if x is not None]
                    if not keys_by_token(kernels):
                        found[0] = found[0].swapaxes(2, 3)
                    # An ordinary stage's pages have all heads, those of others one.
                    for head in range(found[0].shape[1]):
                        heads[piece + head] = [x[:, head] for x in found]
            in_order = [heads[head] for head in sorted(heads)]
            layers.append([np.stack(x) for x in zip(*in_order, strict=True)])
        keys, values, *scales = (np.stack(x) for x in zip(*layers, strict=True))
        by_token = (x.reshape(*x.shape[:2], -1, x.shape[-1])[:, :, :count] for x in (keys, values))
        return [*by_token, *scales]

    def _step(self, batch: Batch) -> np.ndarray:
        key = Key(self.stage.step.limits.shape_for(batch), PLAIN_SAMPLER)
        inputs = self.stage.inputs(batch, key.shape, {}, 0)
        _, x_TD = self.stage.forward(key, inputs, None)
        return np.asarray(_logits(self.plan.graphdef, self.parameters, x_TD))

    def _move(self, request: Any, hold: Any, stop: int, at: np.ndarray, to: np.ndarray) -> None:
        moves = tuple(
            (int(at[head]), int(to[head]), (int(head),)) for head in np.flatnonzero(at != to)
        )
        if not moves:
            return
        assert hold.copy_slices(moves)
        full = stop // self.kv.page_size * self.kv.page_size
        move = MoveSlices("r", moves)
        config, size = self.plan.config, self.plan.kv_dtype.itemsize
        token = 2 * config.head_dim * size * config.num_hidden_layers
        for first, last in ((0, full), (full, stop)):
            transfer = Transfer(request, 0, "x", "x", hold, hold, first, last, 0.0, move)
            ended = threading.Event()
            copies = Copies.of(transfer)
            self.moves.start(copies, lambda start, error, ended=ended: ended.set())
            assert ended.wait(HANG_S)
            if size > 1:  # Others have scales besides.
                assert self.moves.num_bytes(copies) == len(moves) * (last - first) * token
        hold.take_copies(moves)


def _logits(graphdef: Any, parameters: Any, x_TD: jax.Array) -> jax.Array:
    with jax.default_matmul_precision("highest"):
        model: Any = nnx.merge(graphdef, parameters)
        found: jax.Array = model.logits(x_TD)
        return found


def expected(name: str) -> tuple[np.ndarray, np.ndarray]:
    with np.load(DATA / name / "expected.npz") as arrays:
        return arrays["tokens"], arrays["logits"]


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if name in UNLIKE else pytest.mark.long)
        for name in CASES
    ],
)
def test_logits_of_every_architecture(name: str) -> None:
    tokens, logits = expected(name)
    model = Spread(name)
    for seed in range(2):
        np.testing.assert_allclose(model.serve(tokens, seed), logits, atol=1e-4, rtol=0)


@pytest.mark.parametrize(("name", "primary"), [("llama", 1), ("gemma3", 1), ("qwen3", 2)])
def test_logits_by_pools_that_are_lent(name: str, primary: int) -> None:
    """Heads move between the stage's own pool and those of two others, and between these."""
    tokens, logits = expected(name)
    model = Spread(name, attention=2, primary=primary, lends=True)
    np.testing.assert_allclose(model.serve(tokens), logits, atol=1e-4, rtol=0)
    taken = model.stage.elsewhere[1].take(np.array([1, 2], np.int32)).result(HANG_S)
    assert {len(x) for x in jax.tree.leaves(taken)} == {2}


@pytest.mark.slow
@pytest.mark.parametrize(
    "dtypes",
    [
        {"kv_cache_dtype": "int8"},
        {"kv_cache_dtype": "fp8"},
        {"dtype": "bfloat16"},
    ],
    ids=["int8", "fp8", "bfloat16"],
)
def test_entries_of_few_bits_go_to_pools_that_are_lent(dtypes: dict[str, str]) -> None:
    """Entries, scales and logits are, bit for bit, those of pools of this process."""
    tokens, _ = expected("llama")
    here, there = (Spread("llama", lends=lends, **dtypes) for lends in (False, True))
    np.testing.assert_array_equal(there.serve(tokens), here.serve(tokens))
    for one, other in zip(there.served, here.served, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.slow
@pytest.mark.parametrize("lends", [False, True])
def test_logits_of_halves_in_turn(lends: bool) -> None:
    """Logits are right for a step that reaches out, and for one all at home, which is not cut.

    The step is a chunk and a decode of two requests with the same first tokens: each row is a half.
    """
    tokens, logits = expected("gemma3")
    model = Spread("gemma3", half_batches="always", lends=lends)
    heads = list(range(model.plan.num_kv_heads))
    for placement in ([heads[:1], heads[1:]], [heads, []]):
        rows = []
        for name, start, stop in (("r", 40, 41), ("s", 0, 33)):
            request = RequestState(name, len(tokens), 9, prompt_token_ids=tokens.tolist())
            hold = model.kv.reserve(len(tokens), placement=placement)
            assert hold
            if start:
                first = Row(request, 0, start, False, False, 0, hold)
                model._step(Batch("x", [first], 0, 1, 0))
            rows.append(Row(request, start, stop - start, False, False, 0, hold))
        batch = Batch("x", rows, 0, 2, 0)
        batch.halves = rows[1:], rows[:1]
        shape = model.stage.step.limits.shape_for(batch)
        inputs = model.stage.inputs(batch, shape, {}, 0)
        assert isinstance(inputs, PartInputs) == bool(placement[1])
        found = model._step(batch)
        np.testing.assert_allclose(found[0], logits[40], atol=1e-4, rtol=0)
        np.testing.assert_allclose(found[1:34], logits[:33], atol=1e-4, rtol=0)
        for row in rows:
            row.hold.release()


@pytest.mark.slow
def test_logits_on_devices_that_divide_neither_heads_nor_columns() -> None:
    """The devices that share the layers are four; one has KV heads, as have two others."""
    tokens, logits = expected("qwen3")
    model = Spread("qwen3", attention=2, primary=4)
    assert model.plan.config.num_key_value_heads > model.plan.num_kv_heads
    np.testing.assert_allclose(model.serve(tokens), logits, atol=1e-4, rtol=0)


def test_what_a_stage_of_several_devices_says_of_itself() -> None:
    """The longest request has one head in each pool, of 7 pages for each of two heads."""
    model = Spread("qwen3", num_pages=8)
    assert model.plan.num_kv_heads == 2
    assert longest_request(model.plan) == 2 * 7 * 5 + 1 == model.kv.num_pages * 5 + 1
    step = model.stage.step
    shape = step.limits.shapes()[-1]
    layers = model.plan.config.num_hidden_layers
    # Two devices attend in each layer; what follows the last layer, and the head.
    assert len(step.compile_parts(Key(shape, PLAIN_SAMPLER))) == layers * 3 + 2


@pytest.mark.slow
def test_heads_move_between_devices_whose_keys_lie_unlike(monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads move from kernels on one device to plain attention on another, as from GPU to CPU."""
    monkeypatch.setattr(attention_plan, "choose_kernels", lambda *args: "interpret")
    tokens, logits = expected("llama")
    model = Spread("llama")
    assert isinstance(model.stage, SpreadStage)
    own, other = (pool.pages[0] for pool in model.stage.pools)
    assert own.keys.shape[1:] == other.keys.shape[1:2] + other.keys.shape[:1:-1]
    np.testing.assert_allclose(model.serve(tokens), logits, atol=1e-4, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_entries_of_8_bits_move_with_their_scales(kind: str) -> None:
    """Rounding is the same wherever entries lie, and so are logits: an ordinary stage's.

    Its programs are others, whose sums differ in their last bits. An entry within these of the
    middle between two 8-bit numbers may become either, which changes logits by up to 2e-3.
    """
    tokens, exact = expected("llama")
    ordinary = Spread("llama", attention=0, kv_cache_dtype=kind)
    logits = ordinary.serve(tokens)
    assert np.abs(logits - exact).max() > 1e-2
    model = Spread("llama", kv_cache_dtype=kind)
    for seed in range(2):
        found = model.serve(tokens, seed)
        bits, others = (np.stack(x.served[:2]).view(np.int8).astype(int) for x in (model, ordinary))
        steps = np.abs(bits - others)
        assert steps.max() <= 1
        assert steps.mean() <= 1e-3
        np.testing.assert_allclose(model.served[2:], ordinary.served[2:], rtol=1e-5)
        np.testing.assert_allclose(found, logits, atol=5e-3 if steps.any() else 1e-4, rtol=0)


@pytest.mark.parametrize("kind", ["int8", "float8_e4m3fn"])
def test_what_is_to_be_rounded_to_8_bits_goes_to_its_device_unrounded(kind: str) -> None:
    """There its scale is found. Pairs of tokens and heads, of which the second device has two."""
    config: Any = SimpleNamespace(
        num_key_value_heads=2, num_attention_heads=4, head_dim=3, attention_scale=0.5
    )
    plan: Any = SimpleNamespace(config=config, kv_dtype=jnp.dtype(kind))
    rng = np.random.default_rng(0)
    q_TNH, k_TKH, v_TKH = (rng.normal(size=(2, heads, 3)).astype(np.float32) for heads in (4, 2, 2))
    pieces = HeadSplit(plan, 2, 2).pieces(
        *map(jnp.asarray, (q_TNH, k_TKH, v_TKH)), np.array([3, 0, 1, 2])
    )
    for piece_RXH, pairs in zip(pieces, ([(1, 1), (0, 0)], [(0, 1), (1, 0)]), strict=True):
        for piece_XH, (t, h) in zip(piece_RXH, pairs, strict=True):
            np.testing.assert_array_equal(piece_XH[0], k_TKH[t, h])
            np.testing.assert_array_equal(piece_XH[1], v_TKH[t, h])
            np.testing.assert_array_equal(piece_XH[2:], q_TNH[t, 2 * h : 2 * h + 2] / 2)
