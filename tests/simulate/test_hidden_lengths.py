"""Requests that show their users' limit and end at their true length, which nobody sees."""

from collections.abc import Collection, Sequence
from typing import Any

import pytest

from jaxinfer import JaxinferError
from jaxinfer.config.run_file import RunFile, as_run_file
from jaxinfer.serving.request_state import RequestState
from jaxinfer.serving.system import Assignment, System
from jaxinfer.serving.views import ClusterView, Leg, RequestView
from jaxinfer.simulate.run import simulate
from jaxinfer.simulate.targets import Reference
from jaxinfer.workload.lengths import BenchRequest

ENGINE = {
    "page_size": 4,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 8,
    "num_pages": 41,
    "launch_ahead": False,
    "enable_prefix_caching": False,
    "max_model_len": 160,
}


def seconds(
    max_tokens: int | None = None, system: str = "single", model_len: int = 160, **engine: Any
) -> RunFile:
    """An instance whose steps take a second."""
    return as_run_file(
        {
            "model": "llama-3-8b",
            "engine": ENGINE | {"max_model_len": model_len} | engine,
            "groups": {"g": {"kind": "A10"}},
            "instances": {"a": {"group": "g"}},
            "system": system,
            "simulate": {"linear": {"step_s": 1.0}},
            "workload": {} if max_tokens is None else {"max_tokens": max_tokens},
        }
    )


def served(
    config: RunFile, lengths: Sequence[tuple[int, int]]
) -> dict[str, tuple[Sequence[float], int, int, Any]]:
    """Times, what the request showed as its limit and longest, and why it ended."""
    found = {}

    def note(request: RequestState, times: Sequence[float]) -> None:
        shown = request.max_tokens, request.peak_tokens, request.finish_reason
        found[request.id] = (times, *shown)

    simulate(config, [BenchRequest(None, p, n, 0.0) for p, n in lengths], None, note)
    return found


@pytest.mark.parametrize("grouped", [True, False])
def test_true_ends_and_shown_limits(grouped: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two prompts in the first step, a token each a second from then on; the second ends at 2."""
    if not grouped:
        monkeypatch.setattr(System, "needs_decode_rows", True)
    assert served(seconds(20), [(4, 3), (4, 2), (4, 20)]) == {
        "1": ([1, 2], 20, 23, "stop"),
        "0": ([1, 2, 3], 20, 23, "stop"),
        "2": ([float(t) for t in range(2, 22)], 20, 23, "length"),
    }


def test_without_launches_ahead_times_are_those_of_known_ends() -> None:
    lengths = [(3 + i % 7, 1 + 5 * i % 11) for i in range(30)]
    hidden, known = served(seconds(11), lengths), served(seconds(), lengths)
    assert {name: times for name, (times, *_) in hidden.items()} == {
        name: times for name, (times, *_) in known.items()
    }
    assert {limit for _, limit, *_ in hidden.values()} == {11}


def test_launched_ahead_a_step_may_be_in_vain() -> None:
    """The last decode is followed by one that nobody needed, in whose step the next prompt runs."""
    ahead = {"launch_ahead": True, "max_num_seqs": 1}
    known, hidden = (served(seconds(limit, **ahead), [(4, 3), (4, 1)]) for limit in (None, 9))
    assert known["0"][0] == hidden["0"][0] == [1, 2, 3]
    assert (known["1"][0], hidden["1"][0]) == ([4], [5])


def test_the_limit_ends_at_the_instances_longest() -> None:
    assert served(seconds(100, model_len=30), [(12, 3)])["0"][1:3] == (18, 29)


def test_admission_goes_by_the_limit() -> None:
    """40 pages of 4: room for one of 9 + 100 entries at its longest, or for all as they are."""
    policies = {"admit": "whole_request"}
    lengths = [(9, 3)] * 3
    known, hidden = (
        served(seconds(limit, policies=policies, max_num_batched_tokens=32), lengths)
        for limit in (None, 100)
    )
    assert [times[0] for times, *_ in known.values()] == [1, 1, 1]
    assert [times[0] for times, *_ in hidden.values()] == [1, 4, 7]


class Sees(System):
    """Notes all numbers that views of requests show."""

    seen: set[object]

    def route(self, waiting: Collection[RequestView], cluster: ClusterView) -> list[Assignment]:
        self._look(waiting)
        return [Assignment(r.id, (Leg("a"),)) for r in waiting]

    def on_finish(self, request: RequestView, cluster: ClusterView) -> None:
        for instance in cluster.instances.values():
            self._look(instance.running.values())

    def _look(self, requests: Collection[RequestView]) -> None:
        for request in requests:
            for name in RequestState.__slots__:
                if name != "metrics":
                    type(self).seen.add((name, str(getattr(request, name))))


def test_nothing_that_is_shown_tells_the_truth() -> None:
    """A request that has not begun shows the same whatever its true length is."""
    found = []
    for length in (5, 17, 20):
        Sees.seen = set()
        served(seconds(20, f"{__name__}:Sees"), [(4, length)])
        found.append(Sees.seen)
    assert found[0] == found[1] == found[2]
    assert ("max_tokens", "20") in found[0]


@pytest.mark.parametrize(
    ("limit", "lengths", "message"),
    [
        (
            9,
            [(4, 9), (4, 10)],
            "workload.max_tokens is 9, must be at least the output tokens of "
            "each request: request 1 has 10",
        ),
        (200, [(4, 157)], "request 0: 4 prompt and 157 output tokens, max_model_len is 160"),
    ],
)
def test_errors(limit: int, lengths: list[tuple[int, int]], message: str) -> None:
    with pytest.raises(JaxinferError) as caught:
        served(seconds(limit), lengths)
    assert str(caught.value) == message


def test_a_limit_that_no_pool_holds() -> None:
    with pytest.raises(JaxinferError, match=r"needs 12 pages of 4 tokens \(4 prompt \+ 44 output"):
        served(seconds(44, num_pages=12), [(4, 2)])


def test_slowdowns_are_by_true_lengths() -> None:
    slowdown = Reference({(4, 3): {"e2e": 2.0}}).slowdowns("e2e")
    assert slowdown(RequestState("r", 4, 50), [1.0, 2.0, 3.0]) == 1.5
