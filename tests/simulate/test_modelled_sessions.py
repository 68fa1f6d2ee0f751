"""Sessions in virtual time: when turns come, and what the cache spares them, by closed forms."""

from collections.abc import Sequence
from typing import Any

import pytest

from jaxinfer import JaxinferError
from jaxinfer.config.run_file import RunFile, as_run_file
from jaxinfer.lab.plan.prefixes import best_hits
from jaxinfer.serving.request_state import RequestState
from jaxinfer.simulate.run import simulate


def config(synthetic: dict[str, Any], **more: Any) -> RunFile:
    return as_run_file(
        {
            "model": "llama-3-8b",
            "engine": {"page_size": 16, "max_model_len": 4096, "num_pages": 3000},
            "groups": {"g": {"kind": "A10"}},
            "instances": {"a": {"group": "g"}},
            "simulate": {"linear": {"step_s": 0.25}},
            "workload": {
                "synthetic": {"input_len": 50, "output_len": 9, **synthetic},
                "arrivals": {"kind": "interval", "seconds": 100.0},
            },
        }
        | more
    )


def served(given: RunFile) -> dict[int, tuple[float, float, int, int]]:
    """Arrival, end, prompt tokens and cached tokens of each request."""
    found = {}

    def note(request: RequestState, times: Sequence[float]) -> None:
        cached = request.metrics.num_cached_tokens or 0
        found[int(request.id)] = request.arrival, times[-1], request.prompt_len, cached

    simulate(given, given.requests(), on_request=note)
    return found


def test_a_turn_comes_after_the_turn_before() -> None:
    found = served(config({"count": 7, "sessions": {"turns": 3, "think_s": 1.5}}))
    assert sorted(found) == list(range(7))
    for index, (arrival, _, prompt_len, _) in found.items():
        turn = index % 3
        assert prompt_len == 50 + turn * 59
        expected = found[index - 1][1] + 1.5 if turn else index // 3 * 100.0
        assert arrival == expected


@pytest.mark.parametrize("shared", [0, 40])
def test_what_the_cache_spares(shared: int) -> None:
    """All full pages that exist: an answer's last token has no KV entry.

    The first tokens of a session that comes later are cached by the earlier one.
    """
    sessions = {"turns": 4, "think_s": 1.0}
    prefixes = {"tokens": shared} if shared else None
    given = config({"count": 8, "sessions": sessions, "prefixes": prefixes})
    found = served(given)
    work, best = given.requests(), best_hits(given.requests())
    for index, (_, _, prompt_len, cached) in found.items():
        turn = index % 4
        entries = shared + turn * 59 - 1 if turn else (shared if index else 0)
        assert cached == entries // 16 * 16
        assert cached <= best[index] <= prompt_len - 1
        assert work[index].prompt_len == prompt_len


def test_two_sessions_share_nothing_else() -> None:
    found = served(config({"count": 2, "sessions": {"turns": 1}}))
    assert [cached for *_, cached in found.values()] == [0, 0]


@pytest.mark.parametrize(
    ("workload", "message"),
    [
        (
            {"arrivals": {"kind": "closed", "concurrency": 2}},
            "workload.arrivals.kind is closed, must be another with sessions",
        ),
        ({"only": "LPLD"}, "sessions: with workload.only, turns would be missing"),
    ],
)
def test_what_sessions_do_not_go_with(workload: dict[str, Any], message: str) -> None:
    given = config({"sessions": {"turns": 2}})
    workload = given.model_dump(exclude_unset=True)["workload"] | workload
    with pytest.raises(JaxinferError, match=message):
        as_run_file({"workload": workload}).requests()
