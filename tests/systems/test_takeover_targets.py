"""Takeover's steps: narrow or wide, and by targets for latencies, in bursts as well."""

import json
from collections.abc import Sequence
from math import log
from pathlib import Path
from random import Random
from typing import Any

import pytest

from jaxinfer.config.run_file import as_run_file
from jaxinfer.papers.takeover.system import Takeover
from jaxinfer.report.metrics import RunMetrics
from jaxinfer.serving.batch import Batch
from jaxinfer.serving.world import StepDone
from jaxinfer.simulate.run import prepare, serve
from jaxinfer.workload.bench_request import BenchRequest
from scripts.reproduce.takeover import cases

LONG, SHORT = (2000, 30), (256, 512)


def lengths(prompt: int, answer: int, count: int) -> list[BenchRequest]:
    return [BenchRequest(None, prompt + 7 * (i % 9), answer, 0.0) for i in range(count)]


def served(
    monkeypatch: pytest.MonkeyPatch, work: Sequence[BenchRequest], *settings: str
) -> tuple[RunMetrics, list[Batch], dict[str, Any]]:
    """A run on A100+A10: its figures, steps with decodes, and the system's report."""
    made: list[Takeover] = []
    monkeypatch.setattr(Takeover, "check", lambda self, instances: made.append(self))
    steps: list[Batch] = []

    def on_step(step: StepDone) -> None:
        if step.batch.work.decodes:
            steps.append(step.batch)

    run = cases.TakeoverRun(cases.Cell("A100+A10", 1024, 128), "takeover/pair", settings, 0)
    figures = serve(prepare(run.config()), work, None, on_step=on_step)
    return figures, steps, dict(made[-1].report())


def test_steps_are_wide_where_few_decode_and_narrow_where_many_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Answers of 30 tokens take few of the seats, those of 512 soon half of them."""
    _, few, _ = served(monkeypatch, lengths(*LONG, 60))
    assert max(batch.work.tokens for batch in few if batch.instance == "high") > 1000
    _, steps, _ = served(monkeypatch, lengths(*SHORT, 300))
    many = [b.work for b in steps if b.instance == "high" and b.work.decodes > 140]
    assert many
    assert max(work.tokens for work in many) < 600


def test_a_target_for_tbt_holds_while_many_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    work = lengths(*LONG, 60)
    free, *_ = served(monkeypatch, work)
    kept, _, report = served(monkeypatch, work, "system.slo={tbt: 0.04}")
    assert free.tbt_p99 is not None
    assert kept.tbt_p99 is not None
    assert kept.tbt_p99 <= 0.04 < free.tbt_p99
    assert report["steps_beside_tbt"]["longer"] < 0.01 * report["steps_beside_tbt"]["with_decodes"]


def test_while_many_wait_a_target_for_ttft_comes_before_that_for_tbt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All came at once: the last would be late, so that steps are as long as without targets."""
    work = lengths(*LONG, 60)
    kept, _, report = served(monkeypatch, work, "system.slo={tbt: 0.04, ttft: 3}")
    free, *_ = served(monkeypatch, work, "system.slo={tbt: 0.04}")
    assert kept.ttft_p99 is not None
    assert free.ttft_p99 is not None
    assert kept.ttft_p99 < free.ttft_p99
    assert "a longer slo.ttft" in report["steps_beside_tbt"]["would_keep_it"]


def test_a_run_says_what_a_target_would_need(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading the weights takes 14 ms on an A100; beside 200 decodes a step takes 28 ms."""
    figures, steps, report = served(monkeypatch, lengths(*LONG, 20), "system.slo={tbt: 0.01}")
    said = report["steps_beside_tbt"]
    assert figures.tbt_p99 is not None
    assert figures.tbt_p99 > 0.01
    # In a step that follows a prompt's last, its decode is there for the first time.
    assert 0.9 * len(steps) < said["longer"] <= said["with_decodes"] <= len(steps)
    assert "a longer slo.tbt" in said["would_keep_it"]
    _, _, report = served(monkeypatch, lengths(*SHORT, 300), "system.slo={tbt: 0.02}")
    assert "a smaller max_num_seqs" in report["steps_beside_tbt"]["would_keep_it"]


def test_no_decode_is_left_on_a_slow_kind_at_the_end(tmp_path: Path) -> None:
    """Three kinds: two takes may lead to the slowest while others wait; then decodes go on."""
    shape = {"hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 28}
    heads = {"num_attention_heads": 24, "num_key_value_heads": 8, "head_dim": 128}
    llama = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 128256}
    more = {
        "tie_word_embeddings": True,
        "max_position_embeddings": 131072,
        "torch_dtype": "bfloat16",
    }
    (tmp_path / "config.json").write_text(json.dumps(shape | heads | llama | more))
    names = dict(zip("abcd", ("A100-80G-SXM", "L4", "L4", "T4"), strict=True))
    rng = Random(4)
    work = [
        BenchRequest(
            None,
            min(round(rng.lognormvariate(log(700), 0.6)), 4000),
            min(round(rng.lognormvariate(log(90), 0.6)) + 1, 1000),
            0.0,
        )
        for _ in range(500)
    ]

    def end(most_moves: int) -> dict[str, float]:
        data = {
            "model": str(tmp_path),
            "engine": {"max_num_seqs": 256, "max_num_batched_tokens": 512, "max_model_len": 8192}
            | {"enable_prefix_caching": False, "launch_ahead": False},
            "groups": {name: {"kind": kind} for name, kind in names.items()},
            "links": [
                {"between": [a, b], "gb_s": 3, "latency_s": 1e-5}
                for a in names
                for b in names
                if a < b
            ],
            "instances": {name: {"group": name} for name in names},
            "system": {"name": "takeover", "most_moves": most_moves},
            "simulate": {"bandwidth": 0.5669, "sequence_s": 7.2e-5, "fit": "relative"}
            | {"groups": {name: {"flops": 0.5624} for name in names}, "hop_s": 0.0396},
        }
        ends: dict[str, float] = {}

        def on_step(step: StepDone) -> None:
            ends[step.instance] = step.end

        serve(prepare(as_run_file(data)), work, None, on_step=on_step)
        return ends

    two, four = end(2), end(4)
    assert max(two, key=two.__getitem__) == "a"
    assert max(two.values()) < 1.02 * max(four.values())
