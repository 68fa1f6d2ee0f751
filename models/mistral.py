"""Mistral (Jiang et al., 2023): Llama, with a window over the last tokens in all layers or none."""

from dataclasses import replace

from jaxinfer.models.config import ModelConfig
from jaxinfer.models.config_keys import Keys
from jaxinfer.models.llama import read_sizes


def read_config(keys: Keys) -> ModelConfig:
    """From ``config.json``; a null ``sliding_window`` is none.

    Raises:
        JaxinferError: a size is missing, a value is wrong, or something is not implemented.
    """
    keys.only("hidden_act", "silu")
    config = read_sizes(keys)
    return replace(config, windows=read_windows(keys, config.num_hidden_layers))


def read_windows(keys: Keys, num_layers: int) -> tuple[int | None, ...]:
    """``sliding_window`` in all layers; none where it is null."""
    window = None if keys.get("sliding_window") is None else keys.size("sliding_window")
    return (window,) * num_layers
