"""A small model with random weights and no files, to check hand-offs."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np

from jaxinfer.checkpoints.open_tensors import Checkpoint, LazyTensor
from jaxinfer.models.config import ModelConfig, Rope
from jaxinfer.models.registry import ARCHITECTURES

LAYERS = 4
HEAD_DIM = 16


def small_checkpoint() -> Checkpoint:
    """Return a Llama with four layers and three KV heads, which two devices pad to four.

    Weights are drawn at random so that a product keeps the magnitude of its input.
    """
    pairs = np.arange(HEAD_DIM // 2)
    config = ModelConfig(
        "LlamaForCausalLM", vocab_size=256, hidden_size=96, intermediate_size=128,
        num_hidden_layers=LAYERS, num_attention_heads=6, num_key_value_heads=3, head_dim=HEAD_DIM,
        max_position_embeddings=2048, norm_eps=1e-5, tie_word_embeddings=False, bos_token_id=None,
        eos_token_ids=(), windows=(None,) * LAYERS,
        rope=Rope(tuple(10000.0 ** (-2 * pairs / HEAD_DIM))),
    )  # fmt: skip
    return Checkpoint("small", Path("small"), config, dict(_tensors(config)), {})


def _tensors(config: ModelConfig) -> Iterator[tuple[str, LazyTensor]]:
    specs = ARCHITECTURES[config.architecture].hf_weights(config).values()
    for spec in specs:
        for name in spec.tensors:
            yield name, LazyTensor(spec.shape, "F32", partial(_draw, name, spec.shape))


def _draw(name: str, shape: tuple[int, ...]) -> np.ndarray:
    if len(shape) == 1:
        return np.ones(shape, np.float32)
    rng = np.random.default_rng(list(name.encode()))
    return (rng.normal(size=shape) / np.sqrt(shape[-1])).astype(np.float32)
