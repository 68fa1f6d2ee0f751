"""Tiers in virtual time: what they spare, and the time of what comes back, by closed forms."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from jaxinfer import JaxinferError
from jaxinfer.config.run_file import RunFile, as_run_file
from jaxinfer.lab.plan.bound import bound_of
from jaxinfer.report.records import read_run
from jaxinfer.serving.request_state import RequestState
from jaxinfer.simulate.run import prepare, simulate
from jaxinfer.workload.bench_request import BenchRequest

TURNS, INPUT, OUTPUT = 4, 32, 16
# Bytes of a token's keys and values in 32 layers with 8 heads of 128 channels.
TOKEN = 2 * 32 * 8 * 128 * 2
HOST = {
    "bf16_tflops": 1.0, "memory_gb": 64.0, "memory_gb_s": 50.0, "link": "none", "link_gb_s": 1.0
}  # fmt: skip


def config(pages: int, tier: dict[str, Any] | None, **instance: Any) -> RunFile:
    """Three sessions in turns; a pool of ``pages``, and a tier at 1 GB/s and 10 ms."""
    own = {"group": "g", "num_pages": pages} | instance
    data: dict[str, Any] = {
        "model": "llama-3-8b",
        "engine": {"page_size": 16, "max_model_len": 4096, "watermark": 0.0},
        "groups": {"g": {"kind": "A10"}},
        "instances": {"a": own},
        "simulate": {"linear": {"step_s": 0.25}},
        "workload": {
            "synthetic": {
                "input_len": INPUT,
                "output_len": OUTPUT,
                "count": 3 * TURNS,
                "sessions": {"turns": TURNS, "think_s": 30.0},
            },
            "arrivals": {"kind": "interval", "seconds": 10.0},
        },
    }
    if tier is not None:
        own["eviction"] = {"tier": "t"}
        data["gpus"] = {"host": HOST}
        data["groups"]["h"] = {"kind": "host"}
        data["instances"]["t"] = {"group": "h", "computes": False, "num_pages": 1000} | tier
        data["links"] = [{"between": ["g", "h"], "gb_s": 1.0, "latency_s": 0.01}]
    return as_run_file(data)


def served(given: RunFile, out: Path) -> tuple[dict[int, int], dict[int, float]]:
    """Cached tokens, and seconds from arrival to the first token."""
    cached, first = {}, {}

    def note(request: RequestState, times: Sequence[float]) -> None:
        cached[int(request.id)] = request.metrics.num_cached_tokens or 0
        first[int(request.id)] = times[0] - request.arrival

    simulate(given, given.requests(), str(out), on_request=note)
    return cached, first


def spared(turn: int) -> int:
    """Full pages of the turn before, whose last token has no entry."""
    return (turn * (INPUT + OUTPUT) - 1) // 16 * 16 if turn else 0


def test_a_small_pool_with_a_tier_finds_what_a_large_one_finds(tmp_path: Path) -> None:
    """A pool of 14 pages has room for one turn; two other sessions come between two turns."""
    everything = {index: spared(index % TURNS) for index in range(3 * TURNS)}
    cached, _ = served(config(500, None), tmp_path / "large")
    assert cached == everything
    cached, alone = served(config(15, None), tmp_path / "small")
    assert sum(cached.values()) < sum(everything.values()) / 2
    cached, first = served(config(15, {}), tmp_path / "tier")
    assert cached == everything
    # The tokens that came back have taken their time, at one step's time after it.
    record = read_run(tmp_path / "tier" / "1")
    back = {int(t.request): t for t in record.transfers if t.source == "t"}
    assert {index % TURNS for index in back} >= {2, 3}
    for index in everything:
        seconds = 0.0
        if index in back:
            transfer = back[index]
            assert transfer.num_bytes == transfer.num_tokens * TOKEN
            seconds = 0.01 + transfer.num_bytes / 1e9
            assert transfer.end - transfer.start == pytest.approx(seconds, abs=2e-6)
        assert first[index] == pytest.approx(seconds + 0.25, abs=1e-5)
        assert alone[index] == pytest.approx(0.25)
    # Each page went there once: all of the last turn, less the last token.
    there = sum(t.num_tokens for t in record.transfers if t.dest == "t")
    assert there == 3 * ((TURNS * (INPUT + OUTPUT) - 1) // 16 * 16)
    assert {step.instance for step in record.steps} == {"a"}


def test_a_tier_holds_no_weights(tmp_path: Path) -> None:
    """64 GB are 30,517 pages of 2 MB; weights and activations would leave fewer."""
    given = config(15, {"num_pages": 64_000_000_000 // (16 * TOKEN)})
    assert served(given, tmp_path)[0][1] == spared(1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"a": {"eviction": {"tier": "u"}}}, "instances.a.eviction.tier: no instance 'u': known"),
        ({"t": {"computes": True}}, "instances.a.eviction.tier is t, which must have computes: "),
        ({"a": {"eviction": {}}}, "instances.t.computes is false, must be true unless"),
        ({"t": {"segments": 2}}, "instances.t.segments is 2, must be 1 with computes: false"),
        (
            {"a": {"eviction": {"tier_takes": "sessions"}}},
            "instances.a.eviction.tier_takes is sessions, must be left out without eviction.tier",
        ),
        ({"t": {"enable_prefix_caching": False}}, "computes: enable_prefix_caching is false"),
        (
            {"t": {"eviction": {"tier": "t"}}},
            "instances.t.eviction.tier is t, must be null: a tier has none of its own",
        ),
    ],
)
def test_what_is_no_tier(change: dict[str, Any], message: str) -> None:
    data = config(15, {}).model_dump(exclude_unset=True)
    for name, options in change.items():
        data["instances"][name] |= options
    with pytest.raises(JaxinferError, match=message):
        as_run_file(data).cluster()


@pytest.mark.parametrize("pins", [0, 8])
def test_a_tier_pins_pages_of_sessions(tmp_path: Path, pins: int) -> None:
    """Three documents of four pages come between two turns; both pools have twelve pages."""
    given = config(13, {"num_pages": 13, "eviction": {"pin_pages": pins}})
    turn, document = 8 * 16 + 1, 4 * 16 + 1  # A request's last token has no entry.
    work = [
        BenchRequest(None, turn - OUTPUT, OUTPUT, 0.0, session=0),
        *(
            BenchRequest(None, document - OUTPUT, OUTPUT, at, prefix=(number, 16))
            for number, at in enumerate([20.0, 40.0, 60.0])
        ),
        BenchRequest(None, turn + INPUT, OUTPUT, 80.0, follows=0, session=0),
    ]
    cached: dict[str, int] = {}

    def note(request: RequestState, times: Sequence[float]) -> None:
        cached[request.id] = request.metrics.num_cached_tokens or 0

    metrics = simulate(given, work, str(tmp_path), on_request=note)
    assert cached["4"] == (8 * 16 if pins else 0)
    assert metrics.num_pages == 12  # Those of the tier hold no running request.


def test_the_bound_is_of_instances_that_compute() -> None:
    """A step takes 0.25 s for any number of requests, on one instance, with or without a tier."""
    alone, tiered = prepare(config(500, None)), prepare(config(500, {}))
    work = config(500, None).requests()
    assert bound_of(tiered, work).rate == pytest.approx(bound_of(alone, work).rate)
