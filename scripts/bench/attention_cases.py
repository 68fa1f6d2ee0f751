"""Cases of attention: our kernels and their peers on the same data, and a reference for all.

Data are in bfloat16, with 32 query heads and 8 KV heads of size 128, and pages of 64 tokens.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.pallas_kernels import generic, hopper, kv_pages, reference
from jaxinfer.pallas_kernels.kv_pages import KVPages

N, K, H, B = 32, 8, 128, 64
# Range of context tokens of ragged decodes, and the number of decodes.
RAGGED, RAGGED_ROWS = (50, 8192), 64


class How(NamedTuple):
    """Choices of how cases are made.

    Attributes:
        small: whether cases have only a 64th of the tokens.
        interpreted: whether kernels are interpreted.
        flex: whether to run torch's flex_attention, too.
        only: names of the runs to make; empty for all.
        without: name of a run to leave out.
    """

    small: bool = False
    interpreted: bool = False
    flex: bool = False
    only: tuple[str, ...] = ()
    without: str = ""

    def of(self, count: int, least: int = 1) -> int:
        """Return the number, or a 64th of it if cases are small."""
        return max(count // 64, least) if self.small else count


class AttentionRun(NamedTuple):
    """A function to time: ``start`` starts its work, ``wait`` waits for it."""

    start: Callable[[], Any]
    wait: Callable[[Any], object] = jax.block_until_ready


class AttentionCase(NamedTuple):
    """The computations of one case.

    Attributes:
        expected: computes the expected result, by XLA's dense attention with float32 softmax.
        runs: makers of the runs, by name; peers come last.
        work: number of bytes to read (decodes), or number of operations (chunks).
        rate: whether ``work`` counts bytes or operations.
    """

    expected: Callable[[], jax.Array]
    runs: dict[str, Callable[[], AttentionRun]]
    work: float
    rate: Literal["bytes", "operations"]


def pool(sequences: int, length: int) -> tuple[KVPages, jax.Array]:
    """Return the pages of all sequences, in random order, and their table."""
    M = -(-length // B)
    order = np.random.default_rng(0).permutation(sequences * M)
    size = sequences * M + 1, K, B, H
    keys, values = (
        jax.random.normal(key, size, jnp.bfloat16) for key in jax.random.split(jax.random.key(0))
    )
    return KVPages(keys, values), jnp.asarray(1 + order.reshape(sequences, M), jnp.int32)


@jax.jit
def contiguous(pages_PKBH: jax.Array, table_SM: jax.Array) -> jax.Array:
    """Return the entries as a contiguous array [S, L, K, H]."""
    x_SMBKH = pages_PKBH[table_SM].swapaxes(2, 3)
    return x_SMBKH.reshape(len(table_SM), -1, *x_SMBKH.shape[3:])


@jax.jit
def in_8_bits(kv: KVPages) -> KVPages:
    """Quantise the pages to 8 bits, with one scale per page and head."""
    scales = [jnp.abs(x.astype(jnp.float32)).max((2, 3)) / 127 for x in kv[:2]]
    keys, values = (
        kv_pages.quantise(x.astype(jnp.float32), scale[..., None, None], jnp.dtype("int8"))
        for x, scale in zip(kv[:2], scales, strict=True)
    )
    return KVPages(keys, values, *scales)


def dense(how: How | None, **options: Any) -> Callable[..., jax.Array]:
    """Return attention to contiguous data: cuDNN's on a GPU, else XLA's; None for the reference."""
    kind: Literal["cudnn", "xla"] = "xla" if how is None or how.interpreted else "cudnn"
    attend = jax.nn.dot_product_attention
    return jax.jit(partial(attend, implementation=kind, scale=1.0, **options))


def kernels(name: str, how: How) -> dict[str, Callable[..., jax.Array]]:
    """Return our functions of a name that can run here, by kernels."""
    found = {"generic": partial(getattr(generic, name), interpret=how.interpreted)}
    capability = getattr(jax.devices()[0], "compute_capability", "")
    if capability == "9.0":
        found["hopper"] = getattr(hopper, name)
    return {kernel: jax.jit(run) for kernel, run in found.items()}


def decode_case(lengths: np.ndarray, how: How) -> AttentionCase:
    """Return the case of one step of decodes; ``lengths`` are int32 [S] tokens of context."""
    sequences, longest = len(lengths), int(lengths.max())
    kv, table = pool(sequences, longest)
    q = jax.random.normal(jax.random.key(1), (sequences, N, H), jnp.bfloat16) * H**-0.5
    length_S = jnp.asarray(lengths, jnp.int32)
    ours = kernels("decode_attention", how)
    runs: dict[str, Callable[[], AttentionRun]] = {
        kernel: partial(AttentionRun, partial(run, q, kv, table, length_S))
        for kernel, run in ours.items()
    }

    def of_8_bits(kernel: str) -> AttentionRun:
        return AttentionRun(partial(ours[kernel], q, in_8_bits(kv), table, length_S))

    runs |= {f"{kernel}, int8": partial(of_8_bits, kernel) for kernel in ours}
    plain = jax.jit(reference.decode_attention)
    runs["plain"] = lambda: AttentionRun(
        partial(plain, q, kv._replace(keys=jnp.swapaxes(kv.keys, 2, 3)), table, length_S)
    )
    flat = [contiguous(pages, table) for pages in kv[:2]]

    def attend(by: How | None) -> AttentionRun:
        run = dense(by, key_value_seq_lengths=length_S)
        return AttentionRun(lambda: run(q[:, None], *flat)[:, 0])

    runs["contiguous"] = lambda: attend(how)
    if not how.interpreted:
        runs |= jaxs_own(q, kv, table, length_S)
    if how.flex and longest == lengths.min():
        runs["flex_attention"] = lambda: flex_attention(sequences, 1, longest - 1)
    return AttentionCase(attend(None).start, runs, float(lengths.sum()) * 2 * K * H * 2, "bytes")


def jaxs_own(
    q: jax.Array, kv: KVPages, table: jax.Array, length_S: jax.Array
) -> dict[str, Callable[[], AttentionRun]]:
    """Return JAX's own paged decode, by the pages of a block."""
    from jax.experimental.pallas.ops.gpu import paged_attention as shipped

    by_head = [pages.swapaxes(0, 1) for pages in kv[:2]]
    found: dict[str, Callable[[], AttentionRun]] = {}
    for block in (1, 2, 4):
        run = jax.jit(partial(shipped.paged_attention, pages_per_compute_block=block))
        found[f"jax's, {block} pages"] = partial(
            AttentionRun, partial(run, q, *by_head, table, length_S)
        )
    return found


def chunk_case(new: int, before: int, how: How) -> AttentionCase:
    """Return the case of one chunk of a prompt.

    The plain function is left out, because it takes minutes for it.
    """
    kv, table = pool(1, before + new)
    q = jax.random.normal(jax.random.key(1), (new, N, H), jnp.bfloat16) * H**-0.5
    rest = jnp.array([before], jnp.int32), jnp.array([0, new], jnp.int32)
    runs: dict[str, Callable[[], AttentionRun]] = {
        kernel: partial(AttentionRun, partial(run, q, kv, table, *rest))
        for kernel, run in kernels("chunk_attention", how).items()
    }
    length = before + new
    seen = jnp.arange(length)[None, :] <= before + jnp.arange(new)[:, None]
    flat = [contiguous(pages, table)[:, :length] for pages in kv[:2]]

    def attend(by: How | None, **mask: Any) -> AttentionRun:
        run = dense(by, **mask)
        return AttentionRun(lambda: run(q[None], *flat)[0])

    # For cuDNN, the mask is an array of biases. Without it, there is more to compute, but less to
    # read.
    runs["contiguous"] = lambda: attend(how, mask=seen[None, None])
    runs["contiguous, unmasked"] = lambda: attend(how)
    if how.flex:
        runs["flex_attention"] = lambda: flex_attention(1, new, before)
    pairs = new * before + new * (new + 1) / 2
    return AttentionCase(
        attend(None, mask=seen[None, None]).start, runs, 4 * N * H * pairs, "operations"
    )


def flex_attention(sequences: int, new: int, before: int) -> AttentionRun:
    """Return torch's causal flex_attention over pages of its block size, on other random data."""
    import torch
    from torch.nn.attention import flex_attention as flex
    from torch.nn.attention.experimental._paged_attention import PagedAttention

    page, length = 128, before + new
    each = -(-length // page)
    paged = PagedAttention(sequences * each, page, sequences, device="cuda")
    for number in range(sequences):
        paged.reserve(torch.tensor(number, device="cuda"), torch.tensor(length, device="cuda"))
    like = {"device": "cuda", "dtype": torch.bfloat16}
    q = torch.randn(sequences, N, new, H, **like)
    k, v = (torch.randn(1, K, sequences * each * page, H, **like) for _ in "kv")

    def causal(b: Any, h: Any, row: Any, token: Any) -> Any:
        return row + before >= token

    mask = flex.create_block_mask(causal, sequences, None, new, each * page, BLOCK_SIZE=page)
    mask = paged.convert_logical_block_mask(mask)
    attend = torch.compile(flex.flex_attention, dynamic=False)
    start = partial(attend, q, k, v, block_mask=mask, enable_gqa=True, scale=1.0)
    return AttentionRun(start, lambda _: torch.cuda.synchronize())


def ragged(how: How) -> np.ndarray:
    """Return lengths of context as they are in traffic: their logarithms are uniform."""
    shortest, longest = RAGGED
    found = np.geomspace(shortest, how.of(longest, 2 * shortest), how.of(RAGGED_ROWS, 4))
    return np.random.default_rng(0).permutation(found.round().astype(np.int32))


def equal(sequences: int, length: int, how: How) -> np.ndarray:
    """Return ``sequences`` equal lengths of context."""
    return np.full(how.of(sequences, 2), how.of(length), np.int32)


CASES: dict[str, Callable[[How], AttentionCase]] = {
    "decode 64 x 4096": lambda how: decode_case(equal(64, 4096, how), how),
    "decode 4 x 65536": lambda how: decode_case(equal(4, 65536, how), how),
    "decode 64 of 50 to 8192": lambda how: decode_case(ragged(how), how),
    "chunk of 2048 after 8192": lambda how: chunk_case(how.of(2048), how.of(8192), how),
}
