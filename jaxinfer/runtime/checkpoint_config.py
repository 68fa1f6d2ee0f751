"""What checkpoints say of their models, as a ``ModelConfig``."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from jaxinfer.errors import JaxinferError
from jaxinfer.models.config import ModelConfig, Rope
from jaxinfer.models.config_keys import Keys
from jaxinfer.models.registry import ARCHITECTURES
from jaxinfer.models.rope import plain
from jaxinfer.runtime.gguf_file import GGUFFile

# GGUF's architecture to Hugging Face's.
GGUF_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
}


def read_json(path: Path) -> dict[str, Any]:
    """The object in the JSON file ``path``.

    Raises:
        JaxinferError: the file cannot be read, or holds no JSON object.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise JaxinferError(f"{path}: cannot read the file: {error.strerror}") from None
    except ValueError as error:
        raise JaxinferError(f"{path}: not valid JSON: {error}") from None
    if not isinstance(values, dict):
        raise JaxinferError(f"{path}: must hold a JSON object, not {type(values).__name__}")
    return values


def read_gguf_config(file: GGUFFile) -> ModelConfig:
    """Translate GGUF metadata; an absent key has llama.cpp's default.

    Raises:
        JaxinferError: an architecture or feature that is not implemented, or a key that is
            missing or has a wrong value.
    """
    keys = Keys(file.path, file.metadata)
    kind = keys.get("general.architecture")
    if kind not in list(GGUF_ARCHITECTURES):
        raise keys.wrong("general.architecture", kind, f"one of: {', '.join(GGUF_ARCHITECTURES)}")
    keys.only("split.count", 1)
    keys.only(f"{kind}.expert_count", 0)
    num_heads = keys.size(f"{kind}.attention.head_count")
    num_layers = keys.size(f"{kind}.block_count")
    hidden_size = keys.size(f"{kind}.embedding_length")
    head_dim = keys.size(f"{kind}.attention.key_length", hidden_size // num_heads)
    keys.only(f"{kind}.attention.value_length", head_dim)
    keys.only(f"{kind}.rope.dimension_count", head_dim)
    # llama.cpp ends a text at each of the three.
    ends = [keys.tokens(f"tokenizer.ggml.{end}_token_id") for end in ("eos", "eot", "eom")]
    config = ModelConfig(
        architecture=GGUF_ARCHITECTURES[kind],
        vocab_size=keys.size(f"{kind}.vocab_size", _num_tokens(keys)),
        hidden_size=hidden_size,
        intermediate_size=keys.size(f"{kind}.feed_forward_length"),
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=keys.size(f"{kind}.attention.head_count_kv", num_heads),
        head_dim=head_dim,
        max_position_embeddings=keys.size(f"{kind}.context_length"),
        norm_eps=keys.number(f"{kind}.attention.layer_norm_rms_epsilon"),
        tie_word_embeddings="output.weight" not in file.tensors,
        bos_token_id=keys.token("tokenizer.ggml.bos_token_id"),
        eos_token_ids=tuple(dict.fromkeys(token for end in ends for token in end)),
        windows=(None,) * num_layers,
        rope=_gguf_rope(keys, kind, file, head_dim),
    )
    return _check_heads(file.path, _with_windows(keys, config) if kind == "gemma3" else config)


def _gguf_rope(keys: Keys, kind: str, file: GGUFFile, head_dim: int) -> Rope:
    theta = keys.number(f"{kind}.rope.freq_base", 1e6 if kind == "gemma3" else 1e4)
    frequency = plain(theta, head_dim)
    match scaling := keys.get(f"{kind}.rope.scaling.type", "none"):
        case "none":
            pass
        case "linear":
            frequency = frequency / keys.number(f"{kind}.rope.scaling.factor")
        case _:
            raise keys.wrong(f"{kind}.rope.scaling.type", scaling, "none or linear")
    # Llama 3.1's stretched frequencies come as what to divide by.
    if factors := file.tensors.get("rope_freqs.weight"):
        if factors.shape != frequency.shape:
            raise JaxinferError(
                f"{file.path}: rope_freqs.weight has shape {factors.shape}, "
                f"must be {frequency.shape}"
            )
        frequency = frequency / factors.load()
    return Rope(tuple(frequency.tolist()))


def _with_windows(keys: Keys, config: ModelConfig) -> ModelConfig:
    """Gemma 3's layers and scale, which llama.cpp knows without the file."""
    window = keys.size("gemma3.attention.sliding_window")
    windows = [window if (i + 1) % 6 else None for i in range(config.num_hidden_layers)]
    # The one of 27 billion parameters has 62 layers.
    is_largest = config.num_hidden_layers == 62
    scaled_dim = config.hidden_size // config.num_attention_heads
    return replace(
        config,
        windows=tuple(windows),
        local_rope=Rope(tuple(plain(1e4, config.head_dim).tolist())),
        attention_scale=(scaled_dim if is_largest else config.head_dim) ** -0.5,
    )


def _num_tokens(keys: Keys) -> int | None:
    tokens = keys.get("tokenizer.ggml.tokens")
    return len(tokens) if isinstance(tokens, list) else None


def read_folder_config(folder: Path) -> ModelConfig:
    """Translate ``config.json``; EOS tokens of ``generation_config.json`` are added.

    Both transformers 4's and 5's spellings are read; an absent key has transformers' default,
    except that the sizes must be there.

    Raises:
        JaxinferError: a file is missing or no JSON, or as for ``read_gguf_config``.
    """
    path = folder / "config.json"
    if not path.exists():
        raise JaxinferError(f"{folder}: has no config.json; must be a Hugging Face model folder")
    keys = Keys(path, read_json(path))
    names = keys.get("architectures")
    if not (isinstance(names, list) and names and names[0] in list(ARCHITECTURES)):
        raise keys.wrong("architectures", names, f"one of: {', '.join(ARCHITECTURES)}")
    keys.only("quantization_config", None)
    config = ARCHITECTURES[names[0]].read_config(keys)
    more_path = folder / "generation_config.json"
    more = Keys(more_path, read_json(more_path) if more_path.exists() else {})
    ends = dict.fromkeys([*config.eos_token_ids, *more.tokens("eos_token_id")])
    return _check_heads(path, replace(config, eos_token_ids=tuple(ends)))


def _check_heads(path: Path, config: ModelConfig) -> ModelConfig:
    if config.num_attention_heads % config.num_key_value_heads:
        raise JaxinferError(
            f"{path}: {config.num_attention_heads} query heads do not divide into groups over "
            f"{config.num_key_value_heads} key-value heads"
        )
    return config
