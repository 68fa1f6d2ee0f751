"""Mistral (Jiang et al., 2023): Llama, with a window over the last tokens in all layers or none."""

from dataclasses import replace

from jaxinfer.models.config import ModelConfig
from jaxinfer.models.config_keys import Keys
from jaxinfer.models.llama import read_sizes
from jaxinfer.models.rope import rope_keys


def read_config(keys: Keys) -> ModelConfig:
    """Read ``config.json``.

    Raises:
        JaxinferError: a size is missing, a value is wrong, or something is not implemented.
    """
    keys.only("hidden_act", "silu")
    config = read_sizes(keys, rope_keys(keys))
    return replace(config, windows=(keys.window(default=4096),) * config.num_hidden_layers)
