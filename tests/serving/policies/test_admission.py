"""Rules of admission, each asked directly, and entries counted by hand."""

from collections.abc import Sequence
from typing import Any

import pytest
from serving_checks import make_kv, new_instance

from jaxinfer.serving.admission import Bound, predicted_end
from jaxinfer.serving.policies import PolicyOptions, make_policies
from jaxinfer.serving.request_state import RequestState
from jaxinfer.serving.views import Leg


def request(
    prompt_len: int,
    max_tokens: int,
    legs: Sequence[Leg] = (Leg("A"),),
    output: int = 0,
    predicted: tuple[int, int] | None = None,
) -> RequestState:
    made = RequestState("x", prompt_len, max_tokens)
    made.legs = list(legs)
    made.output_token_ids = [0] * output
    made.predicted = predicted
    return made


def has_room(
    admit: Any,
    pages: int,
    new: RequestState,
    running: Sequence[RequestState] = (),
    importing: Sequence[RequestState] = (),
    size: int = 1,
) -> bool:
    instance = new_instance("A", make_kv(pages, size))
    for number, other in enumerate([*running, *importing]):
        other.id = f"r{number}"
    for other in running:
        instance.taking_part.add(other)
    instance.importing |= {other.id: other for other in importing}
    policy = make_policies(PolicyOptions(admit=admit)).admit
    return policy(instance, new, new.legs[0])


@pytest.mark.parametrize("admit", ["whole_request", "reserve_static"])
@pytest.mark.parametrize("place", ["running", "importing"])
@pytest.mark.parametrize(
    ("legs", "end"),
    [
        ((Leg("A"),), 13),
        ((Leg("A", 4), Leg("B")), 4),  # Its growth is elsewhere.
        ((Leg("A", 50), Leg("B")), 13),  # It ends before its leg.
    ],
)
def test_the_others_count_to_the_end_of_their_leg(
    admit: str, place: str, legs: Sequence[Leg], end: int
) -> None:
    """4 prompt and 10 output tokens are 13 entries, beside 4 + 3 - 1 = 6 of the new one."""
    for pages, fits in ((end + 6, True), (end + 5, False)):
        others: dict[str, Any] = {place: [request(4, 10, legs)]}
        assert has_room(admit, pages, request(4, 3), **others) == fits


@pytest.mark.parametrize("admit", ["reserve_static", "reserve_dynamic", "peak"])
def test_who_has_outgrown_its_prediction_counts_with_what_it_has(admit: str) -> None:
    """4 + 6 entries, where 4 + 3 - 1 were predicted; the new one has its prompt's 4."""
    for pages, fits in ((14, True), (13, False)):
        other = request(4, 9, output=6, predicted=(2, 3))
        assert has_room(admit, pages, request(4, 1), [other]) == fits


def test_peak_counts_pages_that_are_not_full() -> None:
    """Two of 5 entries have two pages of 4 each, and grow no more."""
    for pages, fits in ((4, True), (3, False)):
        assert has_room("peak", pages, request(5, 1), [request(5, 1)], size=4) == fits


@pytest.mark.parametrize("admit", ["peak", {"name": "reserve_longest", "tokens": 99}])
def test_one_alone_may_have_all_pages(admit: Any) -> None:
    assert has_room(admit, 2, request(5, 4), size=4)
    assert not has_room(admit, 2, request(5, 4), [request(1, 1)], size=4)


@pytest.mark.parametrize(
    ("predicted", "bound", "until", "end"),
    [
        ((2, 5), "low", None, 5),  # The last token needs no entry.
        ((2, 5), "high", None, 8),
        ((0, 0), "high", None, 4),  # A token comes in any case.
        ((20, 30), "low", None, 9),  # Six at most, whatever is predicted.
        ((2, 5), "high", 7, 7),
        ((2, 5), "high", 50, 8),
        (None, "high", None, 9),
        (None, "low", 6, 6),
    ],
)
def test_where_a_leg_is_predicted_to_end(
    predicted: tuple[int, int] | None, bound: Bound, until: int | None, end: int
) -> None:
    assert predicted_end(request(4, 6, predicted=predicted), Leg("A", until), bound) == end
