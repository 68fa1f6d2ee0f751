"""Fits of a step's time, and times of steps from points, by hand."""

import pytest

from jaxinfer.serving.batch import Work
from jaxinfer.steps.shapes import StepLimits, StepShape
from jaxinfer.steps.times import StepPoint, StepTimes, features, shape_of, work_of_parts

# Decodes in fours and sixteens, chunks up to 64 and 256 tokens.
LIMITS = StepLimits(max_num_seqs=16, max_num_batched_tokens=256, max_pages=64, page_size=8)
PARTS = [(9, 1), (0, 1), (5, 3), (0, 20)]


def test_the_work_of_parts() -> None:
    """Parts of one token sample, and see their own entry; chunks do not sample."""
    assert work_of_parts(iter(PARTS)) == Work(25, 2, 4, 2, 11, [(5, 3), (0, 20)], 2)
    assert work_of_parts([]) == Work(0, 0, 0, 0, 0, [], 0)
    # A chunk's tokens see 6, 7, 8 entries, and 1 to 20.
    assert features(iter(PARTS)) == (1.0, 6 + 7 + 8 + 210, 11)


def test_a_step_takes_all_its_stages() -> None:
    assert StepPoint(((0, 1),), (0.5, 0.25, 0.125)).seconds == 0.875


@pytest.mark.parametrize(
    ("parts", "shape"),
    [
        ([(9, 1)] * 4, (4, 4, 0)),
        ([(9, 1)] * 5, (16, 16, 0)),
        ([(9, 1), (0, 60)], (16, 64, 16)),
        ([(9, 1), (0, 64)], (16, 256, 16)),
    ],
)
def test_the_shape_of_parts(parts: list[tuple[int, int]], shape: tuple[int, int, int]) -> None:
    assert shape_of(LIMITS, parts) == shape


def test_seconds_by_hand() -> None:
    """Shapes have a constant and coefficients per pair and per entry that decodes see."""
    times = StepTimes(
        LIMITS,
        {
            StepShape(4, 4, 0): (1.0, 0.0, 0.5),
            StepShape(16, 64, 16): (10.0, 0.25, 0.125),
            StepShape(16, 16, 0): (3.0, 0.0, 0.0),
        },
    )
    assert times.seconds(Work(2, 2, 2, 2, 30, [])) == 1 + 15
    assert times.seconds(Work(25, 2, 4, 2, 11, [(5, 3), (0, 20)])) == 10 + 231 / 4 + 11 / 8
    # Five rows sample, of which two are of one token: more than the four of the smallest shape.
    assert times.seconds(Work(3, 3, 3, 5, 30, [])) == 3


def test_each_stage_is_fitted_by_its_own_times() -> None:
    """Lines through two points each: 2 + 0.5 per entry, and 1 + 0.25 per entry."""
    points = [StepPoint(((n, 1),), (2 + (n + 1) / 2, 1 + (n + 1) / 4)) for n in (9, 29)]
    wide = [StepPoint(((n, 1),) * 5, (7.0, 8.0)) for n in (9, 29)]
    for stage, line in enumerate([(2.0, 0.5), (1.0, 0.25)]):
        times = StepTimes.fit(LIMITS, points + wide, stage)
        assert set(times.coefficients) == {(4, 4, 0), (16, 16, 0)}
        constant, per_pair, per_entry = times.coefficients[StepShape(4, 4, 0)]
        assert (constant, per_entry) == pytest.approx(line)
        assert per_pair == pytest.approx(0)
        assert times.seconds(Work(1, 1, 1, 1, 20, [])) == pytest.approx(line[0] + 20 * line[1])
        assert times.seconds(Work(5, 5, 5, 5, 99, [])) == pytest.approx(7 + stage)
