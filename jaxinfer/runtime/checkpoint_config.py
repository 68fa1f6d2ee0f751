"""What checkpoints say of their models, as a ``ModelConfig``."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxinfer.errors import JaxinferError
from jaxinfer.models.config import ModelConfig
from jaxinfer.runtime.gguf_file import GGUFFile

# GGUF's architecture to Hugging Face's.
ARCHITECTURES = {"llama": "LlamaForCausalLM"}


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


class _Keys:
    """Typed look-ups in a configuration; an error names the file, the key and the value."""

    def __init__(self, path: Path, values: Mapping[str, Any]) -> None:
        self.path = path
        self.values = values

    def get(self, key: str, default: Any = None) -> Any:
        """The value; ``default`` where it is absent or null."""
        value = self.values.get(key)
        return default if value is None else value

    def size(self, key: str, default: int | None = None) -> int:
        """A positive integer."""
        value = self._required(key, default)
        if type(value) is not int or value <= 0:
            raise self.wrong(key, value, "a positive integer")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A positive number."""
        value = self._required(key, default)
        if type(value) not in (int, float) or not value > 0:
            raise self.wrong(key, value, "a positive number")
        return float(value)

    def token(self, key: str) -> int | None:
        """A token id or none."""
        tokens = self.tokens(key)
        if len(tokens) > 1:
            raise self.wrong(key, self.values[key], "one token id")
        return tokens[0] if tokens else None

    def tokens(self, key: str) -> list[int]:
        """Token ids, given as one, a list, or not at all."""
        value = self.get(key, [])
        tokens = value if isinstance(value, list) else [value]
        if any(type(token) is not int or token < 0 for token in tokens):
            raise self.wrong(key, value, "a token id or a list of them")
        return tokens

    def flag(self, key: str, default: bool) -> bool:
        """True or false."""
        value = self.get(key, default)
        if type(value) is not bool:
            raise self.wrong(key, value, "true or false")
        return value

    def only(self, key: str, supported: Any) -> None:
        """Refuse any value but ``supported``, which is also the meaning of an absent key."""
        value = self.get(key, supported)
        if value != supported:
            raise self.wrong(key, value, f"{supported!r}: nothing else is implemented")

    def wrong(self, key: str, value: Any, wanted: str) -> JaxinferError:
        """The error for a value that will not do."""
        shown = repr(value)
        shown = shown if len(shown) <= 60 else shown[:57] + "..."
        return JaxinferError(f"{self.path}: {key} is {shown}, must be {wanted}")

    def _required(self, key: str, default: Any) -> Any:
        value = self.get(key, default)
        if value is None:
            raise JaxinferError(f"{self.path}: lacks {key!r}, which the model needs")
        return value


def read_gguf_config(file: GGUFFile) -> ModelConfig:
    """Translate GGUF metadata; an absent key has llama.cpp's default.

    Raises:
        JaxinferError: an architecture or feature that is not implemented, or a key that is
            missing or has a wrong value.
    """
    keys = _Keys(file.path, file.metadata)
    kind = keys.get("general.architecture")
    if kind not in list(ARCHITECTURES):
        raise keys.wrong("general.architecture", kind, f"one of: {', '.join(ARCHITECTURES)}")
    keys.only("split.count", 1)
    keys.only(f"{kind}.expert_count", 0)
    keys.only(f"{kind}.rope.scaling.type", "none")
    if "rope_freqs.weight" in file.tensors:
        raise JaxinferError(
            f"{file.path}: tensor 'rope_freqs.weight' scales the rotary embedding (as in "
            "Llama 3.1), which is not implemented"
        )
    num_heads = keys.size(f"{kind}.attention.head_count")
    hidden_size = keys.size(f"{kind}.embedding_length")
    head_dim = keys.size(f"{kind}.attention.key_length", hidden_size // num_heads)
    keys.only(f"{kind}.attention.value_length", head_dim)
    keys.only(f"{kind}.rope.dimension_count", head_dim)
    # llama.cpp ends a text at each of the three.
    ends = [keys.tokens(f"tokenizer.ggml.{end}_token_id") for end in ("eos", "eot", "eom")]
    config = ModelConfig(
        architecture=ARCHITECTURES[kind],
        vocab_size=keys.size(f"{kind}.vocab_size", _num_tokens(keys)),
        hidden_size=hidden_size,
        intermediate_size=keys.size(f"{kind}.feed_forward_length"),
        num_hidden_layers=keys.size(f"{kind}.block_count"),
        num_attention_heads=num_heads,
        num_key_value_heads=keys.size(f"{kind}.attention.head_count_kv", num_heads),
        head_dim=head_dim,
        max_position_embeddings=keys.size(f"{kind}.context_length"),
        rope_theta=keys.number(f"{kind}.rope.freq_base", 10000.0),
        rms_norm_eps=keys.number(f"{kind}.attention.layer_norm_rms_epsilon"),
        tie_word_embeddings="output.weight" not in file.tensors,
        bos_token_id=keys.token("tokenizer.ggml.bos_token_id"),
        eos_token_ids=tuple(dict.fromkeys(token for end in ends for token in end)),
    )
    return _check_heads(file.path, config)


def _num_tokens(keys: _Keys) -> int | None:
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
    keys = _Keys(path, read_json(path))
    architectures = keys.get("architectures")
    known = list(ARCHITECTURES.values())
    if not (isinstance(architectures, list) and architectures and architectures[0] in known):
        raise keys.wrong("architectures", architectures, f"one of: {', '.join(known)}")
    keys.only("hidden_act", "silu")
    keys.only("attention_bias", False)
    keys.only("mlp_bias", False)
    keys.only("quantization_config", None)
    generation_path = folder / "generation_config.json"
    generation = _Keys(
        generation_path, read_json(generation_path) if generation_path.exists() else {}
    )
    num_heads = keys.size("num_attention_heads")
    hidden_size = keys.size("hidden_size")
    ends = keys.tokens("eos_token_id") + generation.tokens("eos_token_id")
    config = ModelConfig(
        architecture=architectures[0],
        vocab_size=keys.size("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=keys.size("intermediate_size"),
        num_hidden_layers=keys.size("num_hidden_layers"),
        num_attention_heads=num_heads,
        num_key_value_heads=keys.size("num_key_value_heads", num_heads),
        head_dim=keys.size("head_dim", hidden_size // num_heads),
        max_position_embeddings=keys.size("max_position_embeddings", 2048),
        rope_theta=_rope_theta(keys),
        rms_norm_eps=keys.number("rms_norm_eps", 1e-6),
        tie_word_embeddings=keys.flag("tie_word_embeddings", False),
        bos_token_id=keys.token("bos_token_id"),
        eos_token_ids=tuple(dict.fromkeys(ends)),
    )
    return _check_heads(path, config)


def _rope_theta(keys: _Keys) -> float:
    """The rotary base, from transformers 4's two keys or transformers 5's one."""
    theta = keys.number("rope_theta", 10000.0)
    for key in ("rope_scaling", "rope_parameters"):
        value = keys.get(key, {})
        if not isinstance(value, dict):
            raise keys.wrong(key, value, "an object")
        inner = _Keys(keys.path, value)
        kind = inner.get("rope_type", inner.get("type", "default"))
        if kind != "default":
            raise keys.wrong(f"{key}.rope_type", kind, "'default': nothing else is implemented")
        inner.only("partial_rotary_factor", 1.0)
        theta = inner.number("rope_theta", theta)
    return theta


def _check_heads(path: Path, config: ModelConfig) -> ModelConfig:
    if config.num_attention_heads % config.num_key_value_heads:
        raise JaxinferError(
            f"{path}: {config.num_attention_heads} query heads do not divide into groups over "
            f"{config.num_key_value_heads} key-value heads"
        )
    return config
