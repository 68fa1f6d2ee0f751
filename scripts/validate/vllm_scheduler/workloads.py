"""Workloads of the comparison: drawn by a seed, or with the lengths and arrivals of traces."""

import csv
import json
import random
from collections.abc import Callable, Iterator
from itertools import count, islice
from pathlib import Path
from typing import Any

from jaxinfer.errors import JaxinferError

Request = dict[str, Any]
Lengths = Iterator[tuple[int, int]]
# What a workload has unless it says otherwise.
COMMON: dict[str, Any] = {
    "seqs": 16, "budget": 256, "block": 16, "blocks": 400, "caching": False, "ahead": True,
    "watermark": 0.0, "counts_only": False,
}  # fmt: skip
# By name: the engine; prompt and output lengths; microseconds between arrivals and requests of one
# arrival; shares of aborts and of answers that stop early; tokens that a family of prompts shares.
DRAWN: dict[str, dict[str, Any]] = {
    "chunks": {"prompt": (1, 900), "output": (1, 80), "gap": 6_000},
    "chunks, one step at a time": {"ahead": False, "prompt": (1, 900), "output": (1, 80),
                                   "gap": 9_000},
    "long prompts beside decodes": {"budget": 512, "seqs": 32, "blocks": 3000, "long": 0.1,
                                    "prompt": (1, 60), "output": (20, 200), "gap": 6_500},
    "small pool": {"blocks": 60, "prompt": (1, 200), "output": (1, 150), "gap": 6_000},
    "small pool, one step at a time": {"ahead": False, "blocks": 60, "prompt": (1, 200),
                                       "output": (1, 150), "gap": 9_000},
    "smallest pool": {"blocks": 30, "block": 8, "prompt": (1, 120), "output": (1, 90),
                      "gap": 5_000},
    "watermark": {"blocks": 90, "watermark": 0.05, "prompt": (1, 200), "output": (1, 150),
                  "gap": 5_000},
    "prefixes": {"caching": True, "families": 5, "shared": 300, "prompt": (1, 500),
                 "output": (1, 60), "gap": 3_500},
    "prefixes, one step at a time": {"ahead": False, "caching": True, "families": 5, "shared": 300,
                                     "prompt": (1, 500), "output": (1, 60), "gap": 4_500},
    "prefixes in a small pool": {"caching": True, "blocks": 80, "families": 8, "shared": 150,
                                 "prompt": (1, 250), "output": (1, 120), "gap": 5_500},
    "prefixes in a small pool, one step at a time": {
        "ahead": False, "caching": True, "blocks": 80, "families": 8, "shared": 150,
        "prompt": (1, 250), "output": (1, 120), "gap": 8_000},
    "whole pages alike": {"caching": True, "blocks": 120, "families": 3, "shared": 128,
                          "multiple": 16, "prompt": (16, 256), "output": (1, 100), "gap": 4_000},
    "several answers": {"caching": True, "answers": 4, "prompt": (1, 400), "output": (1, 80),
                        "gap": 20_000},
    "several answers in a small pool": {"caching": True, "blocks": 90, "answers": 4, "alike": 0.5,
                                        "prompt": (1, 200), "output": (1, 100), "gap": 25_000},
    "aborts": {"aborts": 0.3, "prompt": (1, 600), "output": (1, 100), "gap": 4_500},
    "aborts in a small pool with prefixes": {
        "caching": True, "blocks": 70, "aborts": 0.3, "families": 4, "shared": 100,
        "prompt": (1, 200), "output": (1, 150), "gap": 5_500},
    "early stops": {"blocks": 80, "stops": 0.7, "prompt": (1, 200), "output": (1, 150),
                    "gap": 4_500},
    "early stops with prefixes": {"caching": True, "blocks": 80, "stops": 0.7, "families": 4,
                                  "shared": 100, "prompt": (1, 200), "output": (1, 150),
                                  "gap": 3_500},
    "short answers": {"prompt": (1, 600), "output": (1, 3), "gap": 7_000},
    "bursts": {"burst": 60, "blocks": 250, "prompt": (1, 300), "output": (1, 100),
               "gap": 400_000},
    "tight budget": {"budget": 16, "blocks": 100, "prompt": (1, 100), "output": (1, 60),
                     "gap": 6_000},
    "grouped decodes": {"counts_only": True, "blocks": 120, "prompt": (1, 200), "output": (1, 150),
                        "gap": 5_000},
    "grouped decodes, one step at a time": {
        "ahead": False, "counts_only": True, "blocks": 120, "prompt": (1, 200),
        "output": (1, 150), "gap": 8_000},
}  # fmt: skip
# The same of traces: lengths of a file, with arrivals drawn, in an engine that they fill.
TRACED: dict[str, dict[str, Any]] = {
    "Azure's conversations": {"file": "AzureLLMInferenceTrace_conv.csv", "seqs": 32,
                              "budget": 2048, "blocks": 2600, "gap": 22_000},
    "Azure's code, a small pool": {"file": "AzureLLMInferenceTrace_code.csv", "seqs": 32,
                                   "budget": 2048, "blocks": 700, "gap": 20_000},
    "ShareGPT": {"file": "sharegpt_val_10k_llama2.csv", "seqs": 48, "budget": 512,
                 "blocks": 900, "gap": 11_000, "stops": 0.5},
    "Mooncake's prefixes": {"file": "mooncake_conversation.jsonl", "caching": True, "seqs": 24,
                            "budget": 8192, "blocks": 6000, "gap": 50_000},
}  # fmt: skip


def workload(name: str, batches: int, seed: int, traces: Path | None = None) -> dict[str, Any]:
    """Return a workload as both sides read it, with requests enough for ``batches`` batches.

    Raises:
        JaxinferError: its trace is missing.
    """
    about = COMMON | (DRAWN.get(name) or TRACED[name])
    rng = random.Random(f"{seed} {name}")
    if name in TRACED:
        if traces is None or not (path := traces / about["file"]).is_file():
            raise JaxinferError(f"{traces}: has no {about['file']}, which {name!r} needs")
        bodies = _mooncake(path) if path.suffix == ".jsonl" else _lengths(path, rng)
    else:
        bodies = _drawn(about, rng)
    # Each request takes part in some batches alone; the run ends where it has enough of them.
    requests = list(islice(_requests(about, bodies, rng), max(batches // 2, 20)))
    own = {key: about[key] for key in COMMON}
    return own | {"name": name, "batches": batches, "requests": requests}


def _requests(
    about: dict[str, Any], bodies: Iterator[Request], rng: random.Random
) -> Iterator[Request]:
    now, burst = 0, about.get("burst", 1)
    most = (about["blocks"] - 1) * about["block"]
    for number in count():
        if number % burst == 0:
            now += 1 + round(rng.expovariate(1 / about["gap"]))
        body = next(bodies, None)
        if body is None:
            return
        family, shared, own, length = body["prompt"]
        length = min(length, most - 1)
        body["prompt"] = [family, shared, own, length]
        body["max"] = max(1, min(body["max"], most - length))
        body["stop"] = body["abort"] = 0
        answers = about.get("answers", 1)
        for answer in range(answers):
            alike = rng.random() < about.get("alike", 0.0)
            each = body | {"id": f"{number}.{answer}", "at": now, "out": own + answer * (not alike)}
            if rng.random() < about.get("stops", 0.0):
                each["stop"] = rng.randint(1, each["max"])
            if rng.random() < about.get("aborts", 0.0):
                each["abort"] = now + round(rng.expovariate(1 / (10 * about["gap"])))
            yield each


def _drawn(about: dict[str, Any], rng: random.Random) -> Iterator[Request]:
    for number in count():
        length = rng.randint(*about["prompt"])
        if rng.random() < about.get("long", 0.0):
            length = rng.randint(1000, 6000)
        multiple = about.get("multiple", 1)
        length = -(-length // multiple) * multiple
        family = rng.randrange(about["families"]) if "families" in about else 0
        shared = about.get("shared", 0)
        own = 1000 + 10 * number
        yield {"prompt": [family, shared, own, length], "max": rng.randint(*about["output"])}


def _lengths(path: Path, rng: random.Random) -> Iterator[Request]:
    """Requests with the lengths of a trace, from a place in it that is drawn, round and round."""
    with path.open(encoding="utf-8") as lines:
        rows = [list(row.values()) for row in csv.DictReader(lines)]
    first = 1 if "Azure" in path.name else 0
    start = rng.randrange(len(rows))
    for number in count():
        row = rows[(start + number) % len(rows)]
        prompt, output = int(float(row[first])), int(float(row[first + 1]))
        yield {"prompt": [0, 0, 1000 + 10 * number, max(prompt, 1)], "max": max(output, 1)}


def _mooncake(path: Path) -> Iterator[Request]:
    """Requests with the lengths of Mooncake's trace; those of one conversation begin alike."""
    with path.open(encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines]
    # A prompt's last block that another one has, too, says how much they share, and with whom.
    seen: dict[int, int] = {}
    for number in count():
        row = rows[number % len(rows)]
        hashes = row["hash_ids"]
        shared, family = 0, 10 + 10 * number
        for depth, block in enumerate(hashes):
            if block not in seen:
                break
            shared, family = 512 * (depth + 1), seen[block]
        for block in hashes[shared // 512 :]:
            seen[block] = family
        length = max(1, row["input_length"] // 4)
        yield {
            "prompt": [family, shared // 4, 1_000_000 + 10 * number, length],
            "max": max(1, row["output_length"]),
        }


Changes = dict[str, Any]
# By name: the workload that tells, and what is changed on our side.
MUTANTS: dict[str, tuple[str, Callable[[dict[str, Any]], Changes]]] = {
    "victim": ("small pool", lambda w: {
        "policies": {"victim": "scripts.validate.vllm_scheduler.workloads:oldest"}}),
    "watermark": ("watermark", lambda w: {"watermark": 0.0}),
    "block count": ("small pool", lambda w: {"num_pages": w["blocks"] - 1}),
    "budget": ("chunks", lambda w: {"max_num_batched_tokens": w["budget"] - 1}),
    "order": ("bursts", lambda w: {"policies": {"order": "shortest_prompt_first"}}),
}  # fmt: skip


def oldest(candidates: Any) -> Any:
    """Preempt the request that was admitted first: the mutant of victims."""
    return candidates[0]
