"""Tokens that prefix caches spare on a trace, beside kvcache-simulator's count and with no limit.

    python -m scripts.validate.prefix_cache TRACE.jsonl --reference ENV/bin/python

The trace has Mooncake's form, prompts by named blocks of 512 tokens. ENV is an environment of its
own with ``pip install kvcache-simulator==0.1.3``. Requests are served one by one in the trace's
order, so that nothing but the cache's rules decides.

The two caches differ in two rules. Theirs keeps a prompt's last block even if it is not full; ours
keeps only full pages. Theirs counts a prompt that is cached as a whole as such; ours computes a
prompt's last token, which yields the first output token. ``whole_blocks`` gives a trace on which
both rules do not matter: prompts end with a full block, and for us with one token more. In pools of
equal numbers of blocks the counts must then be equal, block by block.
"""

import json
import random
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import click

from jaxinfer.config.run_file import as_run_file
from jaxinfer.serving.request_state import RequestState
from jaxinfer.simulate.run import simulate
from jaxinfer.workload.bench_request import BLOCK, BenchRequest
from jaxinfer.workload.lengths import read_workload
from scripts.tables import Row, show_table

POOLS = (2_000, 10_000, 50_000)
# Shares of the requests that come before the counted ones. The pool must be full by then.
WARM = (0.25, 0.5, 0.75)
INSTANCES = 8
# A model whose entries are small, so that large pools fit.
_SHAPE = {
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "vocab_size": 128,
}
CODE = """
import json, sys
from kvcache_sim.plan import build_execution_plan
from kvcache_sim.policies import simulate_policy
from kvcache_sim.trace import parse_trace_lines
asked = json.load(sys.stdin)
trace = parse_trace_lines(asked["lines"], block_size=asked["block"])
found = []
for warm in asked["warm"]:
    plan = build_execution_plan(trace, warm)
    for pool in asked["pools"]:
        result = simulate_policy(plan, "lru", pool)
        assert result.measurementMode == "fixed_window", (pool, warm, "the pool is not full")
        found.append([warm, pool, result.hitTokens, result.totalTokens])
print(json.dumps(found))
"""


def whole_blocks(work: Sequence[BenchRequest]) -> list[BenchRequest]:
    """Cut prompts to full blocks and one token, of which no cache has an entry; skip empty ones."""
    cut = []
    for item in work:
        if full := item.prompt_len // BLOCK:
            names = (item.hash_ids or ())[:full]
            cut.append(replace(item, prompt_len=BLOCK * full + 1, hash_ids=(*names, -1)))
    return cut


def drawn(seed: int = 7, requests: int = 240) -> list[BenchRequest]:
    """Draw conversations that grow by a few blocks a turn, from one of three beginnings."""
    rng, names = random.Random(seed), count(2)
    chats: list[list[int]] = []
    work = []
    for _ in range(requests):
        if chats and rng.random() < 0.65:
            chat = rng.choice(chats[-14:])
        else:
            chats.append(chat := [0, 1][: rng.randint(0, 2)])
        if len(chat) < 12:
            chat += [next(names) for _ in range(rng.randint(0, 3))]
        if not chat:
            chat.append(next(names))
        work.append(BenchRequest(None, BLOCK * len(chat), 1, 0.0, hash_ids=tuple(chat)))
    return whole_blocks(work)


def spared(
    work: Sequence[BenchRequest], blocks: int, instances: int = 1, order: str = "lru"
) -> list[int]:
    """Return the prompt tokens that each request takes from the cache, in a simulation.

    Args:
        blocks: number of blocks that each instance can keep beside a request's last token.
        instances: number of instances that take requests in turns.
        order: order of eviction.
    """
    longest = max(item.prompt_len for item in work) + 1
    engine = {
        "page_size": BLOCK,
        # Page 0 is for padding, and another one for the last token and what is sampled.
        "num_pages": blocks + 2,
        "max_num_seqs": 1,
        "max_num_batched_tokens": longest,
        "max_model_len": longest,
        "watermark": 0.0,
        "launch_ahead": False,
        "eviction": {"order": order},
    }
    config = as_run_file(
        {
            "model": "one-layer",
            "models": {"one-layer": _SHAPE},
            "engine": engine,
            "groups": {"g": {"kind": "H200", "replicas": instances}},
            "instances": {"i": {"group": "g", "replicas": instances}},
            "simulate": {"linear": {"step_s": 1.0}},
            "system": {"name": "least_loaded", "choose": "round_robin"},
            "workload": {"synthetic": {"input_len": 1, "output_len": 1, "count": 1}},
        }
    )
    found = [0] * len(work)

    def note(request: RequestState, times: Sequence[float]) -> None:
        found[int(request.id)] = request.metrics.num_cached_tokens or 0

    simulate(config, [replace(item, max_tokens=1, arrival=0.0) for item in work], on_request=note)
    return found


def lines_of(work: Sequence[BenchRequest]) -> list[str]:
    """Return requests in the reference's form, without the last token of ``whole_blocks``."""
    lines = []
    for item in work:
        names = [name for name in item.hash_ids or () if name >= 0]
        length = min(item.prompt_len, BLOCK * len(names))
        lines.append(json.dumps({"input_length": length, "hash_ids": names}))
    return lines


def reference(python: str, lines: Sequence[str], pools: Sequence[int]) -> list[list[Any]]:
    """Return warm share, pool, hit tokens and all tokens, by kvcache-simulator in its own Python.

    Raises:
        click.ClickException: it fails.
    """
    asked = json.dumps({"lines": lines, "block": BLOCK, "pools": pools, "warm": WARM})
    done = subprocess.run([python, "-c", CODE], input=asked, capture_output=True, text=True)
    if done.returncode:
        raise click.ClickException(f"{python}: {done.stderr.strip()[-500:]}")
    found: list[list[Any]] = json.loads(done.stdout)
    return found


def compared(work: Sequence[BenchRequest], theirs: Sequence[Sequence[Any]]) -> list[Row]:
    """Return a row for each pool and each share of requests before the counted ones."""
    ours = {pool: spared(work, pool) for pool in dict.fromkeys(pool for _, pool, *_ in theirs)}
    return [
        {
            "blocks": pool,
            "requests before": int(warm * len(work)),
            "kvcache-simulator, blocks": hits // BLOCK,
            "ours, blocks": sum(ours[pool][int(warm * len(work)) :]) // BLOCK,
            "share": f"{100 * hits / tokens:.2f} %",
        }
        for warm, pool, hits, tokens in theirs
    ]


def by_own_rules(work: Sequence[BenchRequest], theirs: Sequence[Sequence[Any]]) -> list[Row]:
    """Return the shares of tokens that both spare where prompts are as the trace has them."""
    rows = []
    for warm, pool, hits, tokens in theirs:
        if warm == WARM[1]:
            ours = sum(spared(work, pool)[int(warm * len(work)) :]) / tokens
            row = {"blocks": pool, "kvcache-simulator": f"{100 * hits / tokens:.2f} %"}
            rows.append(row | {"ours": f"{100 * ours:.2f} %"})
    return rows


def endless(work: Sequence[BenchRequest]) -> list[Row]:
    """Return the shares that pools without a limit spare: one for all, and one per instance."""
    blocks = sum(-(-item.prompt_len // BLOCK) for item in work)
    tokens = sum(item.prompt_len for item in work)
    return [
        {
            "pools without a limit": words,
            "by names alone": f"{100 * by_names(work, number) / tokens:.1f} %",
            "ours": f"{100 * sum(spared(work, blocks, number)) / tokens:.1f} %",
        }
        for number, words in ((1, "one for all requests"), (INSTANCES, f"{INSTANCES} in turns"))
    ]


def by_names(work: Sequence[BenchRequest], instances: int) -> int:
    """Return the tokens of blocks that were named before, short last ones included.

    A prompt's blocks count up to the first new one: the reference's rule, which needs only a tree.
    """
    trees: list[dict[int, Any]] = [{} for _ in range(instances)]
    found = 0
    for number, item in enumerate(work):
        node, hits = trees[number % instances], 0
        for depth, name in enumerate(item.hash_ids or (), 1):
            hits = depth if name in node and hits == depth - 1 else hits
            node = node.setdefault(name, {})
        found += min(hits * BLOCK, item.prompt_len)
    return found


@click.command()
@click.argument("trace", type=click.Path(path_type=Path, exists=True), required=False)
@click.option("--reference", "python", help="Python of an environment with kvcache-simulator.")
@click.option("--limit", type=click.IntRange(1), help="Use only this many requests.")
@click.option("--pools", default=",".join(map(str, POOLS)), help="Numbers of blocks of a pool.")
@click.option("--record", type=click.Path(path_type=Path), help="Write a drawn case, for the test.")
def main(
    trace: Path | None, python: str | None, limit: int | None, pools: str, record: Path | None
) -> None:
    """Print the tokens that are spared; exits with 1 if a count differs."""
    sizes = [int(each) for each in pools.split(",")]
    if trace:
        given = read_workload(trace, limit)
        show_table(endless(given))
        if python:
            print()
            show_table(by_own_rules(given, reference(python, lines_of(given), sizes)))
        work = whole_blocks(given)
    elif record and python:
        work = drawn()
    else:
        raise click.UsageError("give TRACE, or --record and --reference")
    if not python:
        return
    theirs = reference(python, lines_of(work), sizes)
    rows = compared(work, theirs)
    print()
    show_table(rows)
    if record:
        case = {"requests": [item.hash_ids for item in work], "found": theirs}
        record.write_text(json.dumps(case, separators=(",", ":")) + "\n", encoding="utf-8")
    if any(row["kvcache-simulator, blocks"] != row["ours, blocks"] for row in rows):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
