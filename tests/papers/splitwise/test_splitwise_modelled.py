"""Splitwise on modelled machines: closed forms, scale, and the run files of its clusters."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from jaxinfer.config.resolve import resolve
from jaxinfer.config.run_file import RunFile, as_run_file, load_run_file
from jaxinfer.config.site import model_site
from jaxinfer.papers.splitwise.system import Splitwise
from jaxinfer.simulate.cluster import model_cluster
from jaxinfer.simulate.run import simulate
from jaxinfer.workload.arrivals import Arrivals, with_arrivals
from jaxinfer.workload.lengths import BenchRequest

CONFIGS = Path(__file__).parents[3] / "configs"
# KV bytes of a token of Llama 3 8B.
KV = 131_072
COSTS = {"linear": {"step_s": 0.01, "token_s": 0.001, "decode_context_s": 1e-6}}


def cluster(prompts: int, tokens: int, segments: int = 1, **system: Any) -> RunFile:
    """Machines that take 10 ms for a step and 1 ms for a token, with 1 GB/s between them."""
    counts = {"p": prompts, "t": tokens} if tokens else {"p": prompts}
    policies = {"admit": "whole_request", "batching": "whole_prompts"}
    ends = [pair for pair in ("pt", "pp", "tt") if pair[0] != pair[1] or counts.get(pair[0], 0) > 1]
    links = [{"between": list(pair), "gb_s": 1.0, "latency_s": 0.002} for pair in ends]
    return as_run_file({
        "model": "llama-3-8b",
        "engine": {"page_size": 1, "max_num_seqs": 512, "max_num_batched_tokens": 4096,
                   "num_pages": 100_001, "enable_prefix_caching": False, "launch_ahead": False,
                   "max_transfers_in_flight": 512, "policies": policies},
        "gpus": {"large": {"bf16_tflops": 100, "memory_gb": 200, "memory_gb_s": 1000,
                           "link": "PCIe5", "link_gb_s": 64, "watts": 100}},
        "groups": {name: {"kind": "large", "replicas": n} for name, n in counts.items()},
        "instances": {
            name: {"group": name, "replicas": n, "segments": segments}
            for name, n in counts.items()
        },
        "links": links if tokens else [],
        "system": {"name": "splitwise", "prompt": ["p"], "token": ["t"] if tokens else []} | system,
        "simulate": COSTS,
    })  # fmt: skip


def served(config: RunFile, work: Sequence[BenchRequest]) -> list[list[float]]:
    """Return the times at which each request's tokens were there."""
    found: dict[int, list[float]] = {}

    def on_request(request: Any, times: Sequence[float]) -> None:
        found[int(request.id)] = list(times)

    simulate(config, work, on_request=on_request)
    return [found[number] for number in range(len(work))]


def step(tokens: int, decodes: int = 0, entries: int = 0) -> float:
    return 0.01 + 0.001 * (tokens + decodes) + 1e-6 * entries


def test_one_that_is_alone_takes_what_its_steps_take() -> None:
    (times,) = served(cluster(1, 0), [BenchRequest(None, 300, 5, 0.0)])
    expected = [step(300)]
    for position in range(301, 305):
        expected.append(expected[-1] + step(0, 1, position))
    assert times == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("length", [100, 1000])
def test_a_serial_transfer_is_seen_in_full(length: int) -> None:
    config = cluster(1, 1, layerwise_from=None)
    (times,) = served(config, [BenchRequest(None, length, 3, 0.0)])
    wait = times[1] - times[0] - step(0, 1, length + 1)
    assert times[0] == pytest.approx(step(length))
    assert wait == pytest.approx(length * KV / 1e9 + 0.002)


@pytest.mark.parametrize("pieces", [1, 2, 8])
def test_of_a_layer_wise_transfer_the_last_piece_is_seen(pieces: int) -> None:
    """A link that sends each piece before the next is computed adds only the last one's time."""
    config = cluster(1, 1, pieces, layerwise_from=512)
    long, short = served(
        config, [BenchRequest(None, 1000, 3, 0.0), BenchRequest(None, 500, 3, 9.0)]
    )
    wait = long[1] - long[0] - step(0, 1, 1001)
    assert wait == pytest.approx(1000 * KV / 1e9 / pieces + 0.002)
    # A short one goes when it is done.
    assert short[1] - short[0] - step(0, 1, 501) == pytest.approx(500 * KV / 1e9 + 0.002)


@pytest.mark.parametrize(("machines", "gap"), [(1, 0.6), (1, 1.6), (2, 0.8)])
def test_a_queue_of_equal_prompts(machines: int, gap: float) -> None:
    """D/D/1, or two in turns: each prompt alone in its step, as two do not fit into one."""
    seconds = step(1500)
    work = [BenchRequest(None, 1500, 1, gap * i) for i in range(20)]
    config = cluster(machines, 1, max_pending_tokens=10**6)
    free = [0.0] * machines
    for item, times in zip(work, served(config, work), strict=True):
        turn = min(range(machines), key=free.__getitem__)
        free[turn] = max(free[turn], item.arrival) + seconds
        assert times == pytest.approx([free[turn]])


def random_work(rate: float, count: int) -> list[BenchRequest]:
    lengths = [(40 + 37 * i % 900, 1 + 13 * i % 60) for i in range(count)]
    work = [BenchRequest(None, p, n, 0.0) for p, n in lengths]
    return with_arrivals(work, Arrivals(kind="poisson", rate=rate, seed=1))


@pytest.mark.parametrize("layerwise_from", [None, 512])
def test_decodes_that_go_together_change_nothing(
    layerwise_from: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit, mixed machines included."""
    config = cluster(2, 1, 4, layerwise_from=layerwise_from, max_pending_tokens=600)
    work = random_work(4.0, 120)
    together = served(config, work)
    monkeypatch.setattr(Splitwise, "needs_decode_rows", True)
    assert served(config, work) == together


def test_twice_the_machines_serve_twice_the_requests_no_later() -> None:
    def mean_end(config: RunFile, work: Sequence[BenchRequest]) -> float:
        ends = [times[-1] for times in served(config, work)]
        waits = [end - item.arrival for end, item in zip(ends, work, strict=True)]
        return sum(waits) / len(waits)

    one = mean_end(cluster(2, 1), random_work(3.0, 100))
    two = mean_end(cluster(4, 2), random_work(6.0, 200))
    assert two < one


# Machines, watts by Table V's ratios of a DGX-A100's 3,200, and dollars per hour.
CLUSTERS = {
    "baseline_a100": (70, 70 * 3200, 70 * 17.6),
    "baseline_h100": (40, 40 * 5600, 40 * 38),
    "aa": (70, 70 * 3200, 70 * 17.6),
    "hh": (40, 40 * 5600, 40 * 38),
    "ha": (51, 25 * 5600 + 26 * 3200, 25 * 38 + 26 * 17.6),
    "hhcap": (46, 25 * 5600 + 21 * 3920, 46 * 38),
}


@pytest.mark.parametrize("name", CLUSTERS)
def test_the_clusters_of_the_paper(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Clusters draw what 40 DGX-H100 draw, within a percent."""
    monkeypatch.chdir(CONFIGS.parent)
    config = load_run_file(f"configs/splitwise/{name}.yaml")
    site = model_site(resolve(config))
    assert site.placement
    found = len(site.stages), site.placement.watts, site.placement.usd_per_hour
    assert found == pytest.approx(CLUSTERS[name])
    assert site.placement.watts == pytest.approx(40 * 5600, rel=0.01)
    assert model_cluster(site).instances
    work = config.requests()[:8]
    assert all(
        len(t) == item.max_tokens for t, item in zip(served(config, work), work, strict=True)
    )
