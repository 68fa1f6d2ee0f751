"""Decodes advanced together give what rows of their own give, to the last bit."""

import pytest
from serving_checks import make_kv

from jaxinfer.serving.batch import Row
from jaxinfer.serving.features import decode_group
from jaxinfer.serving.features.decode_group import DecodeGroup
from jaxinfer.serving.request_state import RequestState
from jaxinfer.serving.system import MoveSlices
from jaxinfer.serving.views import Leg


def member(name: str, computed: int = 4, output: int = 1, prompt_len: int = 4) -> RequestState:
    """A request with nine output tokens at most, whose hold has two tokens a page."""
    request = RequestState(name, prompt_len, 9)
    request.legs = [Leg("A")]
    request.output_token_ids = [0] * output
    request.computed = request.launched = computed
    request.hold = make_kv(50, 2).reserve(computed)
    return request


def new_group() -> DecodeGroup:
    return DecodeGroup(2, lambda request: request.max_tokens)


@pytest.mark.parametrize(
    ("computed", "output", "pending", "takes"),
    [
        (4, 1, 0, True),
        (3, 0, 0, False),  # The prompt's last token is no decode.
        (4, 0, 1, True),  # Its first token is in flight.
        (4, 2, 0, False),  # Two to go: it was preempted.
        (11, 8, 0, True),  # The last token is to come.
        (11, 7, 1, True),
        (12, 9, 0, False),
        (12, 8, 1, False),
    ],
)
def test_who_only_has_to_decode(computed: int, output: int, pending: int, takes: bool) -> None:
    request = member("r", computed, output)
    request.pending = pending
    assert new_group().takes(request) == takes


def test_who_is_not_to_decode_to_the_end() -> None:
    ends, paused, moves = (member(name) for name in "abc")
    ends.legs = [Leg("A", 9), Leg("B")]
    paused.paused = True
    moves.slice_move = MoveSlices("c", ((0, 1, (0,)),))
    assert not any(new_group().takes(request) for request in (ends, paused, moves))


def step(group: DecodeGroup) -> tuple[int, int]:
    """A step; the instance may have been asked in vain before."""
    group.retire()
    group.retire()
    return group.launch(group.num_full())


def commit(group: DecodeGroup, end: float) -> tuple[list[RequestState], list[Row]]:
    """End a step: those that end with it leave."""
    ended = group.ending()
    for request in ended:
        group.leave(request)
    return ended, [row for _, row in group.commit(end)]


def row(request: RequestState, start: int) -> Row:
    assert request.hold
    return Row(request, start, 1, True, True, 0, request.hold)


def integers(request: RequestState) -> tuple[int, int, int, int]:
    return request.computed, request.launched, request.pending, len(request.output_token_ids)


def test_a_member_from_its_first_step_to_its_last() -> None:
    """r has three tokens to go, s one; of nine each."""
    group, r, s = new_group(), member("r", 9, 6), member("s", 11, 8)
    group.join(r, 0)
    group.join(s, 0)
    assert (r in group, member("t") in group) == (True, False)
    assert step(group) == (2, 10 + 12)
    assert step(group) == (1, 11)  # s has launched its last one.
    assert list(group.active) == ["r"]
    assert integers(r) == (9, 9, 0, 6)  # They stand still.
    group.settle()
    assert integers(r) == (9, 11, 2, 6)
    assert integers(s) == (11, 12, 1, 8)
    assert commit(group, 1.5) == ([s], [row(s, 11)])
    assert (s in group, integers(s), s.metrics.token_times) == (False, (11, 12, 1, 8), [])
    assert integers(r) == (9, 11, 2, 6)
    group.settle()
    assert (integers(r), r.metrics.token_times) == ((10, 11, 1, 7), [1.5])
    assert step(group) == (1, 12)
    assert commit(group, 2.5) == ([], [])
    assert commit(group, 3.5) == ([r], [row(r, 11)])
    assert (integers(r), r.metrics.token_times) == ((11, 12, 1, 8), [1.5, 2.5])
    group.retire()
    assert not group.active
    assert not group._ends


def test_pages_are_taken_where_a_member_needs_one() -> None:
    """Two tokens a page: with 4 and 6 entries now, with 5 in the next step."""
    group = new_group()
    requests = [member("r", 4, 1), member("s", 5, 2), member("t", 6, 3)]
    for request in requests:
        group.join(request, 0)
    for pages in ([3, 3, 4], [3, 4, 4], [4, 4, 5]):
        group.retire()
        before = sum(r.hold.num_pages for r in requests if r.hold)
        full = group.num_full()
        assert group.launch(full)[0] == 3
        assert [r.hold.num_pages for r in requests if r.hold] == pages
        assert full == sum(pages) - before


def test_a_page_of_one_token_is_taken_in_each_step() -> None:
    group, r = DecodeGroup(1, lambda request: request.max_tokens), member("r")
    r.hold = make_kv(50, 1).reserve(4)
    assert r.hold
    group.join(r, 0)
    for entries in (5, 6, 7):
        assert group.num_full() == 1
        group.launch(1)
        assert r.hold.num_pages == entries


def test_pages_of_three_tokens_are_taken_as_they_fill() -> None:
    """The second one joins two steps later."""
    group, r, s = DecodeGroup(3, lambda request: request.max_tokens), member("r"), member("s", 5, 2)
    r.hold, s.hold = make_kv(50, 3).reserve(4), make_kv(50, 3).reserve(5)
    assert r.hold
    assert s.hold
    group.join(r, 0)
    pages = []
    for number in range(6):
        if number == 2:
            group.join(s, 0)
        group.launch(group.num_full())
        pages.append((r.hold.num_pages, s.hold.num_pages))
    # With 5, 6, 7, ... and, from the third step on, 6, 7, ... entries.
    assert pages == [(2, 2), (2, 2), (3, 2), (3, 3), (3, 3), (4, 3)]


def test_who_joined_and_left_has_no_rows_of_earlier_steps() -> None:
    group, r, s = new_group(), member("r"), member("s", 6, 3)
    group.join(r, 0)
    step(group)
    group.join(s, 0)
    step(group)
    group.leave(s)
    assert commit(group, 1.0) == ([], [])
    ended, rows = commit(group, 2.0)
    assert (ended, [(row.request.id, row.start) for row in rows]) == ([], [("s", 6)])


def test_entries_are_counted_from_the_first_step_that_has_ended() -> None:
    """Entries are the member's own until then: r's prompt is on its way."""
    group, r, s = new_group(), member("r", 4, 0), member("s", 6, 3)
    r.computed, r.pending = 0, 1
    group.join(r, 0)
    step(group)
    assert (group.begun(), list(group.fresh)) == (0, [r.id])
    r.computed, r.pending, r.output_token_ids = 4, 0, [0]
    assert commit(group, 1.0) == ([], [])
    group.join(s, 0)
    assert (group.begun(), list(group.fresh)) == (5, [s.id])
    step(group)
    commit(group, 2.0)
    assert (group.begun(), group.fresh) == (6 + 7, {})
    group.leave(r)
    assert group.begun() == 7
    step(group)
    commit(group, 3.0)
    assert group.begun() == 8


def test_the_longest_but_some() -> None:
    """A member left out once stays out, and is there again after it has left and joined."""
    group, r, s = new_group(), member("r", 4, 3), member("s", 6, 3)
    for number, each in enumerate((r, s)):
        group.join(each, number)
    step(group)
    commit(group, 1.0)
    assert group.longest(2) == [(7, 1, "s"), (5, 0, "r")]
    assert group.longest(1, {"s"}) == [(5, 0, "r")]
    assert group.longest(2, {"r", "s"}) == []
    group.leave(r)
    group.join(r, 0)
    step(group)
    commit(group, 2.0)
    assert group.longest(2) == [(6, 0, "r")]


def test_of_equally_long_ones_the_first_admitted_comes_first() -> None:
    """In whatever order they have joined."""
    group = new_group()
    for name, number in (("c", 2), ("a", 0), ("b", 1)):
        group.join(member(name), number)
    step(group)
    commit(group, 1.0)
    assert group.longest(2) == [(5, 0, "a"), (5, 1, "b")]


def test_who_leaves_has_rows_of_the_steps_in_flight() -> None:
    group, r, s = new_group(), member("r"), member("s", 6, 3)
    group.join(r, 1)
    step(group)
    group.join(s, 0)
    assert [step(group), step(group)] == [(2, 6 + 7), (2, 7 + 8)]
    assert commit(group, 1.0) == ([], [])
    group.leave(r)
    group.leave(s)
    assert (integers(r), integers(s)) == ((5, 7, 2, 2), (6, 8, 2, 3))
    assert (group.active, r in group) == ({}, False)
    for end, starts in ((2.0, (5, 6)), (3.0, (6, 7))):
        ended, rows = commit(group, end)
        assert not ended
        assert rows == [row(s, starts[1]), row(r, starts[0])]  # s was admitted first.
    assert not group._left
    assert [request.hold.users for request in (r, s) if request.hold] == [2, 2]
    assert (group._times, r.metrics.token_times) == ([1.0, 2.0, 3.0], [1.0])
    assert step(group) == (0, 0)


def test_members_take_their_times_before_these_are_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(decode_group, "_TIMES_KEPT", 3)
    group, r, s = new_group(), member("r"), member("s", 6, 3)
    group.join(r, 0)
    for number in range(8):
        if number == 2:
            group.join(s, 0)
        step(group)
        step(group) if number == 0 else None  # One is always in flight besides.
        ended, _ = commit(group, float(number))
        assert len(group._times) == (number + 1) % 3
        assert ended == ([r] if number == 7 else [])
    group.settle()
    assert r.metrics.token_times == [float(i) for i in range(7)]
    assert s.metrics.token_times == [float(i) for i in range(3, 8)]


def test_a_member_that_ends_before_its_limit() -> None:
    """r ends with its eighth of nine tokens, of which six are there; steps are launched ahead."""
    group, r = DecodeGroup(2, lambda request: 8), member("r", 9, 6)
    group.join(r, 0)
    assert [step(group) for _ in range(5)] == [(1, 10), (1, 11), (1, 12), (0, 0), (0, 0)]
    assert commit(group, 1.0) == ([], [])
    assert commit(group, 2.0) == ([r], [row(r, 10)])
    assert (integers(r), r.metrics.token_times) == ((10, 12, 2, 7), [1.0])
    assert (r in group, group._ends, group._last_launches) == (False, {}, {})
    assert r.hold
    # The third was in vain, but its pages are in use until it ends, as they are in the second.
    assert r.hold.users == 2
    assert commit(group, 3.0) == ([], [row(r, 11)])
    assert commit(group, 4.0) == ([], [])


def test_who_has_its_last_token_on_the_way_stays_out() -> None:
    group = DecodeGroup(2, lambda request: 8)
    for output, pending, takes in ((6, 1, True), (7, 1, False), (6, 2, False), (7, 0, True)):
        request = member("r", 3 + output + pending, output)
        request.pending = pending
        assert group.takes(request) == takes
