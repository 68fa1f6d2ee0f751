"""Pools with more entries than 32 bits count."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernel_cases import close

from jaxinfer.errors import JaxinferError
from jaxinfer.pallas_kernels import generic, hopper
from jaxinfer.pallas_kernels.choice import attention
from jaxinfer.pallas_kernels.kv_pages import KVPages
from scripts.kernels import lower_kernels

G, H, B = 4, 128, 64
# Pages of two KV heads with just over 2**31 entries.
PAGES = 2**31 // (2 * B * H) + 8


def triton_code(text: str) -> str:
    """The kernel within lowered code, whose bytes are an escaped string."""
    from jax._src.interpreters import mlir
    from jax._src.lib import triton
    from jaxlib.mlir import ir

    found = re.search(r'ir = "((?:[^"\\]|\\.)*)"', text)
    assert found
    code = re.sub(
        rb"\\([0-9A-Fa-f]{2}|.)",
        lambda m: bytes([int(m[1], 16)]) if len(m[1]) == 2 else m[1],
        found[1].encode(),
    )
    context = mlir.make_ir_context()
    triton.dialect.register_dialect(context)
    with context:
        return str(ir.Module.parse(code))


@pytest.mark.parametrize(("pages", "bits"), [(600, 32), (PAGES, 64)])
def test_offsets_have_64_bits(monkeypatch: pytest.MonkeyPatch, pages: int, bits: int) -> None:
    """Offsets count pages, so a pool of that size is not needed to test them."""
    monkeypatch.setattr(lower_kernels, "P", pages)
    decode, *_ = lower_kernels._arguments(2, G, H, B, "bfloat16")
    variant = lower_kernels.Variant("", generic.decode_attention, decode, ("H100",))
    text = triton_code(lower_kernels.lowered(variant, "H100"))
    offsets = re.findall(rf"tt.addptr .*: tensor<{H}x\d+x!tt.ptr<bf16>>, tensor<\S+xi(\d+)>", text)
    assert set(offsets) == {str(bits)}


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
@pytest.mark.parametrize("what", [0, 1, 2])
def test_what_pallas_cannot_reach(monkeypatch: pytest.MonkeyPatch, what: int, dtype: str) -> None:
    """Entries of 8 bits between 2**31 and 2**32 are an error, and more of them are none."""
    kernels = attention("generic")
    for pages, reached in ((PAGES - 8, True), (PAGES, False), (2 * PAGES, True)):
        monkeypatch.setattr(lower_kernels, "P", pages)
        arguments = lower_kernels._arguments(2, G, H, B, dtype)[what]
        trace = lambda arguments=arguments: jax.eval_shape(kernels[what], *arguments)  # noqa: E731
        if reached:
            trace()
        else:
            with pytest.raises(JaxinferError, match="entries of 8 bits in one array"):
                trace()


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a GPU with 20 GB")
@pytest.mark.parametrize("name", ["generic", "hopper"])
def test_the_last_pages(name: str) -> None:
    """The same as of a small pool with the same pages."""
    if name == "hopper" and getattr(jax.devices()[0], "compute_capability", "") != "9.0":
        pytest.skip("needs an sm_90 GPU")
    attend: Any = {"generic": generic, "hopper": hopper}[name].decode_attention
    rng = np.random.default_rng(0)
    few = [jnp.asarray(rng.normal(size=(4, 2, B, H)), jnp.bfloat16) for _ in "kv"]
    q_SNH = jnp.asarray(rng.normal(size=(2, 2 * G, H)) * H**-0.5, jnp.float32)
    length_S, table_SM = jnp.array([100, 65]), np.array([[0, 1], [2, 3]], np.int32)
    expected = attend(q_SNH, KVPages(*few), jnp.asarray(table_SM), length_S)
    last = PAGES - 4
    many = [jnp.zeros((PAGES, 2, B, H), jnp.bfloat16).at[last:].set(x) for x in few]
    got = attend(q_SNH, KVPages(*many), jnp.asarray(table_SM + last), length_S)
    close(got, expected, "bfloat16")
