"""Sizes of models by name, or from a folder's ``config.json``, which real runs also read."""

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Literal

from jaxinfer.files.shipped import data_path
from jaxinfer.hardware.catalogue import Catalogue, ModelShape, WideLayers
from jaxinfer.models.config import ModelConfig

_BITS: Mapping[str | None, Literal["int8", "fp8"]] = {"int8": "int8", "float8_e4m3fn": "fp8"}


def model_shape(name: str, known: Catalogue) -> ModelShape:
    """Find a model by its name, or in a folder with ``config.json``.

    Raises:
        JaxinferError: there is no such model, or a real run would refuse its configuration.
    """
    path = data_path(Path(name).expanduser()) / "config.json"
    if known.has_model(name) or not path.is_file():
        return known.model(name)
    return _shape_of(path.parent, path.read_bytes())


@lru_cache(64)
def _shape_of(folder: Path, content: bytes) -> ModelShape:
    """Read an unchanged folder only once, because planners ask for it repeatedly."""
    from jaxinfer.checkpoints.hugging_face import read_folder_config  # This imports safetensors.

    return shape_of_config(read_folder_config(folder))


def shape_of_config(config: ModelConfig) -> ModelShape:
    """Return the sizes that decide a model's costs."""
    # A window that no sequence exceeds has no effect.
    windows = [each for each in config.windows if each and each < config.max_position_embeddings]
    kinds = [path.rpartition(".")[2].partition("_")[0] for path in config.wide_weights]
    return ModelShape(
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_hidden_layers,
        num_attention_heads=config.num_attention_heads,
        num_key_value_heads=config.num_key_value_heads,
        vocab_size=config.vocab_size,
        head_dim=config.head_dim,
        tie_word_embeddings=config.tie_word_embeddings,
        gated=not config.architecture.startswith("OPT"),
        qk_norm=config.architecture.startswith(("Qwen3", "Gemma3")),
        num_experts=config.num_experts,
        num_experts_per_tok=config.num_experts_per_tok,
        sliding_window=max(windows, default=0),
        windowed_layers=len(windows),
        stored_bits=_BITS.get(config.stored_bits),
        max_position_embeddings=config.max_position_embeddings,
        wide_layers=WideLayers(**{kind: kinds.count(kind) for kind in set(kinds)}),
    )
