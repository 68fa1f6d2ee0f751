"""Steps of a model of two matrices: what is compiled, when, and what it computes."""

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxinfer import JaxinferError
from jaxinfer.models.layouts import LAYOUTS
from jaxinfer.models.stage import Layers
from jaxinfer.runtime.stage.sampler import SamplerShape
from jaxinfer.runtime.stage.sampling_inputs import empty_sampling
from jaxinfer.runtime.stage.step import CompiledStep, Key, StageLeaves
from jaxinfer.runtime.stage.step_inputs import empty_inputs
from jaxinfer.steps.shapes import StepLimits, StepShape

V = D = 12
MESH = Mesh(np.array(jax.devices()[:1]), ("tp",))
WHOLE = NamedSharding(MESH, PartitionSpec())
LIMITS = StepLimits(16, 72, max_pages=1, page_size=4, given_buckets=(20, 72))
RNG = np.random.default_rng(0)
EMBED, HEAD = RNG.normal(size=(2, V, D)).astype(np.float32)
LARGE, SMALL = StepShape(16, 72, 16), StepShape(16, 20, 16)
DECODES, FEW = StepShape(16, 16, 0), StepShape(4, 4, 0)


class Model(nnx.Module):
    """A model whose layer adds 1, and 1 to all pages."""

    def __init__(self) -> None:
        self.embed_VD, self.head_VD = nnx.Param(jnp.asarray(EMBED)), nnx.Param(jnp.asarray(HEAD))

    def embed(self, token_T: jax.Array, batch: Any) -> jax.Array:
        return self.embed_VD[...][token_T]

    def __call__(self, x_TD: jax.Array, kv: Any, batch: Any) -> Any:
        return x_TD + 1, [pages + 1 for pages in kv]

    def logits(self, x_TD: jax.Array) -> jax.Array:
        return x_TD @ self.head_VD[...].T


GRAPHDEF, PARAMETERS = nnx.split(Model())
LEAVES = StageLeaves(*[tuple(jax.tree.leaves(PARAMETERS))] * 2)


def step_of(layers: Layers = Layers(0, 1, 1), strict: bool = False) -> CompiledStep:  # noqa: B008
    def abstract(array: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=WHOLE)

    arguments = jax.tree.map(abstract, (PARAMETERS, [jnp.zeros(3)], jnp.zeros(16, jnp.int32)))
    plan: Any = SimpleNamespace(
        limits=LIMITS,
        layers=layers,
        options=SimpleNamespace(strict_shapes=strict),
        mesh=MESH,
        whole=WHOLE,
        graphdef=GRAPHDEF,
        step_arguments=arguments,
        config=SimpleNamespace(hidden_size=D, layout=LAYOUTS["megatron"]),
    )
    return CompiledStep(plan)


def put(array: Any) -> jax.Array:
    return jax.device_put(array, WHOLE)


def ahead(step: CompiledStep, sampler: SamplerShape) -> tuple[list[int], list[Key]]:
    """Return the numbers that are said to be left to compile, and the keys that are run once."""
    keys: list[Key] = []
    return list(step.compile_ahead(sampler, keys.append)), keys


def test_each_part_is_compiled_once_ahead() -> None:
    """Four shapes; a head for 16 rows and one for 4, whatever the number of tokens."""
    step, plain = step_of(), SamplerShape()
    assert LIMITS.shapes() == [LARGE, SMALL, DECODES, FEW]
    left, keys = ahead(step, plain)
    assert left == [6, 5, 4, 3, 2, 1, 0]
    # Each part by the smallest step that has it, which for a head may be one run already.
    assert set(keys) == {Key(shape, plain) for shape in LIMITS.shapes()}
    assert len(keys) == 4
    assert (step.compiles, step.late_compiles) == (6, 0)
    before = step.compile_s
    assert before > 0
    assert ahead(step, plain) == ([0], [])
    # Another sampler needs heads alone, and one for prompts of each number of tokens.
    left, keys = ahead(step, SamplerShape(prompt_top=8))
    assert left == [4, 3, 2, 1, 0]
    assert step.compiles == 10
    # Draws need heads of their own, and steps without one those that are there.
    left, keys = ahead(step, SamplerShape(drawn=True, top_p=True))
    assert left == [2, 1, 0]
    assert {key.sampler for key in keys} == {SamplerShape(greedy=False, drawn=True, top_p=True)}
    assert step.compiles == 12
    assert step.compile_s > before
    assert step.late_compiles == 0


def test_a_part_that_was_not_compiled_ahead() -> None:
    step, key = step_of(), Key(FEW, SamplerShape())
    step._compile = lambda part: part  # type: ignore[assignment, method-assign]
    assert step._get([FEW]) == [FEW]
    assert (step.compiles, step.late_compiles) == (1, 1)
    assert step.compile_s > 0
    assert step._get([FEW, SMALL]) == [FEW, SMALL]
    assert (step.compiles, step.late_compiles) == (2, 2)
    strict = step_of(strict=True)
    with pytest.raises(JaxinferError, match=r"strict_shapes: StepShape\(rows=4, tokens=4"):
        strict.forward(key, *[None] * 5)  # type: ignore[arg-type]
    assert strict.compiles == 0


def test_stages_have_the_parts_they_run() -> None:
    key = Key(LARGE, SamplerShape(edits=16, top=8, prompt_top=8))
    head = ("head", 16, SamplerShape(edits=16, top=8))
    assert step_of(Layers(0, 1, 2))._parts(key) == [LARGE]
    assert step_of(Layers(1, 2, 2))._parts(key) == [LARGE, head, ("prompt head", 72, 8)]
    only = Key(FEW, SamplerShape(top=8))
    assert step_of()._parts(only) == [FEW, ("head", 4, SamplerShape(top=8))]


@pytest.fixture(scope="module")
def compiled() -> CompiledStep:
    return step_of()


def test_tokens_from_the_step_before_and_rows_to_sample_from(compiled: CompiledStep) -> None:
    """The second and third of six tokens are the last step's first and fourth."""
    key = Key(SMALL, SamplerShape())
    inputs = empty_inputs(SMALL, LIMITS)
    inputs.token_T[:6] = [3, 0, 0, 7, 1, 2]
    inputs.source_T[1:3] = [0, 3]
    inputs.sample_row_S[:3] = [2, 5, 1]
    previous = put(np.array([9, 4, 4, 11, *[4] * 12], np.int32))
    pages = put(np.arange(3.0, dtype=np.float32))
    kv, x_SD, x_TD = compiled.forward(key, LEAVES, [pages], previous, inputs, None)  # type: ignore[list-item]
    np.testing.assert_allclose(x_TD[:6], EMBED[[3, 9, 11, 7, 1, 2]] + 1, rtol=1e-6)
    np.testing.assert_allclose(x_SD[:3], EMBED[[11, 2, 9]] + 1, rtol=1e-6)
    assert x_TD.dtype == jnp.float32
    assert np.asarray(kv[0]).tolist() == [1, 2, 3]  # type: ignore[arg-type]
    # Written in place.
    assert pages.is_deleted()
    draws = empty_sampling(16, SamplerShape())
    samples, prompt = compiled.sample(key, LEAVES, (x_SD, x_TD), previous, draws)
    assert prompt is None
    logits = (EMBED[[11, 2, 9]] + 1) @ HEAD.T
    assert samples.token_S[:3].tolist() == logits.argmax(-1).tolist()
    assert compiled.compiles == 2


def test_a_later_stage_goes_on_from_hidden_states() -> None:
    step = step_of(Layers(1, 2, 2))
    x = RNG.normal(size=(4, D)).astype(np.float32)
    like = step.hidden(4)
    assert (like.shape, like.dtype, like.sharding) == ((4, D), jnp.float32, WHOLE)
    inputs = empty_inputs(FEW, LIMITS)
    inputs.sample_row_S[:] = [3, 2, 1, 0]
    _, x_SD, x_TD = step.forward(
        Key(FEW, SamplerShape()),
        LEAVES,
        [put(np.zeros(3, np.float32))],  # type: ignore[list-item]
        put(np.zeros(16, np.int32)),
        inputs,
        put(x),
    )
    np.testing.assert_allclose(x_TD, x + 1, rtol=1e-6)
    np.testing.assert_allclose(x_SD, x[::-1] + 1, rtol=1e-6)


def test_few_rows_are_padded_to_all(compiled: CompiledStep) -> None:
    """So that the next step, whatever its shape, finds them."""
    x = put(RNG.normal(size=(4, D)).astype(np.float32))
    key, previous = Key(FEW, SamplerShape(top=4)), put(np.zeros(16, np.int32))
    draws = empty_sampling(4, SamplerShape())
    samples, _ = compiled.sample(key, LEAVES, (x, x), previous, draws)
    assert samples.token_S.shape == samples.logprob_S.shape == samples.rank_S.shape == (16,)
    assert samples.top_token_SN.shape == samples.top_logprob_SN.shape == (16, 4)


def test_what_is_said_of_prompts_by_blocks(compiled: CompiledStep) -> None:
    """72 rows are a block of 64 and a part of another."""
    sampler = SamplerShape(prompt_top=8)
    x = RNG.normal(size=(72, D)).astype(np.float32)
    tokens = RNG.integers(0, V, 72).astype(np.int32)
    _, found = compiled.sample(
        Key(LARGE, sampler),
        LEAVES,
        (put(x[:16]), put(x)),
        put(np.zeros(16, np.int32)),
        empty_sampling(16, SamplerShape()),
        tokens,
    )
    assert found is not None
    logits = x.astype(np.float64) @ HEAD.T
    log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    assert found.token_S.tolist() == tokens.tolist()
    np.testing.assert_allclose(found.logprob_S, log_p[np.arange(72), tokens], atol=1e-4)
    np.testing.assert_array_equal(found.top_token_SN, np.argsort(-logits, 1)[:, :8])


def test_products_are_of_full_precision() -> None:
    """Products are in full precision; the default on GPUs would be TF32."""
    step = step_of()
    for part in step._parts(Key(LARGE, SamplerShape(prompt_top=8)))[1:]:
        assert "HIGHEST" in step._lower(part).as_text()


def test_a_head_is_given_no_layers() -> None:
    """Of a model with layers, what lies outside them."""
    model = Model()
    model.layers = nnx.List([nnx.Param(jnp.zeros(2)), nnx.Param(jnp.zeros(3))])
    graphdef, parameters = nnx.split(model)
    step = step_of()
    step._graphdef = graphdef
    leaves = step.leaves(parameters)
    assert [leaf.shape for leaf in leaves.all] == [(V, D), (V, D), (2,), (3,)]
    assert [leaf.shape for leaf in leaves.outer] == [(V, D), (V, D)]
