"""Buckets of steps: which there are, and that the smallest one that holds a step is taken."""

from itertools import product

import pytest

from jaxinfer.steps.shapes import StepLimits, StepShape


def limits(seqs: int, tokens: int, given: tuple[int, ...] | None = None) -> StepLimits:
    return StepLimits(seqs, tokens, max_pages=8, page_size=16, given_buckets=given)


def test_ladders_go_down_by_quarters() -> None:
    assert limits(64, 512).row_buckets == [4, 16, 64]
    assert limits(64, 2048).token_buckets == [128, 512, 2048]
    assert limits(64, 16).row_buckets == [4, 16]
    assert limits(3, 63).row_buckets == [3]
    assert limits(3, 63).token_buckets == [63]
    assert limits(64, 512, (96, 512)).token_buckets == [96, 512]
    assert (limits(64, 512).max_chunks, limits(64, 100).max_chunks) == (64, 50)


def test_shapes_are_the_largest_first() -> None:
    assert limits(16, 128, (8, 24, 128)).shapes() == [
        StepShape(16, 128, 16), StepShape(16, 24, 16), StepShape(16, 16, 0), StepShape(4, 4, 0),
    ]  # fmt: skip


@pytest.mark.parametrize(
    "given", [limits(16, 128), limits(16, 128, (8, 24, 128)), limits(1, 64), limits(64, 64)]
)
def test_the_smallest_shape_that_holds_a_step_is_taken(given: StepLimits) -> None:
    """Against a search: of decodes alone the rows, with prefill the tokens count."""
    shapes = given.shapes()
    most = min(given.max_num_seqs, given.max_num_batched_tokens)
    for singles, more in product(range(most + 1), range(given.max_num_batched_tokens + 1)):
        tokens = singles + more
        if not tokens or tokens > given.max_num_batched_tokens or more == 1:
            continue
        for samples in {0, singles, most}:
            # Rows of one token that do not sample, a prompt's, are rows all the same.
            rows = max(singles, samples)
            holds = [
                shape
                for shape in shapes
                if shape.rows >= rows
                and shape.tokens >= tokens
                and bool(shape.chunks) == bool(more)
            ]
            best = min(holds, key=lambda shape: (shape.tokens, shape.rows))
            assert given.smallest(singles, tokens, samples) == best
