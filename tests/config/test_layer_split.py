"""Layers of pipeline stages: stated, by shares, by speed."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxinfer import JaxinferError
from jaxinfer.config.cluster import InstanceConfig
from jaxinfer.config.layer_split import by_shares, count_layers
from jaxinfer.config.stages import StageConfig


def never(number: int) -> float:
    raise AssertionError("measured, though it is stated")


# The paper's splits (Cronus, section 5.1), by BF16 TFLOPS: A100 312, A10 125, A30 165.
@pytest.mark.parametrize(
    ("total", "shares", "expected"),
    [
        (32, [312, 125], [23, 9]),
        (32, [312, 165], [21, 11]),
        (28, [312, 125], [20, 8]),
        (28, [312, 165], [18, 10]),
    ],
)
def test_the_papers_splits(total: int, shares: list[float], expected: list[int]) -> None:
    assert by_shares(total, shares) == expected
    stages = [StageConfig(group="a", share=s) for s in shares]
    assert count_layers(total, stages, never) == expected
    measured = [StageConfig(group="a") for _ in shares]
    assert count_layers(total, measured, lambda number: shares[number]) == expected


@given(st.lists(st.floats(0.01, 100), min_size=1, max_size=6), st.integers(0, 80))
def test_all_layers_are_somewhere(shares: list[float], more: int) -> None:
    total = len(shares) + more
    counts = by_shares(total, shares)
    assert sum(counts) == total
    assert min(counts) >= 1
    # Within one of the exact share, but for those lifted to 1 and those that gave.
    lifted = sum(total * share / sum(shares) < 1 for share in shares)
    for count, share in zip(counts, shares, strict=True):
        exact = total * share / sum(shares)
        assert exact - 1 - lifted < count < max(exact + 1, 1.001)


def test_as_many_stages_as_layers_have_one_each() -> None:
    stages = [StageConfig(group="a", share=share) for share in (9.0, 1.0, 0.5)]
    assert count_layers(3, stages, never) == [1, 1, 1]


def test_what_does_not_add_up_is_refused() -> None:
    stages = [StageConfig(group="a", layers=2), StageConfig(group="b", layers=3)]
    with pytest.raises(JaxinferError, match="stages have 5 layers, the model has 6"):
        count_layers(6, stages, never)
    with pytest.raises(JaxinferError, match="there are 2 stages, the model has 1 layers"):
        count_layers(1, [StageConfig(group="a"), StageConfig(group="b")], never)
    mixed = [{"group": "a", "layers": 2}, {"group": "b", "share": 1.0}]
    with pytest.raises(JaxinferError, match="give layers for all of them, or shares, or nothing"):
        InstanceConfig.model_validate({"stages": mixed})
