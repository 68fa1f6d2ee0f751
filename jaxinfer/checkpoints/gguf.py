"""GGUF checkpoints: translates llama.cpp's names and layouts to Hugging Face's."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from jaxinfer.checkpoints.gguf_ends import END_KEYS, end_token_ids
from jaxinfer.checkpoints.gguf_file import GGUFFile
from jaxinfer.checkpoints.gguf_keys import Rotation, check_keys, read_rotation
from jaxinfer.checkpoints.gguf_split import read_whole
from jaxinfer.checkpoints.open_tensors import Checkpoint, LazyTensor
from jaxinfer.errors import JaxinferError
from jaxinfer.models.config import ModelConfig
from jaxinfer.models.config_keys import Keys

# Hugging Face's architectures, by GGUF's name.
GGUF_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
}
_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GEMMA_LAYER_NAMES = _LAYER_NAMES | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}


def open_gguf(paths: Sequence[Path], name: str) -> Checkpoint:
    """Open a GGUF file, which may be cut or split; its tensors stay on disk.

    Args:
        paths: the parts into which it is cut, or any one of the files of a split.

    Raises:
        JaxinferError: see ``read_gguf`` and ``read_whole``; or a feature is not implemented.
    """
    file = read_whole(paths)
    config = _read_config(file)
    kind = file.metadata["general.architecture"]
    names = _GEMMA_LAYER_NAMES if kind == "gemma3" else _LAYER_NAMES
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    tensors = {}
    for gguf_name, tensor in file.tensors.items():
        if gguf_name == "rope_freqs.weight":  # The configuration has it.
            continue
        load, part = tensor.load, gguf_name.split(".")[-2] if "." in gguf_name else ""
        blocks = tensor.blocks if tensor.dtype == "Q8_0" and len(tensor.shape) == 2 else None
        if kind == "llama" and part in heads:
            load = partial(_load_rotated, load, heads[part])
            blocks = blocks and partial(_load_rotated, blocks, heads[part])
        if kind == "gemma3" and part.endswith("norm"):
            load = partial(_load_less_one, load)
        name_there = _hugging_face_name(gguf_name, names)
        tensors[name_there] = LazyTensor(tensor.shape, tensor.dtype, load, blocks)
    return Checkpoint(name, file.path, config, tensors, tokenizer_source=file.metadata)


def _hugging_face_name(name: str, layer_names: Mapping[str, str]) -> str:
    """Return Hugging Face's name of a GGUF tensor; an unknown name stays, to be reported later."""
    match name.split("."):
        case ["blk", layer, part, kind] if part in layer_names:
            return f"model.layers.{layer}.{layer_names[part]}.{kind}"
        case [part, kind] if part in _NAMES:
            return f"{_NAMES[part]}.{kind}"
    return name


def _load_less_one(load: Callable[[], np.ndarray]) -> np.ndarray:
    """Load a norm's weight in Gemma's form; llama.cpp's converter adds 1."""
    return load() - 1


def _load_rotated(load: Callable[[], np.ndarray], num_heads: int) -> np.ndarray:
    """Load [heads * head_dim, in], from llama.cpp's order of rows to Hugging Face's.

    llama.cpp rotates neighbouring rows of a head, Hugging Face row i with i + head_dim / 2; its
    converter interleaves each head's halves, which this undoes.
    """
    rows = load()
    pairs = rows.reshape(num_heads, -1, 2, *rows.shape[1:])
    return pairs.swapaxes(1, 2).reshape(rows.shape)


def _read_config(file: GGUFFile) -> ModelConfig:
    """Translate GGUF metadata; an absent key has llama.cpp's default.

    Raises:
        JaxinferError: an architecture or feature is not implemented, or a key is missing or has a
            wrong value.
    """
    keys = Keys(file.path, file.metadata)
    kind = keys.get("general.architecture")
    if kind not in list(GGUF_ARCHITECTURES):
        raise keys.wrong("general.architecture", kind, f"one of: {', '.join(GGUF_ARCHITECTURES)}")
    keys.only(f"{kind}.expert_count", 0)
    check_keys(keys, kind)
    prefix = f"{kind}.attention.head_count"
    num_heads, num_kv_heads = keys.heads(prefix, f"{prefix}_kv")
    num_layers = keys.size(f"{kind}.block_count")
    hidden_size = keys.size(f"{kind}.embedding_length")
    head_dim = keys.size(f"{kind}.attention.key_length", hidden_size // num_heads)
    keys.only(f"{kind}.attention.value_length", head_dim)
    keys.only(f"{kind}.rope.dimension_count", head_dim)
    for key in END_KEYS:
        keys.token(key)
    rotation = read_rotation(keys, kind, head_dim, _rope_divisors(file, head_dim))
    biases = _biases(file) if kind == "llama" else None
    config = ModelConfig(
        architecture="Qwen2ForCausalLM" if biases == "qkv" else GGUF_ARCHITECTURES[kind],
        vocab_size=keys.size(f"{kind}.vocab_size", _num_tokens(keys)),
        hidden_size=hidden_size,
        intermediate_size=keys.size(f"{kind}.feed_forward_length"),
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        head_dim=head_dim,
        max_position_embeddings=keys.size(f"{kind}.context_length"),
        norm_eps=keys.number(f"{kind}.attention.layer_norm_rms_epsilon"),
        tie_word_embeddings="output.weight" not in file.tensors,
        bos_token_id=keys.token("tokenizer.ggml.bos_token_id"),
        eos_token_ids=end_token_ids(file.metadata),
        windows=(None,) * num_layers,
        rope=rotation.rope,
        attention_bias=biases == "qkvo",
    )
    return _with_windows(keys, config, rotation) if kind == "gemma3" else config


def _rope_divisors(file: GGUFFile, head_dim: int) -> np.ndarray:
    """Return the divisors in which Llama 3.1's stretched frequencies are stored."""
    factors = file.tensors.get("rope_freqs.weight")
    if factors is None:
        return np.ones(())
    if factors.shape != (head_dim // 2,):
        raise JaxinferError(
            f"{file.path}: rope_freqs.weight has shape {factors.shape}, must be ({head_dim // 2},)"
        )
    return factors.load()


def _biases(file: GGUFFile) -> str:
    """Return which products of attention have a bias: none, "qkv" (as in Qwen 2) or "qkvo"."""
    names = {"attn_q": "q", "attn_k": "k", "attn_v": "v", "attn_output": "o"}
    there = [part for part in names if f"blk.0.{part}.bias" in file.tensors]
    found = "".join(names[part] for part in there)
    if found not in ("", "qkv", "qkvo"):
        raise JaxinferError(
            f"{file.path}: has a bias of {', '.join(there)}, must have those of attn_q, attn_k and "
            "attn_v, with or without that of attn_output"
        )
    return found


def _with_windows(keys: Keys, config: ModelConfig, rotation: Rotation) -> ModelConfig:
    """Set Gemma 3's windows and scale, which llama.cpp knows without the file."""
    window = keys.size("gemma3.attention.sliding_window")
    # The model with 27 billion parameters has 62 layers.
    is_largest = config.num_hidden_layers == 62
    scaled_dim = config.hidden_size // config.num_attention_heads
    return replace(
        config,
        windows=tuple(window if slides else None for slides in _sliding(keys, config)),
        local_rope=rotation.local_rope,
        attention_scale=(scaled_dim if is_largest else config.head_dim) ** -0.5,
    )


def _sliding(keys: Keys, config: ModelConfig) -> list[bool]:
    """Return which layers have a window: all but each sixth, or as the file says."""
    key, num_layers = "gemma3.attention.sliding_window_pattern", config.num_hidden_layers
    pattern = keys.get(key, 6)
    if isinstance(pattern, list) and len(pattern) >= num_layers:
        return [bool(slides) for slides in pattern[:num_layers]]
    if type(pattern) is not int or pattern < 0:
        raise keys.wrong(key, pattern, f"an integer from 0 on, or {num_layers} flags")
    return [pattern == 0 or i % pattern < pattern - 1 for i in range(num_layers)]


def _num_tokens(keys: Keys) -> int | None:
    tokens = keys.get("tokenizer.ggml.tokens")
    return len(tokens) if isinstance(tokens, list) else None
