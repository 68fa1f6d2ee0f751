"""A request's integers: what is known, what a leg may still launch, and what is forgotten."""

import pytest
from serving_checks import make_kv

from jaxinfer.serving.kv_shards import HeldPages
from jaxinfer.serving.request_state import RequestState
from jaxinfer.serving.views import Leg


def request(output: int = 0, pending: int = 0, *legs: Leg) -> RequestState:
    """A prompt of six tokens, 10 to 15, and at most four others, 20 to 23."""
    found = RequestState("x", 6, 4, 2.5, range(10, 16), payload="given")
    found.output_token_ids = [20 + i for i in range(output)]
    found.pending = pending
    found.legs = list(legs) or [Leg("A")]
    return found


def test_a_new_request() -> None:
    new = request()
    assert (new.id, new.prompt_len, new.max_tokens, new.arrival, new.payload) == (
        "x",
        6,
        4,
        2.5,
        "given",
    )
    assert (new.peak_tokens, new.num_known, new.metrics.arrival) == (9, 6, 2.5)
    assert (new.goes_first, new.takes_cached, new.paused) == (False, True, False)
    assert (new.computed, new.launched, new.sent, new.transfers, new.epoch) == (0, 0, 0, 0, 0)
    assert (new.cumulative_logprob, new.details, new.slices, new.finish_reason) == (0, [], [], None)
    assert RequestState("y", 1, 1).arrival == 0


@pytest.mark.parametrize(("prompt_len", "max_tokens"), [(0, 1), (1, 0), (-1, 5)])
def test_a_request_has_a_prompt_and_an_output(prompt_len: int, max_tokens: int) -> None:
    with pytest.raises(ValueError, match="'x'"):
        RequestState("x", prompt_len, max_tokens)


@pytest.mark.parametrize(
    ("start", "stop", "tokens"),
    [
        (0, 3, [10, 11, 12]),
        (4, 6, [14, 15]),
        (4, 8, [14, 15, 20, 21]),
        (6, 8, [20, 21]),
        (7, 8, [21]),
        (0, 5, [10, 11, 12, 13, 14]),
    ],
)
def test_known_tokens(start: int, stop: int, tokens: list[int]) -> None:
    assert request(2).known_tokens(start, stop) == tokens
    assert request(2).num_known == 8


@pytest.mark.parametrize(
    ("output", "until", "known"),
    [(0, None, 6), (2, None, 8), (4, None, 9), (0, 4, 4), (0, 8, 6), (3, 8, 8), (4, 12, 9)],
)
def test_entries_of_the_tokens_known(output: int, until: int | None, known: int) -> None:
    """The last token of all needs none."""
    assert request(output).known_until(Leg("A", until)) == known


@pytest.mark.parametrize(
    ("output", "pending", "until", "goal"),
    [
        (0, 0, None, 6),
        (0, 1, None, 7),
        (2, 1, None, 9),
        (3, 1, None, 9),
        (0, 0, 4, 4),
        (0, 0, 6, 6),
        (1, 1, 7, 7),
        (0, 0, 9, 6),
    ],
)
def test_what_a_leg_may_launch(output: int, pending: int, until: int | None, goal: int) -> None:
    assert request(output, pending, Leg("A", until)).leg_goal == goal


@pytest.mark.parametrize(
    ("computed", "launched", "until", "over"),
    [(5, 6, 6, False), (6, 6, 6, True), (7, 7, 6, True), (6, 6, None, False)],
)
def test_a_leg_is_over_with_its_last_entry(
    computed: int, launched: int, until: int | None, over: bool
) -> None:
    found = request(0, 0, Leg("A", until))
    found.computed, found.launched = computed, launched
    assert found.leg_is_over == over


def test_slices_by_shard() -> None:
    found = request()
    found.hold = make_kv(4, 4, [(0, 1), (), (2,)]).reserve(4)
    assert found.slices == [[0, 1], [], [2]]


def reserved(found: RequestState) -> HeldPages:
    found.incoming = make_kv(9, 1).reserve(5)
    assert found.incoming
    return found.incoming


def test_voiding_forgets_all_entries_and_what_is_on_its_way() -> None:
    found = request(1, 1)
    found.computed, found.launched, found.sent, found.transfers = 6, 7, 4, 1
    hold = reserved(found)
    found.void_kv()
    assert (found.computed, found.launched, found.pending) == (0, 0, 0)
    assert (found.sent, found.transfers, found.epoch) == (0, 0, 1)
    assert (found.incoming, hold.released, found.num_known) == (None, True, 7)
    found.sent = 3
    found.void_kv()  # Without pages reserved ahead, too.
    assert (found.sent, found.epoch) == (0, 2)


def test_dropping_what_is_reserved_ahead() -> None:
    found = request()
    found.sent = found.computed = 4
    found.drop_incoming()
    assert found.sent == 4  # Nothing was reserved: it counts something else.
    hold = reserved(found)
    found.drop_incoming()
    assert (found.incoming, found.sent, found.computed, hold.released) == (None, 0, 4, True)


@pytest.mark.parametrize(
    "wrong",
    [
        {"computed": -1},
        {"computed": 3, "launched": 2},
        {"launched": 6},
        {"launched": 7},
        {"pending": -1},
        {"transfers": -1},
    ],
)
def test_integers_out_of_order_are_noticed(wrong: dict[str, int]) -> None:
    found = request()
    found.check()
    for name, value in wrong.items():
        setattr(found, name, value)
    with pytest.raises(AssertionError):
        found.check()


def test_a_token_in_flight_can_be_launched_upon() -> None:
    found = request(pending=1)
    found.launched = 6
    found.check()
    assert repr(found) == (
        "<x: computed 0 <= launched 6 < known 6 + pending 1, epoch 0, "
        "legs [Leg(instance='A', until=None, hand_off='on_demand')]>"
    )
