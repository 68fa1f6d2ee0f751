"""Decode instances in a steady state, against the closed form of their time per token."""

import statistics
from pathlib import Path

import pytest

from jaxinfer.config.run_file import RunFile, load_run_file
from jaxinfer.simulate.run import simulate
from jaxinfer.workload.arrivals import Arrivals, with_arrivals
from jaxinfer.workload.lengths import BenchRequest

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "configs" / "multivendor"
# Llama 2 7B on the card that decodes: bytes of its layers and head and of a token's KV, over what
# it reads per second.
PER_LAYER = 4 * 4096 * 4096 + 3 * 4096 * 11008
WEIGHTS_S = 2 * (32 * PER_LAYER + 32000 * 4096) / (0.7 * 1935e9)
ENTRY_S = 2 * 2 * 32 * 4096 / (0.7 * 1935e9)


def config(decodes: int) -> RunFile:
    counts = [f"groups.a.replicas={decodes}", f"instances.d.replicas={decodes}"]
    return load_run_file(FOLDER / "disaggregated.yaml", counts)


@pytest.mark.parametrize(
    ("prompt", "output", "rate", "decodes"),
    [(256, 256, 2, 1), (256, 256, 15, 1), (256, 256, 6, 3), (1024, 128, 5, 1), (128, 256, 10, 2)],
)
def test_time_per_token(prompt: int, output: int, rate: float, decodes: int) -> None:
    """B = q L_out T sequences at a time and T = w + k B make T = w / (1 - q L_out k).

    Arrivals are even: a request that comes at random finds B others, and is one itself.
    """
    same = [BenchRequest(None, prompt, output, 0.0)] * 400
    work = with_arrivals(same, Arrivals(kind="interval", seconds=1 / rate))
    times = []

    def keep(request: object, tokens: object) -> None:
        times.append((tokens[0], (tokens[-1] - tokens[0]) / (len(tokens) - 1)))  # type: ignore

    simulate(config(decodes), work, on_request=keep)
    steady = [tpot for _, tpot in sorted(times)[120:320]]
    share = rate / decodes * output * (prompt + output / 2) * ENTRY_S
    assert statistics.fmean(steady) == pytest.approx(WEIGHTS_S / (1 - share), rel=0.02)


def test_an_overload_ends_where_memory_does() -> None:
    """The queue grows with the trace at a share of 1 and more: there is no steady state."""
    assert 6 * 1024 * 1536 * ENTRY_S > 1
    waits = []
    for count in (60, 120):
        same = [BenchRequest(None, 1024, 1024, 0.0)] * count
        work = with_arrivals(same, Arrivals(kind="poisson", rate=6, seed=0))
        waits.append(simulate(config(1), work).ttft_p99)
    assert waits[1] > 2 * waits[0] > 0


def test_kv_travels_in_the_narrower_entries(tmp_path: Path) -> None:
    """Two sides that agree on nothing: 16 bits on one, 8 on the other."""
    from jaxinfer.report.records import read_run

    work = [BenchRequest(None, prompt, 5, 0.0) for prompt in (1, 23, 24, 64, 300, 3000)]
    simulate(load_run_file(FOLDER / "unlike.yaml"), work, tmp_path)
    moved = read_run(tmp_path / "1").transfers
    assert sorted(t.num_tokens for t in moved) == [1, 23, 24, 64, 300, 3000]
    assert all(t.num_bytes == t.num_tokens * 2 * 32 * 4096 for t in moved)
