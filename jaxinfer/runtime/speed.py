"""How fast a stage's devices are, to divide layers by."""

import time
from collections.abc import Sequence
from statistics import median

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.models.config import ModelConfig

_REPEATS = 5
_TOKENS = 512


def measure_speed(config: ModelConfig, dtype: jnp.dtype, devices: Sequence[jax.Device]) -> float:
    """Feed-forward layers per second on one device, times the number of devices."""
    shape = config.hidden_size, config.intermediate_size
    up, x = (
        jax.device_put(np.ones(s, dtype), devices[0])
        for s in (shape, (_TOKENS, config.hidden_size))
    )
    layer = jax.jit(lambda x, up: (x @ up) @ up.T)
    layer(x, up).block_until_ready()
    times = []
    for _ in range(_REPEATS):
        start = time.perf_counter()
        layer(x, up).block_until_ready()
        times.append(time.perf_counter() - start)
    return len(devices) / median(times)
