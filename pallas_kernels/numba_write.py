"""Writes KV entries into their pages on a CPU, compiled by numba and called by XLA.

Pages are written in place, even if XLA's own scatter would copy or convert them.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numba as nb
import numpy as np

from jaxinfer.pallas_kernels.kv_pages import KVPages
from jaxinfer.pallas_kernels.xla_call import (
    COUNT,
    NativeCode,
    compiled_once,
    data,
    dim,
    is_past,
    part,
    pointer,
    register_target,
    take_after,
    threads,
)

# Number of tokens of a unit of work; keys of successive tokens share cache lines.
TOKENS = 64


@compiled_once
def _register(bits: int) -> NativeCode:
    """Compile a kernel for entries of a given number of bits, which are copied unchanged."""
    zero: Any = np.dtype(f"uint{bits}").type(0)

    @part
    def units(args: int) -> int:
        return -(-dim(args, 0, 0) // TOKENS)

    def work(args: int, rets: int, worker: int, shared: int, mine: int) -> int:
        if worker == COUNT:
            return units(args)
        T, K, H = dim(args, 0, 0), dim(args, 0, 1), dim(args, 0, 2)
        P, B = dim(rets, 0, 0), dim(rets, 0, 3)
        k_TKH = nb.carray(pointer(data(args, 0), zero), (T, K, H))
        v_TKH = nb.carray(pointer(data(args, 1), zero), (T, K, H))
        page_T = nb.carray(pointer(data(args, 2), np.int32(0)), (T,))
        offset_T = nb.carray(pointer(data(args, 3), np.int32(0)), (T,))
        keys = nb.carray(pointer(data(rets, 0), zero), (P, K, H, B))
        values = nb.carray(pointer(data(rets, 1), zero), (P, K, B, H))
        while True:
            for n in range(K):
                for t in range(mine * TOKENS, min((mine + 1) * TOKENS, T)):
                    page, offset = page_T[t], offset_T[t]
                    for h in range(H):
                        keys[page, n, h, offset] = k_TKH[t, n, h]
                        values[page, n, offset, h] = v_TKH[t, n, h]
            mine = take_after(shared)
            if is_past(shared, mine):
                return 0

    return register_target(f"write_{bits}", work, scratch=2)


def write_kv(
    kv: KVPages, k_TKH: jax.Array, v_TKH: jax.Array, page_T: jax.Array, offset_T: jax.Array
) -> KVPages:
    """Write float32 or bfloat16 as ``kv_pages.write_kv`` does, in place if nothing else reads them.

    Padding may mix entries of several tokens in one place of page 0.
    """
    pages = kv.keys, kv.values
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in pages]
    call = jax.ffi.ffi_call(
        _register(8 * kv.values.dtype.itemsize).name,
        [*shapes, jax.ShapeDtypeStruct((threads(), 1), jnp.uint8)],
        input_output_aliases={4: 0, 5: 1},
    )
    new = k_TKH.astype(kv.keys.dtype), v_TKH.astype(kv.values.dtype)
    keys, values, _ = call(*new, page_T, offset_T, *pages)
    return KVPages(keys, values)
