"""Checks that KV arrives unchanged: a slab that both ends know, and checksums."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.errors import JaxinferError
from jaxinfer.files.sums import name_by_sums
from jaxinfer.serving.batch import Transfer


def checksum(slab_2LTKH: jax.Array) -> jax.Array:
    """Return uint32 [L, T]: a sum of each token's keys and values per layer, by bits and places."""
    width = slab_2LTKH.dtype.itemsize
    kind = {2: jnp.uint16, 4: jnp.uint32}[width]
    bits = jax.lax.bitcast_convert_type(slab_2LTKH, kind).astype(jnp.uint32)
    two, _, _, K, H = slab_2LTKH.shape
    weight = 2 * jnp.arange(two * K * H, dtype=jnp.uint32) + 1  # An odd factor loses no bit.
    return jnp.einsum("altkh,akh->lt", bits, weight.reshape(two, K, H))


def known_slab(shape: tuple[int, ...], dtype: jnp.dtype) -> np.ndarray:
    """Return the slab whose contents both ends of a channel know, to test the channel with it."""
    return np.resize((np.arange(251) - 125).astype(dtype), shape)


def compare(
    transfer: Transfer,
    tokens: tuple[int, int],
    first_layer: int,
    dest_shard: int,
    page_size: int,
    sent_LT: np.ndarray,
    found_LT: np.ndarray,
) -> None:
    """Compare the checksum of the slab that was sent with that of the destination's pages.

    Args:
        tokens: first token of the slab, and the end.
        page_size: page size of the destination.

    Raises:
        JaxinferError: they differ; the message names the first layer and page, and the fault if it
            is recognised.
    """
    start, stop = tokens
    wrong = sent_LT[:, : stop - start] != found_LT[:, : stop - start]
    if wrong.any():
        layer, token = (int(n) for n in np.argwhere(wrong)[0])
        t, position = transfer, start + token
        count = stop - start
        sums = sent_LT[:, :count], found_LT[:, :count]
        fault = name_by_sums(*sums, page_size, first_layer, start)
        page = t.dest_hold.tables[dest_shard][0][position // page_size]
        raise JaxinferError(
            f"transfer of request {t.request.id!r} from {t.source} to {t.dest}: "
            f"layer {first_layer + layer}, page {page} of {t.dest} "
            f"(token {position}) is not what was sent{f': {fault}' if fault else ''}"
        )
