"""Golden entries say whose they are, in every number format."""

import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest

from jaxinfer.lab.conformance import GoldenModel, KVLayout, Side
from jaxinfer.lab.conformance.formats import FORMATS, decode, encode
from jaxinfer.lab.conformance.golden import BLOCK
from jaxinfer.lab.conformance.layout import from_order, to_order

MODEL = GoldenModel(layers=3, heads=3, head_dim=32)


@pytest.mark.parametrize("name", ["bfloat16", "float8_e4m3fn"])
def test_formats_round_as_ml_dtypes(name: str) -> None:
    rng = np.random.default_rng(0)
    x = np.concatenate([rng.normal(size=4000) * 10.0 ** rng.uniform(-4, 2, 4000), [0.0, -0.0]])
    x = np.clip(x, -448, 448).astype(np.float32)
    # Halfway between two numbers, too.
    bits = np.arange(0x7E, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    x = np.concatenate([x, (bits[1:] + bits[:-1]) / 2, -(bits[1:] + bits[:-1]) / 2])
    theirs = x.astype(name)
    np.testing.assert_array_equal(encode(x, name), theirs.view(FORMATS[name].storage))
    np.testing.assert_array_equal(decode(encode(x, name), name), theirs.astype(np.float32))


@pytest.mark.parametrize("kv_dtype", FORMATS)
def test_every_place_is_told_from_every_other(kv_dtype: str) -> None:
    side = Side(MODEL, KVLayout(kv_dtype=kv_dtype, page_size=8), 12)
    seen = set()
    for request in (0, 7):
        side.write(request, list(range(10)), 0, 80)
        for shard in side.pools:
            origin = MODEL.origins(side.get(shard, list(range(10)), 0, 80))
            assert (origin.request == request).all()
            assert (origin.layer == shard.layer).all()
            for name, axis, count in (("part", 0, 2), ("token", 1, 80), ("head", 2, 3),
                                      ("block", 3, 32 // BLOCK)):  # fmt: skip
                expected = np.arange(count).reshape([-1 if i == axis else 1 for i in range(4)])
                assert (getattr(origin, name) == expected).all(), name
            seen |= {p.tobytes() for p in np.stack(origin[:6], -1).reshape(-1, 6)}
    assert len(seen) == 2 * 3 * 2 * 80 * 3 * 2


def test_noise_is_nobody_s() -> None:
    noise = np.random.default_rng(0).normal(size=(20_000, BLOCK))
    assert (MODEL.origins(noise.repeat(2, axis=-1)).request >= 0).mean() < 1e-3
    assert (MODEL.origins(np.zeros((1, 32))).request == -1).all()


@pytest.mark.parametrize("order", ["HND", "NHD", "HDN"])
def test_orders_against_plain_indexing(order: str) -> None:
    pages = np.arange(2 * 3 * 4 * 5).reshape(2, 3, 4, 5)
    laid = to_order(pages, order)
    place = {"HND": "khbd", "NHD": "kbhd", "HDN": "khdb"}[order]
    for at in np.ndindex(*pages.shape):
        index = dict(zip("khbd", at, strict=True))
        assert laid[tuple(index[axis] for axis in place)] == pages[at]
    np.testing.assert_array_equal(from_order(laid, order), pages)


def test_the_heads_of_a_device() -> None:
    four, three = GoldenModel(), GoldenModel(heads=3)
    assert [KVLayout(tp=2).heads_of(four, r).tolist() for r in (0, 1)] == [[0, 1], [2, 3]]
    assert [KVLayout(tp=2).heads_of(three, r).tolist() for r in (0, 1)] == [[0, 1], [2, -1]]
    assert [KVLayout(tp=8).heads_of(four, r).tolist() for r in (0, 1, 7)] == [[0], [0], [3]]


def test_windows_need_what_the_next_token_attends_to() -> None:
    model = GoldenModel(windows=(None, 24, None, 24))
    assert [model.first_needed(1, n) for n in (10, 23, 24, 75)] == [0, 0, 1, 52]
    assert model.first_needed(0, 75) == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"head_dim": 8}, "head_dim is 8, must be a multiple of 16"),
        ({"windows": (3,)}, "windows has 1 entries for 4 layers"),
        ({"max_tokens": 10**6}, "more places than codes"),
    ],
)
def test_models_that_cannot_be(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GoldenModel(**options)  # type: ignore[arg-type]


def test_the_kit_needs_numpy_alone() -> None:
    """The kit imports neither the runtime nor JAX, but Python and numpy alone."""
    code = """
import sys, importlib, importlib.abc
class Only(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        ours = name in ("jaxinfer", "jaxinfer.lab") or name.startswith("jaxinfer.lab.conformance")
        made = ("scripts", "scripts.validate")
        ours |= name in made or name.startswith("scripts.validate.faults")
        if not (ours or top == "numpy" or top in sys.stdlib_module_names):
            raise ImportError(f"blocked: {name}")
sys.meta_path.insert(0, Only())
import jaxinfer.lab.conformance, scripts.validate.faults.registry
for name in sys.modules:
    assert not name.startswith(("jax.", "jaxlib")), name
"""
    subprocess.run([sys.executable, "-c", code], check=True)
