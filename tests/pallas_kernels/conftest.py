"""Products of float32 in plain JAX, which on a GPU would default to TF32."""

from collections.abc import Iterator

import jax
import pytest


@pytest.fixture(autouse=True)
def exact_products() -> Iterator[None]:
    with jax.default_matmul_precision("highest"):
        yield
