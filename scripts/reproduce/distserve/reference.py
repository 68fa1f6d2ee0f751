"""DistServe's public simulator in a few lines, with pools that are never full.

It has one prefill and one decode instance of one stage, or one instance that does both, prompts
first. It was written from the description, and shares no code with our own simulator.
"""

from collections.abc import Callable, Sequence
from typing import Any

from jaxinfer.workload.lengths import BenchRequest

MOST_PROMPT_TOKENS, MOST_PROMPTS = 8192, 128
# For each request, the seconds to the first token, and per later token.
Latencies = list[tuple[float, float]]


def prefill_seconds(phases: dict[str, Any], prompts: Sequence[int]) -> float:
    """Return the seconds of a step with these prompts."""
    fit, extra = phases["prefill"], phases["extra"]
    seconds = fit["step_s"] + fit["token_s"] * sum(prompts) + extra["prefill_stage_s"]
    seconds += fit["pair_s"] * sum(length**2 for length in prompts)
    return seconds + extra["step_s"] + extra["context_s"] * sum(prompts)


def decode_seconds(phases: dict[str, Any], entries: Sequence[int]) -> float:
    """Return the seconds of a step whose rows see these numbers of entries."""
    small, large = phases["decode"]
    fit, extra = (small if len(entries) < small["below"] else large), phases["extra"]
    seconds = fit["step_s"] + fit["context_s"] * sum(entries) + fit["sequence_s"] * len(entries)
    return seconds + extra["step_s"] + extra["context_s"] * sum(entries)


def _prompts(lengths: Sequence[int]) -> int:
    """Count the waiting prompts that fit into one step."""
    count = tokens = 0
    for length in lengths[:MOST_PROMPTS]:
        if count and tokens + length > MOST_PROMPT_TOKENS:
            break
        count, tokens = count + 1, tokens + length
    return count


def disaggregated(
    work: Sequence[BenchRequest], prefill: dict[str, Any], decode: dict[str, Any]
) -> Latencies:
    """Serve requests on a pair; KV arrives without delay."""
    now, at, first = 0.0, 0, []
    while at < len(work):
        now = max(now, work[at].arrival)
        there = [item.prompt_len for item in work[at:] if item.arrival <= now]
        batch = there[: _prompts(there)]
        now += prefill_seconds(prefill, batch)
        first += [now] * len(batch)
        at += len(batch)
    last = _decode(work, first, lambda entries: decode_seconds(decode, entries))
    return _latencies(work, first, last)


def _decode(
    work: Sequence[BenchRequest], ready: Sequence[float], seconds: Callable[[list[int]], float]
) -> list[float]:
    now, at, ends = 0.0, 0, list(ready)
    running: dict[int, int] = {}
    while at < len(work) or running:
        if not running:
            now = max(now, ready[at])
        while at < len(work) and ready[at] <= now:
            if work[at].max_tokens > 1:
                running[at] = 1
            at += 1
        if running:
            now += seconds([work[i].prompt_len + tokens for i, tokens in running.items()])
        running, ends = _one_more(work, running, ends, now)
    return ends


def _one_more(
    work: Sequence[BenchRequest], running: dict[int, int], ends: list[float], now: float
) -> tuple[dict[int, int], list[float]]:
    for number in running:
        running[number] += 1
        ends[number] = now
    return {i: tokens for i, tokens in running.items() if tokens < work[i].max_tokens}, ends


def colocated(work: Sequence[BenchRequest], phases: dict[str, Any]) -> Latencies:
    """Serve requests on one instance that computes prompts if any wait, and else decodes."""
    now, at = 0.0, 0
    first, ends = [0.0] * len(work), [0.0] * len(work)
    running: dict[int, int] = {}
    while at < len(work) or running:
        if not running:
            now = max(now, work[at].arrival)
        there = [item.prompt_len for item in work[at:] if item.arrival <= now]
        if there:
            batch = there[: _prompts(there)]
            now += prefill_seconds(phases, batch)
            for number in range(at, at + len(batch)):
                first[number] = ends[number] = now
                if work[number].max_tokens > 1:
                    running[number] = 1
            at += len(batch)
            continue
        entries = [work[i].prompt_len + tokens for i, tokens in running.items()]
        now += decode_seconds(phases, entries)
        running, ends = _one_more(work, running, ends, now)
    return _latencies(work, first, ends)


def _latencies(
    work: Sequence[BenchRequest], first: Sequence[float], last: Sequence[float]
) -> Latencies:
    return [
        (begin - item.arrival, (end - begin) / max(item.max_tokens - 1, 1))
        for item, begin, end in zip(work, first, last, strict=True)
    ]
