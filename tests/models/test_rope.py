"""Rotary frequencies against the papers' formulas, written out pair by pair."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxinfer import JaxinferError
from jaxinfer.models.config_keys import Keys
from jaxinfer.models.rope import rope_keys, rope_of, stretched

HEAD_DIM = 16


def keys(**values: Any) -> Keys:
    return Keys(Path("config.json"), values)


def frequencies(max_positions: int = 100, **values: Any) -> list[float]:
    return list(rope_of(keys(**values), HEAD_DIM, max_positions).frequencies)


def plain(theta: float) -> list[float]:
    return [theta ** (-2 * i / HEAD_DIM) for i in range(HEAD_DIM // 2)]


def test_plain_and_linear() -> None:
    assert frequencies(rope_theta=5000.0) == pytest.approx(plain(5000.0))
    found = frequencies(rope_theta=5000.0, rope_type="linear", factor=4.0)
    assert found == pytest.approx([f / 4 for f in plain(5000.0)])


@pytest.mark.parametrize(
    ("theta", "bits"),
    [
        (1e6, {2: "0x1.9c975ap-1", 6: "0x1.0bedde0p-1", 9: "0x1.83a304p-2", 13: "0x1.f772c8p-3"}),
        (1e4, {3: "0x1.9c975ap-1", 9: "0x1.0bedde0p-1", 11: "0x1.d008bep-2", 14: "0x1.75f036p-2"}),
    ],
)
def test_frequencies_are_rounded_as_torch_rounds_them(theta: float, bits: dict[int, str]) -> None:
    """Bits are torch 2.13's: ``1 / theta ** (torch.arange(0, 256, 2).float() / 256)``."""
    found = rope_of(keys(rope_theta=theta), 256, 100).frequencies
    for i, text in bits.items():
        assert found[i] == float.fromhex(text)
        assert found[i] != float(np.float32(theta ** (-2 * i / 256)))


@pytest.mark.parametrize("given", [{"original_max_position_embeddings": 64}, {}])
def test_llama3_by_pairs(given: dict[str, int]) -> None:
    """Wavelengths within a quarter of the context are kept, those beyond it are stretched."""
    found = frequencies(
        64,
        rope_theta=500.0,
        rope_type="llama3",
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        **given,
    )
    kinds = set()
    for frequency, got in zip(plain(500.0), found, strict=True):
        rotations = 64 / (2 * math.pi / frequency)
        if rotations > 4:
            kinds.add("kept")
            assert got == pytest.approx(frequency)
        elif rotations < 1:
            kinds.add("slowed")
            assert got == pytest.approx(frequency / 8)
        else:
            kinds.add("between")
            smooth = (rotations - 1) / (4 - 1)
            assert got == pytest.approx((1 - smooth) * frequency / 8 + smooth * frequency)
    assert kinds == {"kept", "between", "slowed"}


@pytest.mark.parametrize(
    ("theta", "original", "fast", "slow", "first", "last"),
    [
        # Pair i turns 4096 / (2 pi 10000^(i / 8)) times: 32 times at i = 2.62, once at 5.63.
        (10000.0, 4096, None, None, 2, 6),
        # 8 / (2 pi 100^(i / 8)): 32 times at a negative i, once at 0.42.
        (100.0, 8, None, None, 0, 1),
        # Both at 2.62: all of the ramp lies between two pairs.
        (10000.0, 4096, 32.0, 31.9, 2, 3),
        # Half a rotation at 7.30, and 1e-7 of one only far past the last pair.
        (10000.0, 4096, 0.5, 1e-7, 6, 15),
        # Exactly at pair 0: a ramp of no length.
        (10000.0, 4096, 4096 / (2 * math.pi), 4096 / (2 * math.pi), 0, 0),
    ],
)
def test_yarn_by_pairs(
    theta: float, original: int, fast: float | None, slow: float | None, first: int, last: int
) -> None:
    """A ramp from the last pair that is kept to the first one that is slowed."""
    given = {"beta_fast": fast, "beta_slow": slow}
    rope = rope_of(
        keys(
            rope_theta=theta,
            rope_type="yarn",
            factor=4.0,
            original_max_position_embeddings=original,
            **given,
        ),
        HEAD_DIM,
        100,
    )
    for i, (frequency, got) in enumerate(zip(plain(theta), rope.frequencies, strict=True)):
        ramp = min(max((i - first) / (last - first or 0.001), 0), 1)
        assert got == pytest.approx(frequency * (1 - ramp) + frequency / 4 * ramp), i
    assert rope.factor == pytest.approx(0.1 * math.log(4) + 1)


def test_yarns_factor_of_attention() -> None:
    yarn = {"rope_theta": 1e4, "rope_type": "yarn"}
    assert rope_of(keys(**yarn, factor=0.5), HEAD_DIM, 100).factor == 1
    assert rope_of(keys(**yarn, factor=4.0, attention_factor=1.5), HEAD_DIM, 100).factor == 1.5


def test_the_longest_sequence() -> None:
    assert stretched(keys(rope_type="linear", factor=4.0), 100) == 100
    assert stretched(keys(rope_type="yarn", factor=4.0), 100) == 400
    original = {"original_max_position_embeddings": 32}
    assert stretched(keys(type="yarn", factor=4.0, **original), 50) == 128
    assert stretched(keys(type="yarn", factor=4.0, **original), 200) == 200


def test_where_the_numbers_stand() -> None:
    """The keys are in ``rope_scaling`` (transformers 4) or inside ``rope_parameters`` (5)."""
    assert rope_keys(keys()).number("rope_theta") == 10000
    assert rope_keys(keys(), 500.0).number("rope_theta") == 500
    outside = rope_keys(keys(rope_theta=7.0, rope_scaling={"type": "linear", "factor": 2.0}))
    assert (outside.number("rope_theta"), outside.number("factor")) == (7, 2)
    inside = {"rope_theta": 8.0, "rope_type": "default"}
    assert rope_keys(keys(rope_theta=7.0, rope_parameters=inside)).number("rope_theta") == 8
    both = rope_keys(keys(rope_parameters=inside, rope_scaling=dict(inside)))
    assert both.number("rope_theta") == 8
    with pytest.raises(JaxinferError, match=r"rope_parameters\.rope_theta is 0"):
        rope_keys(keys(rope_parameters={"rope_theta": 0})).number("rope_theta")


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 2.0, "high_freq_factor": 2.0}
YARN = {"rope_type": "yarn", "factor": 8.0}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (LLAMA3, "high_freq_factor is 2.0, must be above low_freq_factor, 2.0"),
        ({"rope_type": "dynamic"}, "rope_type is 'dynamic', must be one of: default, linear"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        (YARN | {"truncate": False}, "truncate is False"),
        (YARN | {"mscale": 1.0}, "mscale is 1.0"),
        (YARN | {"mscale_all_dim": 1.0}, "mscale_all_dim is 1.0"),
        (YARN | {"rope_theta": 1}, "rope_theta is 1.0, must be above 1"),
        ({"full_attention": {}}, "full_attention is {}, must be no object"),
    ],
)
def test_what_is_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(JaxinferError) as caught:
        rope_of(keys(**({"rope_theta": 1e4} | values)), HEAD_DIM, 100)
    assert message in str(caught.value)
