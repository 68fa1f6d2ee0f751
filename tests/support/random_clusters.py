"""Random run files: clusters, systems with options, workloads."""

import random
from typing import Any

from jaxinfer.workload.arrivals import Arrivals, with_arrivals
from jaxinfer.workload.bench_request import BenchRequest

GPUS = ["A100-80G-SXM", "A30", "A10", "H100-SXM", "L4", "L40S"]
HAND_OFFS = ["on_demand", "at_end", "when_room", "per_chunk", "per_segment"]
SYSTEMS = [
    "single",
    "pipeline_parallel",
    "data_parallel",
    "least_loaded",
    "prefix_aware",
    "session_affinity",
    "disaggregated",
    "cronus",
    "distserve",
    "splitwise",
    "tetriinfer",
    "hexgen2",
    "aladdin",
    "takeover",
    "hetis",
]


def random_run(seed: int) -> tuple[dict[str, Any], list[BenchRequest]]:
    """A run file, and its requests; seeds take systems in turn."""
    r, system = random.Random(seed), SYSTEMS[seed % len(SYSTEMS)]
    prompt, output = r.choice([8, 60, 400, 2000]), r.choice([1, 4, 30, 150])
    page = r.choice([1, 4, 16])
    needs = -(-(prompt + output) // page) + 2
    seats = r.choice([1, 2, 7, 64])
    engine: dict[str, Any] = {
        "page_size": page,
        "max_num_seqs": seats,
        "max_num_batched_tokens": max(seats, r.choice([8, 64, 512, 4096])),
        "max_model_len": prompt + output + 5,
        "enable_prefix_caching": system != "hetis" and r.random() < 0.3,
        "watermark": r.choice([0.0, 0.01, 0.2]),
        "chunks_in_flight": r.choice([1, "all"]),
        "policies": {
            "batching": r.choice(["mixed", "even_decodes", "prefill_first", "whole_prompts"]),
            "order": r.choice(["fcfs", "shortest_prompt_first", "longest_prompt_first"]),
            "admit": r.choice(["greedy", "whole_request", "peak", "reserve_dynamic"]),
        },
    }
    if system not in ("hetis", "pipeline_parallel"):
        engine["launch_ahead"] = r.random() < 0.5
    if system != "hetis" and r.random() < 0.7:
        engine["num_pages"] = r.choice([needs, 2 * needs, 8 * needs])
    count = {"single": 1, "pipeline_parallel": 1, "hetis": 1, "cronus": 2}.get(
        system, r.randint(2, 4)
    )
    groups, instances = _cluster(r, system, count)
    names = list(groups)
    gb_s = r.choice([0.01, 1.0, 12.5])
    data: dict[str, Any] = {
        "model": r.choice(["llama-3-8b", "qwen2-7b"]),
        "engine": engine,
        "groups": groups,
        "instances": instances,
        "links": [
            {"between": [a, b], "gb_s": gb_s, "latency_s": r.choice([0.0, 1e-5, 1e-2])}
            for n, a in enumerate(names)
            for b in names[n + 1 :]
        ],
        "system": {"name": system, **_options(r, system, list(instances))},
    }
    if not engine["enable_prefix_caching"]:
        data["system"].pop("fetch", None)
    if r.random() < 0.2 and system != "hetis":
        data["simulate"] = {"linear": {"step_s": 0.01, "token_s": r.choice([0.0, 1e-5])}}
    return data, _work(r, prompt, output, engine["enable_prefix_caching"])


def _cluster(r: random.Random, system: str, count: int) -> tuple[dict[str, Any], dict[str, Any]]:
    groups: dict[str, Any] = {}

    def group(name: str) -> dict[str, Any]:
        groups[name] = {"kind": r.choice(GPUS)}
        return {"group": name}

    if system in ("pipeline_parallel", "hetis"):
        stages = [group(f"g{n}") for n in range(r.randint(1, 3))]
        if system == "hetis":
            for number, stage in enumerate(stages):
                stage["attention"] = [group(f"a{number}")["group"]] * r.randint(0, 1)
                if not stage["attention"]:
                    del groups[f"a{number}"]
        return groups, {"i0": {"stages": stages}}
    return groups, {f"i{n}": group(f"g{n}") for n in range(count)}


def _options(r: random.Random, system: str, names: list[str]) -> dict[str, Any]:
    half = max(len(names) // 2, 1)
    first, second = names[:half], names[half:]
    rule = r.choice(HAND_OFFS)
    match system:
        case "data_parallel":
            return {"shares": {n: {"weight": r.randint(1, 3), "max_waiting": 5} for n in names}}
        case "least_loaded":
            return {"choose": r.choice(["join_shortest_queue", "power_of_two"])}
        case "disaggregated":
            pair = {"prefill": first, "decode": second, "max_in_prefill": 2}
            return {**pair, "hand_off": rule, "fetch": r.random() < 0.5}
        case "cronus":
            return {"partial": "i0", "chunked": "i1", "hand_off": rule}
        case "distserve":
            return {"units": [{"prefill": first, "decode": second}]}
        case "splitwise":
            return {"prompt": first, "token": second, "max_pending_tokens": r.choice([1, 8192])}
        case "tetriinfer":
            flip = r.choice([None, 0.05])
            return {"prefill": first, "decode": second, "flip_after_s": flip}
        case "hexgen2":
            return {"flows": {p: {d: r.choice([0.5, 1.0, 3.0]) for d in second} for p in first}}
        case "aladdin":
            return {"ttft_s": r.choice([0.1, 2.0]), "atgt_s": r.choice([0.05, 0.2])}
        case "takeover":
            return {"most_moves": r.choice([0, 1, 2, 5]), "spared": r.choice([0.0, 0.2])}
    return {}


def _work(r: random.Random, prompt: int, output: int, shares: bool) -> list[BenchRequest]:
    """Requests, some of which begin alike."""
    common, work = [r.randrange(99) for _ in range(prompt)], []
    for _ in range(r.choice([1, 3, 20, 50])):
        length = r.randint(1, prompt)
        kept = r.randint(0, length)
        tokens = common[:kept] + [r.randrange(99) for _ in range(length - kept)]
        work.append(BenchRequest(tokens if shares else None, length, r.randint(1, output), 0.0))
    rate = r.choice([1.0, 10.0, 1000.0])
    arrivals = r.choice(
        [
            {"kind": "at_once"},
            {"kind": "poisson", "rate": rate},
            {"kind": "gamma", "rate": rate, "cv": 4.0},
            {"kind": "closed", "concurrency": r.choice([1, 3])},
            {"kind": "interval", "seconds": 1 / rate},
        ]
    )
    return with_arrivals(work, Arrivals.model_validate(arrivals))
