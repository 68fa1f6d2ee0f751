"""Measures the speed of devices, to divide layers and for comparisons."""

import time
from collections.abc import Callable, Sequence
from statistics import median

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.models.config import ModelConfig

_REPEATS = 5
_TOKENS = 512
# Number of calls in flight, so that launching them costs no time of the device.
_IN_FLIGHT = 10


def measure_speed(config: ModelConfig, dtype: jnp.dtype, devices: Sequence[jax.Device]) -> float:
    """Return feed-forward layers per second on one device, times the number of devices."""
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


def copy_rate(size: int) -> float:
    """Return bytes per second that JAX's first device reads and writes to copy ``size`` bytes."""
    x = jnp.zeros(size // 4, jnp.float32)
    return 2 * x.nbytes / _seconds(jax.jit(lambda x: x + 1), x)


def product_rate(size: int) -> float:
    """Return the FLOPs per second of JAX's first device in bfloat16 products of ``size`` rows."""
    # Random numbers: with equal numbers, a GPU at its power limit would be faster.
    x = jax.random.normal(jax.random.key(0), (size, size), jnp.bfloat16)
    return 2 * size**3 / _seconds(jax.jit(lambda x: x @ x), x)


def _seconds(run: Callable[[jax.Array], jax.Array], x: jax.Array) -> float:
    """Return the median seconds of a call, with several in flight."""
    run(x).block_until_ready()
    times = []
    for _ in range(_REPEATS):
        start = time.perf_counter()
        for _ in range(_IN_FLIGHT):
            last = run(x)
        last.block_until_ready()
        times.append((time.perf_counter() - start) / _IN_FLIGHT)
    return median(times)
