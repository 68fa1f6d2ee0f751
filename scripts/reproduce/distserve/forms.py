"""DistServe's queueing forms and its transfers."""

import random
from collections.abc import Sequence
from itertools import pairwise
from statistics import fmean

import numpy as np

from jaxinfer import load_run
from jaxinfer.config.run_file import RunFile, as_run_file, load_run_file
from jaxinfer.serving.request_state import RequestState
from jaxinfer.simulate.run import simulate
from jaxinfer.workload.arrivals import Arrivals, with_arrivals
from jaxinfer.workload.lengths import BenchRequest
from scripts.reproduce.claims import by_share, holds
from scripts.reproduce.distserve.model import TRACE, turns
from scripts.reproduce.recorded import recorded
from scripts.reproduce.reproduction import Inputs, Part
from scripts.tables import CONFIGS, Row

FOLDER = CONFIGS / "distserve"
# Seconds of one prompt, and its speedup on two GPUs that share each layer.
D, K = 0.05, 1.6
PROMPT = 512


def _prompts_alone(stages: int, seconds: float) -> RunFile:
    """Return a run file of an instance that takes one prompt at a time, in ``stages`` stages."""
    groups = [f"g{number}" for number in range(stages)]
    return as_run_file(
        {
            "model": "opt-13b",
            "engine": {
                "max_num_batched_tokens": PROMPT,
                "launch_ahead": False,
                "enable_prefix_caching": False,
                "max_num_seqs": PROMPT,
            },
            "groups": {group: {"kind": "A100-80G-SXM"} for group in groups},
            "links": [{"between": [a, b], "gb_s": 1e9} for a, b in pairwise(groups)],
            "instances": {
                "i": {
                    "stages": [{"group": g, "layers": 40 // stages} for g in groups],
                    "policies": {"batching": "prefill_first"},
                }
            },
            "simulate": {"linear": {"token_s": seconds / PROMPT}},
        }
    )


def mean_ttft(stages: int, seconds: float, rate: float, count: int = 40_000) -> float:
    """Return the mean TTFT of equal prompts with Poisson arrivals, in seconds."""
    rng, now, work = random.Random(1), 0.0, []
    for _ in range(count):
        work.append(BenchRequest(None, PROMPT, 1, now))
        now += rng.expovariate(rate)
    found: list[float] = []

    def note(request: RequestState, times: Sequence[float]) -> None:
        found.append(times[0] - request.arrival)

    simulate(_prompts_alone(stages, seconds), work, on_request=note)
    return fmean(found)


def forms(rate: float) -> dict[str, tuple[float, float]]:
    """Return the predictions of equations 1 to 3, each with the simulated mean."""
    one = D + rate * D**2 / (2 * (1 - rate * D))
    inter = D + rate * D**2 / (4 * (2 - rate * D))
    intra = D / K + rate * D**2 / (2 * K * (K - rate * D))
    return {
        "(1) one GPU": (one, mean_ttft(1, D, rate)),
        "(2) two stages": (inter, mean_ttft(2, D, rate)),
        f"(3) two GPUs per layer, K {K:g}": (intra, mean_ttft(1, D / K, rate)),
    }


def queueing(inputs: Inputs) -> Part:
    """Mean TTFT by the closed forms and simulated, at two loads."""
    rows, targets = [], []
    for load in (0.3, 0.6):
        for name, (form, ours) in forms(load / D).items():
            row = {"form": name, "R D": load, "closed form (s)": round(form, 5)}
            rows.append(row | {"simulated (s)": round(ours, 5)})
            targets.append(
                by_share(
                    f"mean TTFT by equation {name}, R D {load:g} (s)",
                    form,
                    ours,
                    0.01,
                    "consistency",
                )
            )
    return Part(rows, targets)


def transfers(inputs: Inputs) -> Part:
    """OPT-175B over nodes of 25 Gb/s: segments side by side, and shifted by one node."""
    trace = inputs.work(TRACE)
    work = with_arrivals(turns(trace, 0.02, 300), Arrivals(kind="poisson", rate=2.6))
    rows: list[Row] = []
    for name, nodes in (("side by side", "123"), ("shifted by a node", "231")):
        settings = [f"simulate.groups.d{i}.node=node{node}" for i, node in enumerate(nodes)]
        config = load_run_file(FOLDER / "opt_175b.yaml", settings)
        _, run = recorded(config, work, load_run)
        seconds = np.array(run.transfers["end"] - run.transfers["start"])
        ends = run.requests
        times = [list(each) for each in ends["token_times"]]
        ttft = [t[0] - a for t, a in zip(times, ends["arrival"], strict=True)]
        tpot = [(t[-1] - t[0]) / max(len(t) - 1, 1) for t in times]
        met = fmean(a <= 4.0 and b <= 0.2 for a, b in zip(ttft, tpot, strict=True))
        shares = {f"p{p} (ms)": round(1e3 * float(np.percentile(seconds, p)), 1) for p in (50, 95)}
        below = float((seconds < 0.03).mean())
        rows.append(
            {"segments": name}
            | shares
            | {
                "most (ms)": round(1e3 * float(seconds.max()), 1),
                "below 30 ms (%)": 100 * below,
                "meet 4 s / 0.2 s (%)": round(100 * met, 1),
            }
        )
    share = rows[0]["below 30 ms (%)"]
    claim = "175B, segments side by side: transfers below 30 ms"
    return Part(rows, [holds(claim, "> 95 %", f"{share:.1f} %", share > 95, "above 95 %")])
