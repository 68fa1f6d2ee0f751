"""The time of a group that several stages share: by hand, and against cells of a second."""

from hypothesis import given
from hypothesis import strategies as st

from jaxinfer.simulate.shared_device import SharedDevice


def test_free_time_is_taken_wherever_it_lies() -> None:
    """Two seconds from 0 and from 4; five from 1 are 2 to 4 and 6 to 9; a second from 9."""
    turns = SharedDevice()
    assert turns.take(0, 2, 0) == 2
    assert turns.take(4, 2, 0) == 6
    assert turns.take(1, 5, 0) == 9
    assert turns.take(0, 1, 0) == 10
    assert turns.take(0, 0, 0) == 0
    assert turns.take(20, 0.5, 20) == 20.5


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 20), st.integers(0, 9)), max_size=40))
def test_no_second_is_given_twice(asked: list[tuple[int, int, int]]) -> None:
    turns, taken, now = SharedDevice(), set[int](), 0
    for passed, after, seconds in asked:
        now += passed
        start = cell = now + after
        left = seconds
        while left:
            if cell not in taken:
                taken.add(cell)
                left -= 1
            cell += 1
        assert turns.take(start, seconds, now) == cell
