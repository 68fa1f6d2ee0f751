"""A decoder layer and the head, as abstract arrays; activations have the models' names.

Scales, biases and rotations are left out, because they move nothing between devices. Shape
suffixes: T tokens, S sequences, C KV entries, N query heads, K KV heads, H head dim, D model dim, F
feed-forward, E experts, V vocabulary.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxinfer.hardware.catalogue import ModelShape
from jaxinfer.lab.sharding.expert_products import expert_products
from jaxinfer.lab.sharding.targets import CompileTarget
from jaxinfer.models.expert_places import expert_places
from jaxinfer.models.experts import likeliest
from jaxinfer.models.grouped_experts import experts_on_mesh
from jaxinfer.models.layouts import (
    ACTIVATIONS,
    Layout,
    Places,
    letters_of,
    named,
    table_in_use,
    table_of,
    ways,
)
from jaxinfer.models.sharding import spec
from jaxinfer.pallas_kernels.choice import Grouped
from jaxinfer.sharding.shapes import layer_parameters

# Number of KV entries that attention reads at a time, as kernels do, so that memory never has all
# scores.
BLOCK = 512


class Program:
    """A layer and a head of one model, to be compiled in one layout on one mesh.

    Args:
        model: model whose heads and columns divide over the mesh, see ``shapes.padded``.
        context: KV entries that a decode sees, including its own.
        dtype: dtype of all arrays.
        target: devices of the mesh.

    Attributes:
        products: kernels for the products of experts; None for dense models.
        parts: axes that cut the tokens of KV.
        scattered: those of ``parts`` over which results are scattered by heads while they are
            summed.
    """

    def __init__(
        self,
        model: ModelShape,
        layout: Layout,
        mesh: Mesh,
        context: int,
        dtype: Any,
        target: CompileTarget,
    ) -> None:
        self.model, self.layout, self.mesh = model, layout, mesh
        self.context, self.dtype = context, dtype
        self.axes = mesh.axis_names
        self.parameters = layer_parameters(model)
        self.parts = named(layout.kv.get("C", ()), self.axes)
        outputs = layout.activations.get("attention_outputs", {})
        wanted = named(outputs.get("N", ()), self.axes)
        self.scattered = tuple(axis for axis in self.parts if axis in wanted)
        self.products: Grouped | None = None
        if model.num_experts:
            cuts = expert_places(layout, self.axes).weights
            D, F = model.hidden_size, model.intermediate_size
            sizes = D // ways(cuts["D"], mesh.shape), F // ways(cuts["F"], mesh.shape)
            self.products = expert_products(target, dtype, *sizes)

    def _spec(self, letters: str, table: Places) -> PartitionSpec:
        return spec(letters, table, self.axes)

    def _put(self, x: jax.Array, spec: PartitionSpec) -> jax.Array:
        return jax.lax.with_sharding_constraint(x, NamedSharding(self.mesh, spec))

    def place(self, name: str, x: jax.Array) -> jax.Array:
        """Shard an activation if the layout has an entry for it."""
        table = self.layout.activations.get(name)
        return x if table is None else self._put(x, self._spec(ACTIVATIONS[name], table))

    def for_use(self, path: str, weight: jax.Array) -> jax.Array:
        """Return a weight as products use it: gathered over the axes that the layout names."""
        if not self.layout.gathered:
            return weight
        left = table_in_use(path, self.layout, self.axes)
        return self._put(weight, self._spec(letters_of(path), left))

    def layer_arguments(self, tokens: int, decodes: bool) -> tuple[Any, ...]:
        """Return an abstract residual stream, weights by path and, for decodes, keys and values."""
        residual = self.layout.activations.get("residual", {})
        x_TD = self._abstract((tokens, self.model.hidden_size), self._spec("TD", residual))
        weights = {
            path: self._abstract(shape, self._spec(letters_of(path), table_of(path, self.layout)))
            for path, shape in self.parameters.items()
        }
        if not decodes:
            return x_TD, weights, None
        shape = (tokens, self.context, self.model.num_key_value_heads, self.model.head_size)
        kv = self._abstract(shape, self._spec("SCKH", self.layout.kv))
        return x_TD, weights, (kv, kv)

    def head_arguments(self, rows: int) -> tuple[Any, ...]:
        """Return an abstract residual stream of the sampled rows, and the head's weight."""
        D, V = self.model.hidden_size, self.model.vocab_size
        residual = self.layout.activations.get("residual", {})
        path = "embed_VD" if self.model.tie_word_embeddings else "head_VD"
        spec = self._spec("VD", table_of(path, self.layout))
        return (
            self._abstract((rows, D), self._spec("TD", residual)),
            self._abstract((V, D), spec),
        )

    def _abstract(self, shape: tuple[int, ...], spec: PartitionSpec) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, self.dtype, sharding=NamedSharding(self.mesh, spec))

    def layer(
        self, x_TD: jax.Array, weights: Mapping[str, jax.Array], kv: Any
    ) -> tuple[jax.Array, Any]:
        """Return the residual stream after the layer, and keys and values: new ones, or all."""
        weight = {
            path.rpartition(".")[2]: self.for_use(path, array) for path, array in weights.items()
        }
        y_TD = self.place("attention_inputs", self.norm(x_TD))
        q_TNH = self.place("queries", jnp.einsum("td,dnh->tnh", y_TD, weight["q_DNH"]))
        k_TKH = self.place("new_kv", jnp.einsum("td,dkh->tkh", y_TD, weight["k_DKH"]))
        v_TKH = self.place("new_kv", jnp.einsum("td,dkh->tkh", y_TD, weight["v_DKH"]))
        k_TKH, v_TKH = self.place("kv", k_TKH), self.place("kv", v_TKH)
        out_TNH, kv = self.attention(self.place("heads", q_TNH), k_TKH, v_TKH, kv)
        out_TNH = out_TNH if self.parts else self.place("heads", out_TNH)
        out_TNH = self.place("attention_outputs", out_TNH)
        out_TD = self.place("residual", jnp.einsum("tnh,nhd->td", out_TNH, weight["o_NHD"]))
        x_TD = self.place("residual", x_TD + out_TD)
        y_TD = self.place("ffn_inputs", self.norm(x_TD))
        ffn = self.experts if self.model.num_experts else self.ffn
        return self.place("residual", x_TD + self.place("residual", ffn(y_TD, weight))), kv

    def head(self, x_SD: jax.Array, head_VD: jax.Array) -> jax.Array:
        """Return logits; hidden states are replicated where the head is."""
        x_SD = self._put(self.norm(x_SD), PartitionSpec())
        return self.place("logits", jnp.einsum("sd,vd->sv", x_SD, head_VD))

    def norm(self, x_TD: jax.Array) -> jax.Array:
        """Apply RMSNorm if the feed-forward layer is gated, otherwise LayerNorm, as in OPT."""
        if not self.model.gated:
            x_TD = x_TD - jnp.mean(x_TD, -1, keepdims=True)
        return x_TD * jax.lax.rsqrt(jnp.mean(x_TD * x_TD, -1, keepdims=True) + 1e-5)

    def ffn(self, x_TD: jax.Array, weight: Mapping[str, jax.Array]) -> jax.Array:
        """Apply a dense feed-forward layer."""
        up_TF = jnp.einsum("td,df->tf", x_TD, weight["up_DF"])
        if self.model.gated:
            up_TF = jax.nn.silu(jnp.einsum("td,df->tf", x_TD, weight["gate_DF"])) * up_TF
        else:
            up_TF = jax.nn.relu(up_TF)
        up_TF = self.place("ffn_outputs", self.place("ffn", up_TF))
        return jnp.einsum("tf,fd->td", up_TF, weight["down_FD"])

    def experts(self, x_TD: jax.Array, weight: Mapping[str, jax.Array]) -> jax.Array:
        """Apply a mixture of experts as the engine does; the mesh must be in use."""
        assert self.products
        logit_TE = jnp.einsum(
            "td,de->te", x_TD, weight["router_DE"], preferred_element_type=jnp.float32
        )
        weights = weight["gate_EDF"], weight["up_EDF"], weight["down_EFD"]
        route = partial(likeliest, count=self.model.num_experts_per_tok, normalised=True)
        out_TD = experts_on_mesh(x_TD, logit_TE, *weights, route, self.products, self.layout)
        return out_TD.astype(self.dtype)

    def attention(
        self, q_TNH: jax.Array, k_TKH: jax.Array, v_TKH: jax.Array, kv: Any
    ) -> tuple[jax.Array, Any]:
        """Apply attention on each device for its heads or tokens, as the engine does."""
        rows = named(self.layout.activations.get("heads", {}).get("T", ()), self.axes)
        heads, own = (named(self.layout.kv.get(each, ()), self.axes) for each in "KS")
        queries = self._spec("TK", {"K": heads, "T": rows})
        done = self._spec("TK", {"K": (*heads, *self.scattered), "T": rows})
        kept = self._spec("TK", {"K": heads, "T": own if kv else self.parts})
        attend: Callable[..., Any] = self._decode if kv else self._prefill
        cached = (self._spec("SCK", self.layout.kv),) * 2 if kv else None
        on_mesh = jax.shard_map(
            partial(attend, () if own else rows),
            mesh=self.mesh,
            in_specs=(queries, kept, kept, cached),
            out_specs=(done, cached or (kept, kept)),
            check_vma=False,
        )
        out: tuple[jax.Array, Any] = on_mesh(q_TNH, k_TKH, v_TKH, kv)
        return out

    def _first(self, axes: tuple[str, ...], count: int) -> jax.Array:
        """Return the index of this device's first item, if each has ``count`` along these axes."""
        return jax.lax.axis_index(axes) * count if axes else jnp.int32(0)

    def _put_together(self, most: jax.Array, total: jax.Array, out_TNH: jax.Array) -> jax.Array:
        """Combine the results of attention to each part of a sequence."""
        if not self.parts:
            return out_TNH / total[..., None]
        highest = jax.lax.pmax(most, self.parts)
        share = jnp.exp(most - highest)
        total = jax.lax.psum(total * share, self.parts)
        out_TNH = out_TNH * (share / total)[..., None]
        if self.scattered:
            out_TNH = jax.lax.psum_scatter(out_TNH, self.scattered, scatter_dimension=1, tiled=True)
        left = tuple(axis for axis in self.parts if axis not in self.scattered)
        return jax.lax.psum(out_TNH, left) if left else out_TNH

    def _prefill(
        self, rows: tuple[str, ...], q_TNH: jax.Array, k_CKH: jax.Array, v_CKH: jax.Array, kv: None
    ) -> tuple[jax.Array, Any]:
        """Attend from a prompt's tokens, each to those up to itself."""
        T, N, H = q_TNH.shape
        C, K = k_CKH.shape[:2]
        position_T = self._first(rows, T) + jnp.arange(T)
        first_C = self._first(self.parts, C)
        q_TKGH = q_TNH.reshape(T, K, N // K, H)
        block = BLOCK if C % BLOCK == 0 else C
        zero = jnp.zeros((T, K, N // K), q_TNH.dtype)

        def add(carry: Any, start: jax.Array) -> tuple[Any, None]:
            most, total, out = carry
            k = jax.lax.dynamic_slice_in_dim(k_CKH, start, block)
            v = jax.lax.dynamic_slice_in_dim(v_CKH, start, block)
            score = jnp.einsum("tkgh,ckh->tkgc", q_TKGH, k)
            seen = (first_C + start + jnp.arange(block)) <= position_T[:, None, None, None]
            score = jnp.where(seen, score, -1e9)
            higher = jnp.maximum(most, score.max(-1))
            share, scale = jnp.exp(score - higher[..., None]), jnp.exp(most - higher)
            out = out * scale[..., None] + jnp.einsum("tkgc,ckh->tkgh", share, v)
            return (higher, total * scale + share.sum(-1), out), None

        start = (zero - 1e9, zero, jnp.zeros_like(q_TKGH))
        (most, total, out), _ = jax.lax.scan(add, start, jnp.arange(0, C, block))
        out_TNH = self._put_together(most.reshape(T, N), total.reshape(T, N), out.reshape(T, N, H))
        return out_TNH, (k_CKH, v_CKH)

    def _decode(
        self, rows: tuple[str, ...], q_SNH: jax.Array, k_SKH: jax.Array, v_SKH: jax.Array, kv: Any
    ) -> tuple[jax.Array, Any]:
        """Attend from one token per sequence to all of the sequence's entries and its own."""
        S, N, H = q_SNH.shape
        # The last entry is on the last part of each sequence.
        C = kv[0].shape[1]
        is_last = self._first(self.parts, C) + C == self.context
        keys, values = (
            jnp.where(
                is_last, jax.lax.dynamic_update_slice_in_dim(old, new[:, None], C - 1, 1), old
            )
            for old, new in zip(kv, (k_SKH, v_SKH), strict=True)
        )
        first = self._first(rows, S)
        k, v = (jax.lax.dynamic_slice_in_dim(each, first, S) for each in (keys, values))
        K = k.shape[2]
        score = jnp.einsum("skgh,sckh->skgc", q_SNH.reshape(S, K, N // K, H), k)
        most = score.max(-1)
        share = jnp.exp(score - most[..., None])
        out = jnp.einsum("skgc,sckh->skgh", share, v)
        out_SNH = self._put_together(
            most.reshape(S, N), share.sum(-1).reshape(S, N), out.reshape(S, N, H)
        )
        return out_SNH, (keys, values)
