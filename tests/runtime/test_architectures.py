"""Every architecture against Hugging Face transformers on small random weights, in float32.

``data/architectures`` is written by ``scripts/make_architecture_golden.py``.
"""

from itertools import pairwise
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxinfer.config import EngineOptions
from jaxinfer.models.layers import PagedBatch
from jaxinfer.runtime.checkpoint import open_checkpoint
from jaxinfer.runtime.engine import load_parameters
from jaxinfer.runtime.kv_cache import abstract_pages, allocate
from jaxinfer.runtime.plan import Plan, make_plan

DATA = Path(__file__).parents[1] / "data" / "architectures"
EXPERT_RULES = Path(__file__).parents[2] / "configs" / "sharding" / "experts.py"
CASES = sorted(folder.name for folder in DATA.iterdir() if folder.is_dir())
PAGE_SIZE, ROWS, PAGES = 4, 80, 20


class Model:
    """Logits of one sequence, in whatever pieces it comes; its pages lie in disorder."""

    def __init__(self, name: str, devices: int = 1, sharding: str | None = None) -> None:
        checkpoint = open_checkpoint(str(DATA / name))
        options = EngineOptions(
            dtype="float32", tensor_parallel_size=devices, sharding=sharding, num_pages=PAGES + 1
        )
        self.plan: Plan = make_plan(checkpoint.config, options)
        self.parameters = load_parameters(checkpoint, self.plan)
        self.table = 1 + np.random.default_rng(0).permutation(PAGES).astype(np.int32)
        self.clear()
        self.step = jax.jit(self._step)

    def clear(self) -> None:
        plan = self.plan
        self.kv = allocate(abstract_pages(plan.config, PAGES + 1, PAGE_SIZE, plan.dtype, plan.mesh))

    def _step(self, parameters: Any, kv: Any, token_T: jax.Array, batch: PagedBatch) -> Any:
        with jax.default_matmul_precision("highest"):
            model: Any = nnx.merge(self.plan.graphdef, parameters)
            x_TD, kv = model(token_T, kv, batch)
            return model.logits(x_TD), kv

    def __call__(self, tokens: np.ndarray, start: int) -> np.ndarray:
        """One token is a decode, more are a chunk."""
        count = len(tokens)
        row = np.arange(ROWS)
        position = np.where(row < count, start + row, 0)
        is_chunk = count > 1
        batch = PagedBatch(
            position_T=position,
            page_T=np.where(row < count, self.table[position // PAGE_SIZE], 0),
            offset_T=position % PAGE_SIZE,
            decode_table_SM=self.table[None],
            decode_length_S=np.array([0 if is_chunk else start + 1]),
            chunk_table_CM=self.table[None],
            chunk_start_C=np.array([start]),
            chunk_row_C1=np.array([0, count] if is_chunk else [1, 1]),
        )
        batch = PagedBatch(*(x.astype(np.int32) for x in batch))
        padded = np.zeros(ROWS, np.int32)
        padded[:count] = tokens
        with jax.set_mesh(self.plan.mesh):
            logits, self.kv = self.step(self.parameters, self.kv, padded, batch)
        return np.asarray(logits)[:count]


def expected(name: str) -> tuple[np.ndarray, np.ndarray]:
    with np.load(DATA / name / "expected.npz") as arrays:
        return arrays["tokens"], arrays["logits"]


def pieces(model: Model, tokens: np.ndarray, sizes: list[int]) -> np.ndarray:
    model.clear()
    bounds = np.cumsum([0, *sizes])
    parts = [model(tokens[a:b], int(a)) for a, b in pairwise(bounds)]
    return np.concatenate(parts)


@pytest.mark.parametrize("name", CASES)
def test_logits_whole_chunked_and_token_by_token(name: str) -> None:
    model = Model(name)
    tokens, logits = expected(name)
    assert np.abs(logits).max() > 1, "too small to show a difference"
    for sizes in ([75], [33, 2, 1, 39], [1] * 75):
        got = pieces(model, tokens, sizes)
        np.testing.assert_allclose(got, logits, atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", ["gemma3", "mixtral", "opt", "qwen2", "qwen3"])
def test_logits_on_four_devices_that_divide_no_heads(name: str) -> None:
    tokens, logits = expected(name)
    got = pieces(Model(name, devices=4), tokens, [60, 1, 14])
    np.testing.assert_allclose(got, logits, atol=1e-4, rtol=0)


def test_whole_experts_on_each_device() -> None:
    tokens, logits = expected("mixtral")
    model = Model("mixtral", devices=3, sharding=str(EXPERT_RULES))
    gate = model.plan.parameters["layers.0.mlp.gate_EDF"]
    assert gate.sharding
    assert gate.sharding.shard_shape(gate.shape) == (2, *gate.shape[1:])
    np.testing.assert_allclose(pieces(model, tokens, [74, 1]), logits, atol=1e-4, rtol=0)


def test_windows_and_rope_are_read() -> None:
    config = open_checkpoint(str(DATA / "gemma3")).config
    assert config.windows == (10, 10, None)
    assert config.attention_scale == pytest.approx(20**-0.5)
    assert config.rope
    assert config.local_rope
    assert config.rope.frequencies[1] == pytest.approx(1e6 ** (-2 / 16) / 8)
    assert config.local_rope.frequencies[1] == pytest.approx(1e4 ** (-2 / 16))
    assert jnp.asarray(config.rope.frequencies).shape == (8,)
