"""Mixtures of experts against a loop over tokens and their experts, in float64."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh

from jaxinfer.lab.sharding.expert_products import RAGGED
from jaxinfer.models.config import ModelConfig
from jaxinfer.models.expert_places import slots
from jaxinfer.models.experts import Experts, all_experts, likeliest
from jaxinfer.models.grouped_experts import sorted_experts
from jaxinfer.models.layouts import ALL, LAYOUTS, Layout, Rule
from jaxinfer.models.sharding import for_use, shard
from jaxinfer.pallas_kernels.choice import grouped

T, X, E, D, F = 9, 3, 5, 17, 100
RNG = np.random.default_rng(0)
ROUTER = RNG.normal(size=(D, E))
# Nobody is sent to the third expert.
ROUTER[0, 2] = -1e3
X_TD = np.abs(RNG.normal(size=(T, D)))
WEIGHTS = [RNG.normal(size=size) * 0.3 for size in ((E, D, F), (E, D, F), (E, F, D))]


def routed(normalised: bool) -> tuple[np.ndarray, np.ndarray]:
    """Shares and experts of each token, by sorting probabilities."""
    odds = np.exp(X_TD @ ROUTER)
    share = odds / odds.sum(1, keepdims=True)
    expert = np.argsort(-share, 1)[:, :X]
    top = np.take_along_axis(share, expert, 1)
    return (top / top.sum(1, keepdims=True) if normalised else top), expert


def by_loops(normalised: bool) -> np.ndarray:
    gate, up, down = WEIGHTS
    out = np.zeros((T, D))
    for token, (shares, experts) in enumerate(zip(*routed(normalised), strict=True)):
        for share, e in zip(shares, experts, strict=True):
            x = X_TD[token] @ gate[e]
            out[token] += share * ((x / (1 + np.exp(-x)) * (X_TD[token] @ up[e])) @ down[e])
    return out


def floats(*arrays: np.ndarray) -> list[jax.Array]:
    return [jnp.asarray(array, jnp.float32) for array in arrays]


@pytest.mark.parametrize("normalised", [True, False])
def test_the_likeliest_and_their_shares(normalised: bool) -> None:
    (logit_TE,) = floats(X_TD @ ROUTER)
    share_TX, expert_TX = likeliest(logit_TE, X, normalised)
    shares, experts = routed(normalised)
    np.testing.assert_allclose(share_TX, shares, rtol=1e-4)
    np.testing.assert_array_equal(expert_TX, experts)


@pytest.mark.parametrize("kernels", ["numba", "plain", "ragged_dot"])
def test_all_ways_add_up_to_the_same(kernels: str) -> None:
    if kernels == "numba":
        pytest.importorskip("numba")
    ragged = kernels == "ragged_dot"
    found = RAGGED if ragged else grouped(kernels, jnp.dtype("float32"), D, F)
    layer = partial(sorted_experts, products=found) if found else all_experts
    shares, experts = routed(True)
    given = *floats(X_TD, shares), jnp.asarray(experts), *floats(*WEIGHTS)
    with jax.default_matmul_precision("highest"):
        np.testing.assert_allclose(jax.jit(layer)(*given), by_loops(True), rtol=0, atol=1e-4)


def module(kernels: str, layout: str = "megatron", sizes: Sequence[int] = (D, F, E)) -> Experts:
    D, F, E = sizes
    config = ModelConfig(
        hidden_size=D, intermediate_size=F, num_experts=E, num_experts_per_tok=X, architecture="",
        vocab_size=1, num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1,
        head_dim=1, max_position_embeddings=1, norm_eps=1, tie_word_embeddings=True,
        bos_token_id=None, eos_token_ids=(), windows=(None,), kernels=kernels,
        layout=CASES[layout],
    )  # fmt: skip
    return Experts(config, nnx.Rngs(0))


# All layouts and whole tiles of both kernels on a mesh of 2 x 4.
WIDE = (32, 512, 8)
FAST = ("megatron", "expert_all_to_all", "expert_parallel", "weight_stationary_2d", "alike")
# With two of one's own: tokens and columns on the same axis; experts and their rows, with tokens
# that are exchanged.
OWN = {
    "alike": Layout((Rule("*", {"F": ALL}),), {"ffn_inputs": {"T": ALL}}),
    "rows": Layout((Rule("*_E??", {"E": "y", "D": "x"}),), {"ffn_inputs": {"T": "y", "D": "x"}}),
}
CASES = {**LAYOUTS, **OWN}


@pytest.mark.parametrize(
    ("kernels", "layout"),
    [
        pytest.param(
            kernels,
            layout,
            marks=[] if layout in FAST[: None if kernels == "numba" else 2] else pytest.mark.slow,
        )
        for kernels in ("numba", "interpret")
        for layout in (*FAST, *(name for name in CASES if name not in FAST))
    ],
)
def test_devices_compute_their_part_of_the_rows(kernels: str, layout: str) -> None:
    """On a mesh, by grouped products, as one device with all experts for all tokens."""
    if kernels == "numba":
        pytest.importorskip("numba")
    (x_TD,) = floats(RNG.normal(size=(16, WIDE[0])))
    text = check_on_mesh(x_TD, kernels, layout)
    if kernels == "numba":
        # Sums over a cut D are whole before they are multiplied: two products of their own.
        cut = layout in ("weight_stationary_2d", "rows")
        assert text.count("@jaxinfer_grouped") == 2 + cut


def check_on_mesh(x_TD: jax.Array, kernels: str, layout: str) -> str:
    """Compare a layer on a mesh with one device's, and return its program."""
    split, state = nnx.split(module(kernels, layout, WIDE))
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(2, 4), ("x", "y"))

    def run(state: Any, x_TD: jax.Array) -> jax.Array:
        used = [
            (path, nnx.Param(for_use(f"layers.0.mlp.{path[-1]}", leaf[...], CASES[layout])))
            for path, leaf in nnx.to_flat_state(state)
        ]
        return nnx.merge(split, nnx.from_flat_state(used))(x_TD)

    expected = module("plain", sizes=WIDE)(x_TD)
    with jax.set_mesh(mesh):
        laid = jax.tree.map_with_path(
            lambda path, x: jax.device_put(
                x, shard(f"layers.0.mlp.{path[0].key}", x.shape, mesh, CASES[layout])
            ),
            state,
        )
        traced = jax.jit(run).trace(laid, x_TD)
        text = traced.lower().as_text()
        found = traced.lower().compile()(laid, x_TD)
    largest = jnp.abs(expected).max()
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5 * float(largest))
    return text


def test_favourites_take_rounds() -> None:
    """Four of 8 devices send all of their 32 tokens to three experts: two rounds of 23 slots."""
    pytest.importorskip("numba")
    assert slots(32, 8, WIDE[2], X) == 23
    own, alike = RNG.normal(size=(128, WIDE[0])), RNG.normal(size=(1, WIDE[0]))
    (x_TD,) = floats(np.concatenate([own, np.repeat(alike, 128, 0)]))
    assert "stablehlo.while" in check_on_mesh(x_TD, "numba", "expert_all_to_all")


@pytest.mark.parametrize(("experts", "chosen", "tokens"), [(8, 2, 256), (128, 8, 256), (8, 2, 16)])
def test_chance_seldom_fills_all_slots(experts: int, chosen: int, tokens: int) -> None:
    """Slots do for 8 devices that send tokens by chance, but in 3 of 300 steps at most."""
    rng, most = np.random.default_rng(1), slots(tokens, 8, experts, chosen)
    full = 0
    for _ in range(300):
        expert_TX = np.argsort(rng.random((8 * tokens, experts)), 1)[:, :chosen]
        goes_TP = (expert_TX[..., None] // (experts // 8) == np.arange(8)).any(1)
        full += bool((goes_TP.reshape(8, tokens, 8).sum(1) > most).any())
    assert full <= 3


def test_one_device_needs_no_mesh() -> None:
    pytest.importorskip("numba")
    (x_TD,) = floats(X_TD)
    layer = module("numba")
    with jax.set_mesh(Mesh(np.array(jax.devices()[:1]), ("tp",))):
        on_one = jax.jit(lambda x: layer(x)).lower(x_TD).as_text()
    for text in (on_one, jax.jit(lambda x: layer(x)).lower(x_TD).as_text()):
        assert text.count("@jaxinfer_grouped") == 2
        assert "shard_map" not in text


def test_shares_follow_the_configuration() -> None:
    """A layer of equal experts gives one expert's result, times its shares' sum."""
    (x_TD,) = floats(X_TD)
    layer = module("plain")
    for weight in (layer.gate_EDF, layer.up_EDF, layer.down_EFD):
        weight[...] = jnp.broadcast_to(weight[...][:1], weight.shape)
    whole = layer(x_TD)
    layer.normalised = False
    shares, _ = likeliest(x_TD @ layer.router_DE[...], X, False)
    np.testing.assert_allclose(layer(x_TD), whole * shares.sum(1)[:, None], rtol=1e-4, atol=1e-7)
