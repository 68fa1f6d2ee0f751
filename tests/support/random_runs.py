"""Random runs of each system: clusters, options and requests, all drawn by one seed."""

from collections.abc import Callable, Mapping, Sequence
from random import Random
from typing import Any

from jaxinfer.workload.arrivals import Arrivals, with_arrivals
from jaxinfer.workload.bench_request import BenchRequest

KINDS = ("A100-80G-SXM", "A30", "A10", "H100-SXM", "L4", "L40S", "RTX-4090")
RULES = ("on_demand", "at_end", "when_room", "per_chunk", "per_segment")
Settings = dict[str, Any]


def random_run(system: str, seed: int) -> tuple[Settings, list[BenchRequest]]:
    """Return a run file of a system, as a mapping, and its requests."""
    rng = Random(f"{system} {seed}")
    longest = rng.choice((8, 60, 400)), rng.choice((1, 4, 30, 120))
    engine = _engine(rng, *longest)
    names = [f"i{number}" for number in range(_SIZES.get(system) or rng.randint(2, 4))]
    groups: dict[str, Settings] = {}
    instances = {name: _instance(rng, name, system, groups) for name in names}
    if any(len(each.get("stages", ())) > 1 for each in instances.values()) or system == "hetis":
        engine["launch_ahead"] = False
    if system == "hetis":
        engine.pop("num_pages", None)
    both = list(groups)
    data: Settings = {
        "model": "llama-3-8b",
        "engine": engine,
        "groups": groups,
        "instances": instances,
        "links": [
            {
                "between": [a, b],
                "gb_s": rng.choice((0.01, 1, 12.5)),
                "latency_s": rng.choice((0, 1e-5, 0.01)),
            }
            for number, a in enumerate(both)
            for b in both[number + 1 :]
        ],
        "system": {"name": system} | _OPTIONS[system](rng, names),
    }
    if system in ("cronus", "takeover"):
        data["simulate"] = {"fit": rng.choice(("relative", "absolute"))}
    if rng.random() < 0.15:
        data["workload"] = {"max_tokens": longest[1] + 3}  # Nobody knows the true ends.
    return data, _requests(rng, *longest)


def _engine(rng: Random, prompt: int, answer: int) -> Settings:
    size = rng.choice((1, 4, 16))
    need = -(-(prompt + answer + 3) // size) + 2
    seats = rng.choice((1, 2, 7, 64))
    engine = {
        "page_size": size,
        "max_num_seqs": seats,
        "max_num_batched_tokens": max(seats, rng.choice((8, 64, 512))),
        "max_model_len": prompt + answer + 8,
        "enable_prefix_caching": False,
        "launch_ahead": rng.random() < 0.5,
        "watermark": rng.choice((0, 0.01, 0.2)),
        "max_transfers_in_flight": rng.choice((1, 4, 16)),
        "chunks_in_flight": rng.choice((1, "all")),
        "policies": {
            "batching": _batching(rng),
            "order": rng.choice(("fcfs", "fcfs", "shortest_prompt_first")),
            "admit": rng.choice(("greedy", "greedy", "whole_request", "peak")),
        },
    }
    if rng.random() < 0.3:
        engine |= {
            "paging": {
                "take": rng.choice(("known", "step")),
                "cache": rng.choice(("computed", "launched")),
                "twins": rng.random() < 0.5,
                "free": rng.choice(("unused", "at_once")),
            },
            "late_tokens": rng.choice(("dropped", "kept")),
            "empty_waits": rng.random() < 0.5,
        }
    if rng.random() < 0.6:  # Sometimes just above the longest request.
        engine["num_pages"] = rng.choice((need + rng.randint(0, 3), 2 * need, 8 * need))
    return engine


def _batching(rng: Random) -> Any:
    return rng.choice(
        (
            "mixed",
            "mixed",
            "even_decodes",
            "prefill_first",
            "whole_prompts",
            "one_batch",
            {"name": "mixed", "enough_tokens": 8},
            {"name": "mixed", "whole_prompts": True, "wait_steps": 2},
            {"name": "whole_prompts", "step_tokens": 16, "max_skips": 1},
        )
    )


def _instance(rng: Random, name: str, system: str, groups: dict[str, Settings]) -> Settings:
    def group(suffix: str = "") -> str:
        groups[name + suffix] = {"kind": rng.choice(KINDS), "devices": 1}
        return name + suffix

    if system == "hetis":
        return {"stages": [{"group": group(), "attention": [group("a")]}]}
    if system == "pipeline_parallel" or rng.random() < 0.15:
        return {"stages": [{"group": group(suffix)} for suffix in "ab"]}
    return {"group": group()}


def _halves(names: Sequence[str]) -> tuple[list[str], list[str]]:
    return list(names[: len(names) // 2]), list(names[len(names) // 2 :])


def _takeover(rng: Random, names: Sequence[str]) -> Settings:
    slo = {"ttft": rng.choice((0.05, 1.0)), "tbt": rng.choice((0.01, 0.1))}
    return {
        "most_moves": rng.choice((0, 1, 2, 2, 5)),
        "keeps_room": rng.random() < 0.7,
        "spared": rng.choice((0, 0.01, 0.2)),
        **({"slo": slo} if rng.random() < 0.4 else {}),
    }


def _data_parallel(rng: Random, names: Sequence[str]) -> Settings:
    shares = {n: {"weight": rng.randint(1, 3), "max_waiting": rng.randint(1, 9)} for n in names}
    return {"shares": shares}


def _disaggregated(rng: Random, names: Sequence[str]) -> Settings:
    prefill, decode = _halves(names)
    most = rng.choice((1, 2, 50))
    rule = rng.choice(RULES)
    return {"prefill": prefill, "decode": decode, "hand_off": rule, "max_in_prefill": most}


def _cronus(rng: Random, names: Sequence[str]) -> Settings:
    most, rule = rng.choice((1, 2, 5)), rng.choice(RULES)
    return {"partial": "i0", "chunked": "i1", "hand_off": rule, "max_in_partial": most}


def _distserve(rng: Random, names: Sequence[str]) -> Settings:
    prefill, decode = _halves(names)
    return {"units": [{"prefill": prefill, "decode": decode}]}


def _splitwise(rng: Random, names: Sequence[str]) -> Settings:
    prompt, token = _halves(names)
    most, first = rng.choice((1, 100, 8192)), rng.choice((None, 1, 64))
    return {"prompt": prompt, "token": token, "layerwise_from": first, "max_pending_tokens": most}


def _tetriinfer(rng: Random, names: Sequence[str]) -> Settings:
    prefill, decode = _halves(names)
    flips = {"flip_after_s": rng.choice((None, 0.05)), "report_s": rng.choice((0.02, 0.1))}
    return {"prefill": prefill, "decode": decode, **flips, "dispatch": "two_choices"}


def _hexgen2(rng: Random, names: Sequence[str]) -> Settings:
    prefill, decode = _halves(names)
    flows = {p: {d: rng.choice((0.5, 1, 3)) for d in decode} for p in prefill}
    return {"flows": flows, "hand_off": rng.choice(RULES)}


def _aladdin(rng: Random, names: Sequence[str]) -> Settings:
    return {"ttft_s": rng.choice((0.1, 2.0)), "atgt_s": rng.choice((0.02, 0.2))}


def _none(rng: Random, names: Sequence[str]) -> Settings:
    return {}


# Instances of those that have a fixed number of them.
_SIZES = {"single": 1, "pipeline_parallel": 1, "cronus": 2, "hetis": 1}
_OPTIONS: Mapping[str, Callable[[Random, Sequence[str]], Settings]] = {
    "single": _none,
    "pipeline_parallel": _none,
    "least_loaded": _none,
    "prefix_aware": _none,
    "session_affinity": _none,
    "hetis": _none,
    "data_parallel": _data_parallel,
    "disaggregated": _disaggregated,
    "cronus": _cronus,
    "distserve": _distserve,
    "splitwise": _splitwise,
    "tetriinfer": _tetriinfer,
    "hexgen2": _hexgen2,
    "aladdin": _aladdin,
    "takeover": _takeover,
}


def _requests(rng: Random, prompt: int, answer: int) -> list[BenchRequest]:
    work = [
        BenchRequest(None, rng.randint(1, prompt), rng.randint(1, answer), 0.0)
        for _ in range(rng.choice((3, 20, 40)))
    ]
    rate = rng.choice((1, 10, 100, 1000.0))
    arrivals: Settings = rng.choice(
        (
            {"kind": "at_once"},
            {"kind": "poisson", "rate": rate},
            {"kind": "gamma", "rate": rate, "cv": 4.0},
            {"kind": "closed", "concurrency": rng.choice((1, 3, 100))},
        )
    )
    return with_arrivals(work, Arrivals(**arrivals))
