"""Steps padded to given buckets: times and hidden states by hand, and that nothing else changes."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxinfer.config.resolve import resolve
from jaxinfer.config.run_file import RunFile, as_run_file
from jaxinfer.config.site import model_site
from jaxinfer.serving.batch import Work
from jaxinfer.simulate.cluster import model_cluster
from jaxinfer.simulate.costs.linear import LinearCosts, LinearStage
from jaxinfer.simulate.costs.model import Padded, Pipeline
from jaxinfer.simulate.run import simulate
from jaxinfer.steps.shapes import StepLimits
from jaxinfer.workload.lengths import BenchRequest

BUCKETS = (8, 32, 128)


def config(**engine: Any) -> RunFile:
    return as_run_file(
        {
            "model": "llama-3-8b",
            "engine": {
                "max_num_seqs": 8,
                "max_num_batched_tokens": 128,
                "launch_ahead": False,
                "enable_prefix_caching": False,
                **engine,
            },
            "groups": {"a": {"kind": "A10"}, "b": {"kind": "A10"}},
            "links": [{"between": ["a", "b"], "gb_s": 1}],
            "instances": {"i": {"stages": [{"group": g, "layers": 16} for g in "ab"]}},
            "simulate": {"linear": {"token_s": 1.0, "decode_context_s": 1e-6}},
        }
    )


@given(st.lists(st.integers(2, 40), max_size=3), st.integers(0, 8))
def test_a_step_takes_what_its_bucket_takes(chunks: list[int], singles: int) -> None:
    """The bucket that a run compiles for it; decodes alone are as they are."""
    tokens = sum(chunks) + singles
    if not 0 < tokens <= 128:
        return
    work = Work(tokens, singles, singles + len(chunks), singles, 7, [(3, c) for c in chunks])
    stage = LinearStage(LinearCosts(token_s=1.0, decode_context_s=0.001, chunk_context_s=0.01))
    pipeline = Pipeline((stage, stage), 0.0, (0.5,), (0.25,), 2)
    limits = StepLimits(8, 128, 16, 16, given_buckets=BUCKETS)
    shape = limits.smallest(singles, tokens, singles).tokens if chunks else tokens
    padded = Padded(pipeline, BUCKETS)
    expected = shape + 0.007 + 0.03 * len(chunks)
    assert padded.stages(work) == pytest.approx([expected] * 2)
    assert padded.hops(work) == pytest.approx([0.5 + 0.25 * 2 * shape])
    assert work.tokens == tokens


def test_a_run_pays_for_its_buckets() -> None:
    """A prompt of 150 tokens in steps of 128 and 22, which counts as 32; two decodes of one."""
    work = [BenchRequest(None, 150, 3, 0.0)]
    plain = simulate(config(chunks_in_flight=1), work).wall_s
    padded = simulate(config(chunks_in_flight=1, token_buckets=list(BUCKETS)), work).wall_s
    hidden = 4096 * 2 / 1e9
    assert plain == pytest.approx(152 * (1 + hidden) + 303e-6, rel=1e-9)
    assert padded - plain == pytest.approx(10 * (1 + hidden), rel=1e-9)


def test_without_buckets_nothing_is_in_between() -> None:
    assert (
        type(model_cluster(model_site(replace(resolve(config()), pairs=()))).instances["i"].cost)
        is Pipeline
    )
