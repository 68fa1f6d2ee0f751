"""The closed form of the best ratio, from measured times, by hand."""

import pytest

from scripts.validate.ffn_ratio import REQUESTS, LoggedGroup, Measured, closed_form


def measured(attention: float, alpha: float, beta: float) -> list[Measured]:
    return [
        Measured(ratio, attention, alpha * REQUESTS * ratio + beta, 0.0, 0.0) for ratio in (1, 2, 5)
    ]


@pytest.mark.parametrize(
    ("attention", "alpha", "beta", "expected", "limit"),
    [
        (0.5, 0.02, 0.1, 0.4 / 0.08, "attention"),
        (0.5, 0.02, 0.0, 0.5 / 0.08, "attention"),
        # Weights take so long that the FFN is always slower than attention.
        (0.2, 0.01, 0.36, 3.0, "peak"),
    ],
)
def test_the_larger_limit_counts(
    attention: float, alpha: float, beta: float, expected: float, limit: str
) -> None:
    ratio, regime = closed_form(measured(attention, alpha, beta))
    assert ratio == pytest.approx(expected, rel=1e-9)
    assert regime == limit


def test_pieces_are_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [10.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    monkeypatch.setattr("time.sleep", lambda seconds: now.__setitem__(0, now[0] + seconds))
    group = LoggedGroup()
    assert group.end_of(10, 2) == 12
    now[0] = 15.0
    assert group.end_of(12, 1) == 15
    assert (group.seconds, group.num_late) == ([2, 3], 1)
