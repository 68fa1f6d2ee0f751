"""Routing by prefix caches and by sessions: by hand, and beside the least loaded instance."""

from types import SimpleNamespace
from typing import Any

import pytest

from jaxinfer.config.run_file import as_run_file
from jaxinfer.serving.step_fit import MixedFit, PrefillFit, StepFit
from jaxinfer.serving.views import ClusterView
from jaxinfer.simulate.run import simulate
from jaxinfer.systems.prefix_aware import PrefixAware, PrefixAwareOptions
from jaxinfer.systems.session_affinity import SessionAffinity


def view(left: int, entries: int, cached: int, step_s: float = 1.0) -> SimpleNamespace:
    """An instance that computes ten tokens a step."""
    return SimpleNamespace(
        prompt_tokens_left=left,
        kv_entries=entries,
        cached_tokens=lambda request: min(cached, request.prompt_len - 1),
        num_pages=1000,
        page_size=16,
        max_num_batched_tokens=10,
        fit=StepFit(PrefillFit(1.0, 0.0), MixedFit(0.0, 0.01, step_s)),
    )


def chosen(options: dict[str, Any], views: dict[str, Any], prompts: list[int]) -> str:
    system = PrefixAware(PrefixAwareOptions.model_validate(options))
    waiting = [
        SimpleNamespace(id=str(i), prompt_len=n, max_tokens=1) for i, n in enumerate(prompts)
    ]
    assignments = system.route(waiting, ClusterView(0.0, views))  # type: ignore[arg-type]
    assert [a.request for a in assignments] == [r.id for r in waiting]
    return "".join(a.legs[0].instance for a in assignments)


VIEWS = {"a": view(0, 0, 0), "b": view(60, 0, 80), "c": view(0, 50, 40)}


@pytest.mark.parametrize(
    ("weight", "expected"),
    [
        # Of a prompt of 100 tokens, a lacks 100, b 20, c 60.
        (0.0, "a"),  # Loads are 0, 60, 50.
        (0.5, "a"),  # 50, 70, 80.
        (1.0, "b"),  # 100, 80, 110.
        (9.0, "b"),
    ],
)
def test_cached_tokens_against_load(weight: float, expected: str) -> None:
    assert chosen({"weight": weight}, VIEWS, [100]) == expected


def test_what_was_given_in_the_same_call_counts() -> None:
    """Each time b gets the 20 tokens that it lacks: 80, 100, then a's 100 come first of equals."""
    assert chosen({}, VIEWS, [100] * 3) == "bab"


def test_seconds_prefer_a_faster_instance() -> None:
    """Ten tokens a second, and ten in 0.1 s: the faster one lacks 100 tokens, the other 20."""
    views = {"slow": view(0, 0, 80), "fast": view(0, 0, 0, step_s=0.1)}
    assert chosen({"load": "seconds"}, views, [100]) == "fast"
    assert chosen({"load": "tokens"}, views, [100]) == "slow"
    # 300 KV entries of decodes add 3 s to each of its ten steps.
    views["fast"] = view(0, 300, 0, step_s=0.1)
    assert chosen({"load": "seconds"}, views, [100]) == "slow"


def test_only_pools_that_hold_the_request() -> None:
    small = {"a": view(0, 0, 0), "b": view(500, 0, 0)}
    small["a"].num_pages = 6
    assert chosen({}, small, [97]) == "b"
    assert chosen({}, small, [96]) == "a"


def run(system: Any, **synthetic: Any) -> Any:
    lengths = {"input_len": {"kind": "uniform", "min": 5, "max": 400}, "output_len": 20}
    config = as_run_file(
        {
            "model": "llama-3-8b",
            "engine": {"max_model_len": 8192, "max_num_batched_tokens": 512},
            "groups": {"g": {"kind": "A100-80G-SXM", "replicas": 3}},
            "instances": {"i": {"group": "g", "replicas": 3}},
            "system": system,
            "workload": {
                "synthetic": {**lengths, "count": 90, **synthetic},
                "arrivals": {"kind": "poisson", "rate": 8},
            },
        }
    )
    times = []
    metrics = simulate(config, config.requests(), on_request=lambda r, t: times.append((r.id, t)))
    return metrics, sorted(times)


def test_without_shared_prefixes_it_is_least_loaded_by_tokens() -> None:
    ours, expected = run({"name": "prefix_aware"}), run({"name": "least_loaded", "load": "tokens"})
    assert ours[1] == expected[1]
    assert run({"name": "session_affinity"})[1] == expected[1]


def test_sessions_find_their_caches() -> None:
    sessions = {"sessions": {"turns": 6, "think_s": 0.5}}
    least, _ = run({"name": "least_loaded", "load": "tokens"}, **sessions)
    aware, _ = run({"name": "prefix_aware", "weight": 4.0}, **sessions)
    sticky, _ = run({"name": "session_affinity"}, **sessions)
    assert aware.prompt_tokens == sticky.prompt_tokens == least.prompt_tokens
    assert least.cached_tokens < aware.cached_tokens <= sticky.cached_tokens


def test_a_session_stays_until_its_instance_is_lost() -> None:
    system = SessionAffinity()

    def route(session: str | None, loads: dict[str, int], prompt: int = 10) -> str:
        views = {name: view(left, 0, 0) for name, left in loads.items()}
        views["a"].num_pages = 500
        request = SimpleNamespace(id="r", prompt_len=prompt, max_tokens=1, session=session)
        (found,) = system.route([request], ClusterView(0.0, views))  # type: ignore
        return found.legs[0].instance

    assert route("s", {"a": 5, "b": 0}) == "b"
    assert route("s", {"a": 0, "b": 900}) == "b"
    assert route(None, {"a": 0, "b": 900}) == "a"
    assert route("t", {"a": 0, "b": 900}) == "a"
    assert route("s", {"a": 7}) == "a"
    assert route("s", {"a": 7, "b": 0}) == "a"
    assert route("s", {"a": 7, "b": 0}, prompt=9_000) == "b"  # Too long for a's pool.
    assert route("s", {"a": 7, "b": 900}) == "b"
