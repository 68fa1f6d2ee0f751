"""The study of routing by caches: its sessions, arrivals, capacities and claims by hand."""

import pytest

from jaxinfer.workload.bench_request import BenchRequest
from scripts.reproduce.prefixes import runs
from scripts.tables import Row


def item(arrival: float, *names: int) -> BenchRequest:
    """A prompt whose last block has one token."""
    return BenchRequest(None, 512 * (len(names) - 1) + 1, 1, arrival, hash_ids=names)


def test_a_turn_begins_with_the_whole_blocks_of_one_before() -> None:
    work = [
        item(0.0, 0, 1, 2, 90),
        item(0.0, 0, 3, 91),
        item(1.0, 0, 1, 2, 4, 92),  # Of the first.
        item(2.0, 0, 1, 2, 4, 5, 93),  # Of the third, and so of the first.
        item(2.0, 0, 1, 94),  # Begins as the first, without all of it.
        item(3.0, 0, 3, 6, 95),  # Of the second.
        item(3.0, 0, 96),
        item(4.0, 0, 7, 97),  # Shares only the first block, as all do.
    ]
    found = [each.session for each in runs.with_sessions(work)]
    assert found == [0, 1, 0, 0, 4, 1, 6, 7]


def test_arrivals_keep_their_bursts() -> None:
    work = [item(at, 0, 1) for at in (0.0, 0.0, 3.0, 12.0)]
    assert [each.arrival for each in runs.at_rate(work, 2.0)] == [0.0, 0.0, 0.5, 2.0]


def test_capacities_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "_alone", lambda work, kind: {"h": 2.0, "a": 0.5}[kind])

    class Here:
        map = staticmethod(map)

    found = runs.capacities([item(0.0, 0)], Here())  # type: ignore[arg-type]
    assert found == {"8 H100": 16.0, "4 H100 + 8 A10": 10.0}


def row(system: str, load: float, hits: float, p50: float, p99: float, tokens: float) -> Row:
    return {
        "cluster": "8 H100",
        "load": load,
        "system": system,
        "hit_rate": hits,
        "ttft_p50": p50,
        "ttft_p99": p99,
        "output_tok_s": tokens,
    }


def test_claims_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "CLUSTERS", {"8 H100": {"h": 8}})
    rows = [
        row(system, load, hits, p50, p99, 100.0)
        for load in runs.LOADS
        for system, hits, p50, p99 in (
            (runs.ROUND_ROBIN, 0.1, 0.5, 5.0),
            (runs.LEAST, 0.2, 0.4, 3.0),
            (runs.AFFINITY, 0.3, 0.6, 6.0),
            (runs.BY_SECONDS, 0.3, 0.3, 3.5),
        )
    ]
    hits, p50, p99 = runs.claims_of_loads(rows)
    assert [claim.met for claim in (hits, p50, p99)] == [True, True, False]
    assert (p50.ours, p99.ours) == ("0.3 / 0.4, 0.3 / 0.4", "3.5 / 3, 3.5 / 3")


@pytest.mark.parametrize(("tokens", "met"), [(98.1, True), (98.0, False)])
def test_a_loss_of_more_than_two_percent(
    monkeypatch: pytest.MonkeyPatch, tokens: float, met: bool
) -> None:
    """A loss is by how much more the other is: 100 tokens/s are 2.04 % more than 98."""
    monkeypatch.setattr(runs, "CLUSTERS", {"8 H100": {"h": 8}})
    rows = [
        each
        for load in runs.LOADS_ALONE
        for each in (
            row(runs.LEAST, load, 0.0, 0.5, 5.0, 100.0),
            row(runs.BY_TOKENS, load, 0.0, 0.5, 5.0, 100.0),
            row(runs.BY_SECONDS, load, 0.0, 0.4, 5.0, tokens if load == 0.9 else 100.0),
        )
    ]
    equal, claim = runs.claims_of_alone(rows)
    assert (equal.met, claim.met) == (True, met)
    assert str(claim.ours).endswith("(output_tok_s, 90 % load)")
