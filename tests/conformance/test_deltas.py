"""Deltas: hand-offs that leave out pages which the destination has, and their faults by name."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from jaxinfer.lab.conformance import Finding, GoldenModel, hand_over
from jaxinfer.lab.conformance.mover import Mover
from scripts.validate.faults.scenario import PAIRS, cached_of, scenario

sys.path.append(str(Path(__file__).parents[2] / "examples"))
from conformance_numpy import NumpyEngine

LENGTHS, CACHED, SOURCE_PAGE, PAGE = (75, 50), (48, 24), 16, 24
# Token of a request -> what is copied to its place, if anything.
Copies = Callable[[int, int], int | None]


def handed(copies: Copies, before: Callable[[NumpyEngine], None] | None = None) -> list[Finding]:
    """Findings of a hand-off that copies each token after the cached ones, as ``copies`` says."""
    source, dest = NumpyEngine(SOURCE_PAGE, 16), NumpyEngine(PAGE, 12)

    def transfer(request: int, length: int) -> None:
        if before and request == 0:
            before(dest)
        for token in range(CACHED[request], length):
            wanted = copies(request, token)
            if wanted is not None:
                (a, i), (b, j) = divmod(wanted, SOURCE_PAGE), divmod(token, PAGE)
                for ours, theirs in zip(source.kv, dest.kv, strict=True):
                    for part in (0, 1):
                        entry = ours[part][source.tables[request][a], i]
                        theirs[part][dest.tables[request][b], j] = entry

    return hand_over(GoldenModel(), source, dest, transfer, LENGTHS, cached=CACHED)


def test_a_delta_is_well() -> None:
    assert handed(lambda request, token: token) == []


def test_a_delta_that_begins_a_page_late() -> None:
    (found,) = handed(lambda request, token: None if request == 0 and token < 72 else token)
    assert str(found) == (
        "delta begins late: request 0, layer 0, keys, token 48, head 0 holds what the "
        "destination's page held before (768 blocks)"
    )
    assert found.blocks == 24 * 4 * 2 * 4  # Tokens, layers, keys and values, heads.


def test_a_delta_that_never_comes_has_another_name() -> None:
    found = handed(lambda request, token: None if request == 0 else token)
    assert {each.name for each in found}.isdisjoint({"delta begins late", "stale base"})


def test_a_base_that_goes_on_the_way() -> None:
    def evict(dest: NumpyEngine) -> None:
        for pair in dest.kv:
            for part in (0, 1):
                pair[part][dest.tables[0][1]] = pair[part][dest.tables[1][0]]

    (found,) = handed(lambda request, token: token, evict)
    assert (found.name, found.request, found.blocks) == ("base evicted", 0, 768)
    assert found.text == (
        "request 0, layer 0, keys, token 24, head 0 was right before the hand-off, and holds "
        "entries of request 1 now"
    )


def test_entries_at_another_place_keep_their_name() -> None:
    found = handed(lambda request, token: token - 1)
    assert found[0].name == "page offset off by one"


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: f"{pair[0]} to {pair[1]}")
def test_no_alarm_where_a_delta_is_well(pair: tuple) -> None:  # type: ignore[type-arg]
    source, dest, model = pair
    case = scenario(source, dest, model, cached_of(dest.page_size))
    assert case.run(Mover(case.source, case.dest, case.cached)) == []


@pytest.mark.parametrize(
    ("cached", "message"),
    [
        ((24,), "cached has 1 requests, lengths has 2"),
        ((75, 0), r"hand_over: cached\[0\] is 75, must be below the length, 75"),
        ((-1, 0), r"hand_over: cached\[0\] is -1, must be an integer from 0 on"),
    ],
)
def test_refusals(cached: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=rf"^{message}$"):
        hand_over(
            GoldenModel(), NumpyEngine(16, 16), NumpyEngine(24, 12), None, LENGTHS,  # type: ignore[arg-type]
            cached=cached,
        )  # fmt: skip
