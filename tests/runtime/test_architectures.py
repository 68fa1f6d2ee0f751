"""Every architecture against Hugging Face transformers on small random weights.

``data/architectures`` is written by ``scripts/golden/architecture.py``.
"""

import json
import math
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
import pytest
from flax import nnx

from jaxinfer import JaxinferError
from jaxinfer.checkpoints.checkpoint import open_checkpoint
from jaxinfer.checkpoints.hugging_face import read_folder_config
from jaxinfer.config.cluster import one_engine
from jaxinfer.config.engine import EngineOptions
from jaxinfer.models.config import ModelConfig
from jaxinfer.models.layers import PagedBatch
from jaxinfer.pallas_kernels.choice import Kernels
from jaxinfer.runtime.stage.cluster_plan import plan_cluster
from jaxinfer.runtime.stage.kv_cache import abstract_pages, allocate
from jaxinfer.runtime.stage.load_weights import load_parameters
from jaxinfer.runtime.stage.step import ready

DATA = Path(__file__).parents[1] / "data" / "architectures"
EXPERT_RULES = Path(__file__).parents[2] / "configs" / "sharding" / "experts.py"
CASES = sorted(folder.name for folder in DATA.iterdir() if folder.is_dir())
PAGE_SIZE, ROWS, PAGES = 4, 80, 20


class Model:
    """Logits of one sequence, in whatever pieces it comes; its pages lie in disorder."""

    def __init__(
        self,
        name: str,
        devices: int = 1,
        layout: str = "megatron",
        mesh: dict[str, int] | None = None,
        kernels: Kernels | Literal["auto"] = "auto",
    ) -> None:
        checkpoint = open_checkpoint(str(DATA / name))
        options = EngineOptions(
            dtype="float32",
            tensor_parallel_size=devices,
            layout=layout,
            num_pages=PAGES + 1,
            kernels=kernels,
        )
        cluster = one_engine(options)
        group = cluster.groups["engine"].model_copy(update={"mesh": mesh})
        cluster = cluster.model_copy(update={"groups": {"engine": group}})
        ((self.plan,),) = plan_cluster(checkpoint.config, cluster).values()
        (self.parameters,) = load_parameters(checkpoint, [self.plan])
        self.table = 1 + np.random.default_rng(0).permutation(PAGES).astype(np.int32)
        self.clear()
        self.step = jax.jit(self._step)

    def clear(self) -> None:
        plan = self.plan
        self.kv = allocate(
            abstract_pages(plan.config, plan.layers, PAGES + 1, PAGE_SIZE, plan.dtype, plan.mesh)
        )

    def _step(self, parameters: Any, kv: Any, token_T: jax.Array, batch: PagedBatch) -> Any:
        with jax.default_matmul_precision("highest"):
            plan = self.plan
            parameters = ready(plan.layers, plan.config.layout, parameters)
            model: Any = nnx.merge(plan.graphdef, parameters)
            x_TD, kv = model(model.embed(token_T, batch), kv, batch)
            return model.logits(x_TD), kv

    def __call__(self, tokens: np.ndarray, start: int) -> np.ndarray:
        """Compute tokens: one is a decode, more are a chunk."""
        count = len(tokens)
        row = np.arange(ROWS)
        position = np.where(row < count, start + row, 0)
        is_chunk = count > 1
        batch = PagedBatch(
            position_T=position,
            page_T=np.where(row < count, self.table[position // PAGE_SIZE], 0),
            offset_T=position % PAGE_SIZE,
            decode_table_SM=self.table[None],
            decode_length_S=np.array([0 if is_chunk else start + 1]),
            chunk_table_CM=self.table[None],
            chunk_start_C=np.array([start]),
            chunk_row_C1=np.array([0, count] if is_chunk else [1, 1]),
        )
        batch = PagedBatch(*(x.astype(np.int32) for x in batch))
        padded = np.zeros(ROWS, np.int32)
        padded[:count] = tokens
        with jax.set_mesh(self.plan.mesh):
            logits, self.kv = self.step(self.parameters, self.kv, padded, batch)
        return np.asarray(logits)[:count]


def expected(name: str) -> tuple[np.ndarray, np.ndarray]:
    with np.load(DATA / name / "expected.npz") as arrays:
        return arrays["tokens"], arrays["logits"]


def pieces(model: Model, tokens: np.ndarray, sizes: list[int]) -> np.ndarray:
    model.clear()
    bounds = np.cumsum([0, *sizes])
    parts = [model(tokens[a:b], int(a)) for a, b in pairwise(bounds)]
    return np.concatenate(parts)


# qwen2_window has qwen2's parts.
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow) if n == "qwen2" else n for n in CASES]
)
def test_logits_whole_chunked_and_token_by_token(name: str) -> None:
    model = Model(name)
    tokens, logits = expected(name)
    assert np.abs(logits).max() > 1, "too small to show a difference"
    for sizes in ([75], [33, 2, 1, 39], [1] * 75):
        got = pieces(model, tokens, sizes)
        np.testing.assert_allclose(got, logits, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    "name",
    [
        *("mixtral", "qwen3"),
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("gemma3", "opt", "qwen2")),
    ],
)
def test_logits_on_devices_that_divide_neither_heads_nor_columns(name: str) -> None:
    tokens, logits = expected(name)
    model = Model(name, devices=3 if name == "opt" else 4)
    config = open_checkpoint(str(DATA / name)).config
    assert model.plan.config.num_key_value_heads > config.num_key_value_heads
    assert model.plan.config.intermediate_size > config.intermediate_size
    got = pieces(model, tokens, [60, 1, 14])
    np.testing.assert_allclose(got, logits, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("name", "layout", "mesh"),
    [
        ("qwen3", "fsdp", {"x": 2, "y": 4}),
        *(
            pytest.param(name, layout, mesh, marks=pytest.mark.slow)
            for name, layout, mesh in (
                ("gemma3", "weight_gathered", {"x": 2, "y": 4}),
                ("gemma3", "context_parallel", {"x": 8}),
                ("opt", "weight_stationary_2d", {"x": 4, "y": 2}),
                ("opt", "attention_dp", {"x": 2, "y": 4}),
                ("mixtral", "expert_parallel", {"x": 3, "y": 2}),
                ("mixtral", "expert_all_to_all", {"x": 1, "y": 2}),
                ("qwen2_window", "sequence_parallel", {"x": 4, "y": 2}),
            )
        ),
    ],
)
def test_logits_of_other_layouts(name: str, layout: str, mesh: dict[str, int]) -> None:
    tokens, logits = expected(name)
    model = Model(name, math.prod(mesh.values()), layout, mesh)
    got = pieces(model, tokens, [60, 1, 14])
    np.testing.assert_allclose(got, logits, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("name", "layout", "mesh"),
    [
        ("qwen2", "megatron", {"tp": 1}),
        ("gemma3", "megatron", {"tp": 4}),
        *(
            pytest.param(name, layout, mesh, marks=pytest.mark.slow)
            for name, layout, mesh in (
                ("opt", "megatron", {"tp": 1}),
                ("qwen3", "weight_stationary_2d", {"x": 2, "y": 2}),
                ("qwen2_window", "attention_dp", {"x": 2, "y": 2}),
            )
        ),
    ],
)
def test_logits_of_joined_weights(name: str, layout: str, mesh: dict[str, int]) -> None:
    """Beside kernels of GPUs, which are interpreted here."""
    tokens, logits = expected(name)
    model = Model(name, math.prod(mesh.values()), layout, mesh, kernels="interpret")
    assert len(model.plan.joined) == model.plan.config.num_hidden_layers
    got = pieces(model, tokens, [60, 1, 14])
    np.testing.assert_allclose(got, logits, atol=1e-4, rtol=0)


def test_whole_experts_on_each_device() -> None:
    tokens, logits = expected("mixtral")
    model = Model("mixtral", devices=3, layout=str(EXPERT_RULES))
    gate = model.plan.parameters["layers.0.mlp.gate_EDF"]
    assert gate.sharding
    assert gate.sharding.shard_shape(gate.shape) == (2, *gate.shape[1:])
    np.testing.assert_allclose(pieces(model, tokens, [74, 1]), logits, atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe_unnormalised"])
def test_a_mixtures_greedy_tokens_with_numba_and_with_xla(name: str) -> None:
    """The first is the reference's likeliest."""
    pytest.importorskip("numba")
    tokens, logits = expected(name)
    found: list[list[int]] = []
    for kernels in ("numba", "plain"):
        model = Model(name, kernels=kernels)
        following = [int(model(tokens[:20], 0)[-1].argmax())]
        while len(following) < 12:
            last = model(np.array(following[-1:]), 19 + len(following))
            following.append(int(last[-1].argmax()))
        found.append(following)
    assert found[0] == found[1]
    assert found[0][0] == logits[19].argmax()
    assert len(set(found[0])) > 3


GEMMA_1B = {
    "architectures": ["Gemma3ForCausalLM"], "vocab_size": 262144, "hidden_size": 1152,
    "intermediate_size": 6912, "num_hidden_layers": 26, "num_attention_heads": 4,
    "num_key_value_heads": 1, "head_dim": 256, "max_position_embeddings": 32768,
    "query_pre_attn_scalar": 256, "sliding_window": 512,
}  # fmt: skip


def config_of(folder: Path, values: dict[str, Any]) -> ModelConfig:
    (folder / "config.json").write_text(json.dumps(values))
    return read_folder_config(folder)


def test_gemma_of_transformers_4_and_5(tmp_path: Path) -> None:
    """The same model, as both write it."""
    four = {
        "rope_theta": 1000000,
        "rope_local_base_freq": 10000,
        "rope_scaling": None,
        "sliding_window_pattern": 6,
    }
    kinds = ["sliding_attention"] * 5 + ["full_attention"]
    rope = {kinds[0]: {"rope_theta": 1e4}, kinds[-1]: {"rope_theta": 1e6, "rope_type": "default"}}
    five = {"layer_types": (kinds * 5)[:26], "rope_parameters": rope}
    config = config_of(tmp_path, GEMMA_1B | four)
    assert config == config_of(tmp_path, GEMMA_1B | five)
    assert config.windows == ((512,) * 5 + (None,)) * 4 + (512,) * 2
    assert config.attention_scale == 1 / 16
    assert config.rope
    assert config.local_rope
    assert config.rope.frequencies[1] == pytest.approx(1e6 ** (-2 / 256))
    assert config.local_rope.frequencies[1] == pytest.approx(1e4 ** (-2 / 256))


LLAMA = {
    "architectures": ["Qwen2ForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 32768,
}
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}


def test_yarn_stretches_the_longest_sequence(tmp_path: Path) -> None:
    """Qwen's recipe leaves max_position_embeddings as it was."""
    assert config_of(tmp_path, LLAMA).max_position_embeddings == 32768
    stretched = config_of(tmp_path, LLAMA | {"rope_scaling": YARN})
    assert stretched.max_position_embeddings == 4 * 32768


def test_windows(tmp_path: Path) -> None:
    """Absent is what transformers has for it, null is none."""
    some = {"use_sliding_window": True, "max_window_layers": 3, "sliding_window": 8}
    assert config_of(tmp_path, LLAMA | some).windows == (None, None, None, 8)
    mistral = LLAMA | {"architectures": ["MistralForCausalLM"]}
    assert config_of(tmp_path, mistral).windows == (4096,) * 4
    assert config_of(tmp_path, mistral | {"sliding_window": None}).windows == (None,) * 4
    mixtral = LLAMA | {"architectures": ["MixtralForCausalLM"]}
    assert config_of(tmp_path, mixtral).windows == (None,) * 4
    # All layers, whatever max_window_layers says.
    qwen3_moe = LLAMA | {"architectures": ["Qwen3MoeForCausalLM"]}
    assert config_of(tmp_path, qwen3_moe | some).windows == (8,) * 4
    assert config_of(tmp_path, qwen3_moe).windows == (None,) * 4


@pytest.mark.parametrize(
    ("changes", "fragment"),
    [
        ({"rope_scaling": YARN, "rope_parameters": {"rope_theta": 1e6}}, "or absent"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e6}}}, "full_attention"),
        ({"rope_scaling": YARN | {"rope_theta": 1.0}}, "rope_theta is 1.0, must be above 1"),
        ({"rope_theta": float("inf")}, "rope_theta is inf"),
        ({"dual_chunk_attention_config": {}}, "dual_chunk_attention_config"),
    ],
)
def test_refused(tmp_path: Path, changes: dict[str, Any], fragment: str) -> None:
    with pytest.raises(JaxinferError) as caught:
        config_of(tmp_path, LLAMA | changes)
    assert fragment in str(caught.value)
    assert "\n" not in str(caught.value)
