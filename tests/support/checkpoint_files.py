"""Small checkpoints that tests write, and the check of one-line errors."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxinfer.config.cluster import one_engine
from jaxinfer.config.engine import EngineOptions
from jaxinfer.errors import JaxinferError
from jaxinfer.models.config import ModelConfig
from jaxinfer.runtime.stage.cluster_plan import plan_cluster
from jaxinfer.runtime.stage.stage_plan import StagePlan

DEMO = "smollm2-135m-instruct"
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rope_theta": 5000.0,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LAYER = "model.layers.0."
SHAPES = {
    "model.embed_tokens.weight": (96, 32),
    "model.norm.weight": (32,),
    LAYER + "input_layernorm.weight": (32,),
    LAYER + "self_attn.q_proj.weight": (32, 32),
    LAYER + "self_attn.k_proj.weight": (16, 32),
    LAYER + "self_attn.v_proj.weight": (16, 32),
    LAYER + "self_attn.o_proj.weight": (32, 32),
    LAYER + "post_attention_layernorm.weight": (32,),
    LAYER + "mlp.gate_proj.weight": (64, 32),
    LAYER + "mlp.up_proj.weight": (64, 32),
    LAYER + "mlp.down_proj.weight": (32, 64),
}
GGUF_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    LAYER + "input_layernorm.weight": "blk.0.attn_norm.weight",
    LAYER + "self_attn.q_proj.weight": "blk.0.attn_q.weight",
    LAYER + "self_attn.k_proj.weight": "blk.0.attn_k.weight",
    LAYER + "self_attn.v_proj.weight": "blk.0.attn_v.weight",
    LAYER + "self_attn.o_proj.weight": "blk.0.attn_output.weight",
    LAYER + "post_attention_layernorm.weight": "blk.0.ffn_norm.weight",
    LAYER + "mlp.gate_proj.weight": "blk.0.ffn_gate.weight",
    LAYER + "mlp.up_proj.weight": "blk.0.ffn_up.weight",
    LAYER + "mlp.down_proj.weight": "blk.0.ffn_down.weight",
}
Weights = dict[str, np.ndarray]


def plan_alone(model: ModelConfig, options: EngineOptions) -> StagePlan:
    """Return the plan of one instance with one stage."""
    ((plan,),) = plan_cluster(model, one_engine(options)).values()
    return plan


def make_weights() -> Weights:
    rng = np.random.default_rng(0)
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in SHAPES.items()}


def make_folder(path: Path, weights: Weights | None = None, **changes: Any) -> Path:
    """A Hugging Face folder; a change to None removes the key from config.json."""
    path.mkdir(exist_ok=True)
    config = {key: value for key, value in (CONFIG | changes).items() if value is not None}
    (path / "config.json").write_text(json.dumps(config))
    save_file(make_weights() if weights is None else weights, path / "model.safetensors")
    return path


def make_sharded(path: Path, weights: Weights) -> dict[str, str]:
    make_folder(path)
    (path / "model.safetensors").unlink()
    names = list(weights)
    weight_map = {}
    for shard, part in enumerate((names[:4], names[4:])):
        file = f"model-{shard + 1:05}-of-00002.safetensors"
        save_file({name: weights[name] for name in part}, path / file)
        weight_map |= dict.fromkeys(part, file)
    index = path / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return weight_map


def interleave(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """llama.cpp's order: row i and row i + head_dim / 2 of a head become neighbours."""
    head_dim = len(rows) // num_heads
    result = np.empty_like(rows)
    for head in range(num_heads):
        for i in range(head_dim // 2):
            for half in range(2):
                source = head * head_dim + i + half * head_dim // 2
                result[head * head_dim + 2 * i + half] = rows[source]
    return result


def make_gguf(
    path: Path,
    weights: Weights,
    types: dict[str, gguf.GGMLQuantizationType] | None = None,
    architecture: str = "llama",
    metadata: Callable[[gguf.GGUFWriter], None] = lambda writer: None,
) -> Path:
    """A GGUF file of ``weights``, which are under Hugging Face's names, as llama.cpp writes it."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(128)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(64)
    writer.add_block_count(1)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(96)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    metadata(writer)
    for name, values in weights.items():
        if "q_proj" in name:
            values = interleave(values, 4)
        if "k_proj" in name:
            values = interleave(values, 2)
        kind = (types or {}).get(name)
        stored = values if kind is None else gguf.quantize(values, kind)
        writer.add_tensor(GGUF_NAMES.get(name, name), stored, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def theta_of(config: ModelConfig) -> float:
    """The base of plain rotary frequencies, of which the second is theta^(-2 / H)."""
    assert config.rope
    return config.rope.frequencies[1] ** (-config.head_dim / 2)


def error_of(action: Callable[[], object]) -> str:
    with pytest.raises(JaxinferError) as caught:
        action()
    message = str(caught.value)
    assert "\n" not in message
    return message
