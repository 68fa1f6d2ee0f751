"""What a checkpoint says of its model, and how its tensors become our parameters."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class ModelConfig:
    """The numbers that define a decoder-only transformer, under Hugging Face's names.

    Attributes:
        architecture: Hugging Face's class name, e.g. ``"LlamaForCausalLM"``.
        head_dim: H; need not be hidden_size / num_attention_heads.
        max_position_embeddings: the longest sequence, in tokens.
        eos_token_ids: tokens that end a text.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rope_theta: float
    rms_norm_eps: float
    tie_word_embeddings: bool
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]


@dataclass(frozen=True)
class WeightSpec:
    """Where one checkpoint tensor goes.

    Attributes:
        path: the parameter's path in the model, dot-separated.
        shape: the tensor's shape in the checkpoint.
        convert: from the checkpoint's array to the parameter's, shape included.
    """

    path: str
    shape: tuple[int, ...]
    convert: Callable[[np.ndarray], np.ndarray]
