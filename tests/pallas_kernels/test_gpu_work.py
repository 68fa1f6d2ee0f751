"""Queries as decodes multiply them: for keys of int8, fixed-point numbers in two halves."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.pallas_kernels.gpu_work import decode_queries
from jaxinfer.pallas_kernels.kv_pages import KVPages

S, K, G, H, R = 3, 2, 3, 32, 16


def pages(dtype: str, head_dim: int = H) -> KVPages:
    of: Any = jax.ShapeDtypeStruct((4, K, 16, head_dim), jnp.dtype(dtype))
    return KVPages(of, of)


def test_halves_of_fixed_point_numbers() -> None:
    """They are the queries to half a number's 1, which is the largest one's 32,512th part."""
    q = np.random.default_rng(0).normal(size=(S, K, G, H)).astype(np.float32)
    q[0] *= 1e4
    q[1, 0] = 0
    q[2, 1, 2, 5] = -7.5  # The largest number may be negative.
    halves, one = decode_queries(jnp.asarray(q.reshape(S, K * G, H)), pages("int8"), R)
    assert one is not None
    assert halves.shape == (2, S, K, R, H)
    assert halves.dtype == jnp.int8
    upper, lower = np.asarray(halves, np.float64)
    found = (256 * upper + lower) * np.asarray(one, np.float64)[:, :, None, None]
    largest = np.abs(q).max((2, 3), keepdims=True)
    assert np.all(np.abs(found[:, :, :G] - q) <= 0.501 * largest / 32512)
    assert not found[:, :, G:].any()
    assert (upper[2, 1, 2, 5], lower[2, 1, 2, 5]) == (-127, 0)


@pytest.mark.parametrize(
    ("dtype", "head_dim", "products"),
    [
        ("bfloat16", H, "bfloat16"),
        ("float32", H, "float32"),
        ("float8_e4m3fn", H, "bfloat16"),
        ("int8", 80, "bfloat16"),
    ],
)
def test_other_queries_are_converted(dtype: str, head_dim: int, products: str) -> None:
    q = np.random.default_rng(1).normal(size=(S, K * G, head_dim)).astype(np.float32)
    found, one = decode_queries(jnp.asarray(q), pages(dtype, head_dim), R)
    assert one is None
    expected = jnp.asarray(q, products)
    assert found.dtype == expected.dtype
    np.testing.assert_array_equal(found[0, :, :, :G].reshape(S, K * G, head_dim), expected)
    assert not np.asarray(found[0, :, :, G:], np.float32).any()
