"""Single steps of named policies, by hand."""

from typing import Any

import pytest
from policy_cases import Instant


def test_prefill_first_by_hand() -> None:
    run = Instant(batching={"name": "prefill_first", "prefill_tokens": 10})
    run.add((4, 3), (6, 3), (3, 2))
    assert run.step() == {"r0": 4, "r1": 6}
    assert run.step() == {"r2": 3}
    assert run.step() == {"r0": 1, "r1": 1, "r2": 1}
    run.add((25, 1))
    assert run.step() == {"r3": 25}  # Longer than the limit: alone.
    assert run.step() == {"r0": 1, "r1": 1}


def test_a_prompt_above_the_budget_is_cut_by_it_and_decodes_wait() -> None:
    run = Instant(batching="prefill_first", max_num_batched_tokens=10)
    run.add((2, 4))
    assert run.step() == {"r0": 2}
    run.add((25, 1), (3, 1))
    assert [run.step() for _ in range(5)] == [
        {"r1": 10},
        {"r1": 10},
        {"r1": 5, "r2": 3},
        {"r0": 1},
        {"r0": 1},
    ]


def test_whole_prompts_by_hand() -> None:
    run = Instant(batching={"name": "whole_prompts", "step_tokens": 10, "max_skips": 2})
    run.add((4, 9), (5, 9), (6, 9))
    assert run.step() == {"r0": 4, "r1": 5}  # The third would be the sixteenth token.
    assert run.step() == {"r2": 6, "r0": 1, "r1": 1}
    run.add((9, 9), (20, 9))
    assert run.step() == {"r3": 9, "r0": 1}
    assert run.step() == {"r4": 20}  # Longer than the limit: alone.
    # Two were left out twice: they go before all others.
    run.add((9, 9))
    assert run.step() == {"r1": 1, "r2": 1, "r0": 1, "r3": 1, "r4": 1}
    assert run.step() == {"r5": 9, "r0": 1}


@pytest.mark.parametrize(
    ("batching", "wanted"), [("mixed", [5, 0, 0]), ("even_decodes", [2, 2, 1])]
)
def test_decodes_of_a_pipeline_by_hand(batching: str, wanted: list[int]) -> None:
    """Three steps in flight, five decodes that are all ready when the first one is formed."""
    run = Instant(batching=batching, max_in_flight=3, launch_ahead=False, max_num_batched_tokens=50)
    run.add(*[(4, 9)] * 5)
    assert run.step() == dict.fromkeys(("r0", "r1", "r2", "r3", "r4"), 4)
    batches = [run.instance.next_batch() for _ in range(3)]
    assert [len(batch.rows) if batch else 0 for batch in batches] == wanted
    rows = [row.request.id for batch in batches if batch for row in batch.rows]
    assert rows == ["r0", "r1", "r2", "r3", "r4"]  # By admission, each once.


def test_one_batch_by_hand() -> None:
    run = Instant(batching="one_batch")
    run.add((3, 1), (4, 3))
    assert run.step() == {"r0": 3, "r1": 4}
    run.add((2, 1))
    assert [run.step() for _ in range(4)] == [{"r1": 1}, {"r1": 1}, {"r2": 2}, {}]


@pytest.mark.parametrize(
    ("order", "wanted"),
    [
        ("fcfs", ["r0", "r1", "r2", "r3"]),
        ("shortest_prompt_first", ["r1", "r3", "r0", "r2"]),
        ("longest_prompt_first", ["r2", "r0", "r1", "r3"]),
    ],
)
def test_orders(order: str, wanted: list[str]) -> None:
    run = Instant(order=order)
    run.add((4, 2), (3, 2), (5, 2), (3, 2))
    assert list(run.step()) == wanted


ROOM: list[tuple[str | dict[str, Any], tuple[int, int] | None, int]] = [
    # 20 entries; each request has 4 of its prompt, and 9 at its end; two are predicted 3 to 5.
    ("greedy", None, 5),
    ("whole_request", (3, 5), 2),
    ({"name": "reserve_longest", "tokens": 7}, None, 2),
    ({"name": "reserve_longest", "tokens": 50}, None, 1),
    ("reserve_static", None, 2),
    ("reserve_static", (3, 5), 2),
    ({"name": "reserve_static", "bound": "low"}, (3, 5), 3),
    # All end at once: when the shortest has ended, all have.
    ("reserve_dynamic", None, 2),
    ({"name": "reserve_dynamic", "bound": "low"}, (3, 5), 3),
    ("peak", (3, 5), 2),
    ({"name": "peak", "bound": "low"}, (3, 5), 3),
]


@pytest.mark.parametrize(("admit", "predicted", "wanted"), ROOM)
def test_admissions_at_once(admit: Any, predicted: tuple[int, int] | None, wanted: int) -> None:
    """Ends: 4 + 6 - 1 = 9 by the limit, 8 by the upper and 6 by the lower end of 3 to 5."""
    run = Instant(pages=20, admit=admit)
    run.add(*[(4, 6)] * 6, predicted=predicted)
    assert len(run.step()) == wanted


def test_dynamic_waits_for_the_next_end_only_and_peak_for_all() -> None:
    """20 entries. One request of 3 that grows to 12, one of 3 to 4: a third one of 6 to 14 has room
    until the second has ended (4 + 4 + 7 = 15), not to its end (12 + 14 = 26).
    """
    for admit, wanted in (("reserve_dynamic", 3), ("peak", 2), ("reserve_static", 2)):
        run = Instant(pages=20, admit=admit)
        run.add((3, 10), (3, 2), (6, 9))
        assert len(run.step()) == wanted, admit


def test_peak_has_requests_follow_each_other() -> None:
    """16 entries. 8 that grow to 9, beside 2 that grow to 12: the sum of the ends is 21, but when
    the first has 9, the second has 3; alone it has 12.
    """
    for admit, wanted in (("reserve_static", 1), ("peak", 2)):
        run = Instant(pages=16, admit=admit)
        run.add((8, 2), (2, 11))
        assert len(run.step()) == wanted, admit


def test_pages_count_whole() -> None:
    """Ends of 5 entries in pages of 4 take two each: four fit into eight pages, not five."""
    run = Instant(pages=8, size=4, admit="reserve_static")
    run.add(*[(4, 2)] * 6)
    assert len(run.step()) == 4
