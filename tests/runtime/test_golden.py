"""The demo model against Hugging Face transformers on the same weights, in float32.

``data/smollm2_golden.json``: transformers 5.23, torch 2.13, eager attention. The smallest gap
between the first and second logit is 0.0056, so every greedy token has to be the same.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoint_files import plan_alone
from flax import nnx

from jaxinfer.checkpoints.checkpoint import open_checkpoint
from jaxinfer.checkpoints.open_tensors import Checkpoint
from jaxinfer.config.cluster import one_engine
from jaxinfer.config.engine import EngineOptions
from jaxinfer.models.layers import PagedBatch
from jaxinfer.pallas_kernels.kv_pages import KVPages
from jaxinfer.request import Sampling, SamplingParams
from jaxinfer.runtime.cluster import Engine, load_cluster
from jaxinfer.runtime.stage.load_weights import load_parameters
from jaxinfer.runtime.world import RealWorld
from jaxinfer.serving.instance import Instance
from jaxinfer.serving.instance_options import InstanceOptions
from jaxinfer.serving.kv_shards import KVShards
from jaxinfer.serving.loop import ServingLoop
from jaxinfer.serving.page_pool import PagePool, Shard
from jaxinfer.serving.policies import Policies
from jaxinfer.serving.request_state import RequestState
from jaxinfer.systems.single import Single

LOGIT_TOLERANCE = 1e-3
OPTIONS = InstanceOptions(max_num_seqs=4, max_num_batched_tokens=64)


@pytest.fixture(scope="module")
def checkpoint() -> Checkpoint:
    return open_checkpoint("smollm2-135m-instruct")


@pytest.fixture(scope="module")
def engine(checkpoint: Checkpoint) -> Iterator[Engine]:
    options = EngineOptions(
        dtype="float32",
        max_num_seqs=4,
        max_num_batched_tokens=64,
        max_model_len=512,
        page_size=16,
        num_pages=129,
        strict_shapes=True,
    )
    loaded = load_cluster(checkpoint, one_engine(options), lambda part, left: None)
    yield loaded.engines["engine"]  # noqa: PT022 (the cluster lives as long as the fixture)


@pytest.mark.slow
def test_logits(checkpoint: Checkpoint, golden: list[dict[str, Any]]) -> None:
    """The whole sequence in one chunk: top two logits and logsumexp at each output position."""
    config = checkpoint.config
    plan = plan_alone(config, EngineOptions(dtype="float32"))
    (parameters,) = load_parameters(checkpoint, [plan])
    length, page_size = 96, 16

    @jax.jit
    def logits(parameters: Any, token_T: jax.Array, count: jax.Array) -> jax.Array:
        model = nnx.merge(plan.graphdef, parameters)
        position = jnp.arange(length)
        P, K, H = length // page_size + 1, config.num_key_value_heads, config.head_dim
        zeros = KVPages(jnp.zeros((P, K, H, page_size)), jnp.zeros((P, K, page_size, H)))
        kv = [zeros] * config.num_hidden_layers
        batch = PagedBatch(
            position_T=position,
            page_T=jnp.where(position < count, 1 + position // page_size, 0),
            offset_T=position % page_size,
            decode_table_SM=jnp.zeros((1, P - 1), jnp.int32),
            decode_length_S=jnp.zeros(1, jnp.int32),
            chunk_table_CM=1 + jnp.arange(P - 1)[None],
            chunk_start_C=jnp.zeros(1, jnp.int32),
            chunk_row_C1=jnp.stack([jnp.int32(0), count]),
        )
        return model.logits(model(model.embed(token_T, batch), kv, batch)[0])

    for case in golden:
        ids = case["prompt_ids"] + case["output_ids"]
        padded = np.zeros(length, np.int32)
        padded[: len(ids)] = ids
        first = len(case["prompt_ids"]) - 1
        got = np.asarray(logits(parameters, padded, len(ids)))[first:]
        for step, row in zip(case["steps"], got, strict=False):
            assert row.argmax() == step["top1_id"]
            assert abs(row[step["top1_id"]] - step["top1"]) < LOGIT_TOLERANCE
            assert abs(row[step["top2_id"]] - step["top2"]) < LOGIT_TOLERANCE
            sum_exp = np.exp(row.astype(np.float64)).sum()
            assert abs(np.log(sum_exp) - step["logsumexp"]) < LOGIT_TOLERANCE
        for token, logit in case["first_step_top10"]:
            assert abs(got[0][token] - logit) < LOGIT_TOLERANCE


def serve(
    engine: Engine,
    cases: list[dict[str, Any]],
    options: InstanceOptions,
    num_pages: int = 129,
    kv: KVShards | None = None,
) -> tuple[list[RequestState], Instance]:
    params = Sampling(SamplingParams(temperature=0), seed=0)
    requests = [
        RequestState(
            str(i), len(c["prompt_ids"]), len(c["output_ids"]), 0.0, c["prompt_ids"], params
        )
        for i, c in enumerate(cases)
    ]
    kv = kv or KVShards([Shard(PagePool(num_pages, 16))])
    instance = Instance("engine", kv, options, Policies())
    world = RealWorld({"engine": engine.worker}, requests)
    ServingLoop(world, [instance], Single()).run()
    return requests, instance


@pytest.mark.parametrize(
    "options",
    [
        OPTIONS,
        # Long, and what tiny models are asked for, too.
        pytest.param(replace(OPTIONS, max_num_batched_tokens=23), marks=pytest.mark.slow),
        pytest.param(
            replace(OPTIONS, max_num_batched_tokens=2, max_num_seqs=2), marks=pytest.mark.long
        ),
        pytest.param(
            replace(OPTIONS, max_num_batched_tokens=1, max_num_seqs=1), marks=pytest.mark.slow
        ),
        pytest.param(replace(OPTIONS, launch_ahead=False, max_in_flight=1), marks=pytest.mark.slow),
    ],
    ids=["mixed-64", "mixed-23", "chunks-of-2", "token-by-token", "not-ahead"],
)
def test_greedy_tokens(
    engine: Engine, golden: list[dict[str, Any]], options: InstanceOptions
) -> None:
    requests, _ = serve(engine, golden, options)
    for request, case in zip(requests, golden, strict=True):
        assert request.output_token_ids == case["output_ids"]
        expected = sum(step["top1"] - step["logsumexp"] for step in case["steps"])
        assert abs(request.cumulative_logprob - expected) < LOGIT_TOLERANCE * len(case["steps"])


def test_greedy_tokens_survive_preemption(engine: Engine, golden: list[dict[str, Any]]) -> None:
    cases = sorted(golden, key=lambda case: len(case["prompt_ids"]) + len(case["output_ids"]))[-2:]
    longest = len(cases[-1]["prompt_ids"]) + len(cases[-1]["output_ids"])
    requests, instance = serve(engine, cases, OPTIONS, num_pages=longest // 16 + 3)
    assert instance.num_preemptions > 0
    assert [r.output_token_ids for r in requests] == [c["output_ids"] for c in cases]


def test_greedy_tokens_from_cached_pages(engine: Engine, golden: list[dict[str, Any]]) -> None:
    """First run and later runs alike; the later ones compute the ends of prompts only."""
    kv = KVShards([Shard(PagePool(129, 16))], caching=True)
    cases = sorted(golden, key=lambda case: len(case["output_ids"]))[:2]
    for run in range(3):
        requests, _ = serve(engine, cases, OPTIONS, kv=kv)
        assert [r.output_token_ids for r in requests] == [c["output_ids"] for c in cases]
        found = sum(r.metrics.num_cached_tokens or 0 for r in requests)
        most = sum((len(c["prompt_ids"]) - 1) // 16 * 16 for c in cases)
        assert found == most if run else found < most
