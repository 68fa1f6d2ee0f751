"""Parameters made on the device of a file's tensors, beside the file's own numbers."""

import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial, partialmethod
from pathlib import Path
from typing import Any

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoint_files import LAYER, make_gguf, make_weights, plan_alone
from hypothesis import given
from hypothesis import strategies as st
from properties import examples
from safetensors.numpy import load_file
from tiny_model import write_tiny_mixture
from waiting import HANG_S

from jaxinfer.checkpoints.checkpoint import open_checkpoint
from jaxinfer.checkpoints.gguf_file import GGUFTensor
from jaxinfer.checkpoints.small_model import small_checkpoint
from jaxinfer.config.engine import EngineOptions
from jaxinfer.models.weights import heads_in, heads_out, stacked
from jaxinfer.runtime.stage import load_weights
from jaxinfer.runtime.stage.goal import ParameterGoal
from jaxinfer.runtime.stage.load_weights import load_parameters
from jaxinfer.runtime.stage.stage_plan import StagePlan


@pytest.fixture(params=["by numpy", "on the device"])
def on_device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    bound = 0 if request.param == "on the device" else 2**30
    monkeypatch.setattr(load_weights, "ON_DEVICE", bound)


def plan_for(model: str, **options: Any) -> StagePlan:
    sizes = {"max_num_seqs": 4, "max_num_batched_tokens": 32, "page_size": 8, "num_pages": 9}
    checkpoint = open_checkpoint(model)
    return plan_alone(checkpoint.config, EngineOptions(max_model_len=64, **(sizes | options)))


def values(model: str, plan: StagePlan) -> dict[str, np.ndarray]:
    (state,) = load_parameters(open_checkpoint(model), [plan])
    leaves = jax.tree_util.tree_flatten_with_path(state)[0]
    found = {}
    for path, leaf in leaves:
        name = ".".join(str(getattr(key, "key", "")) for key in path[:-1])
        assert leaf.sharding == plan.parameters[name].sharding
        found[name] = np.asarray(leaf)
    assert found.keys() == plan.parameters.keys()
    return found


@pytest.mark.parametrize("devices", [1, 2, 3])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_of_a_folder(tiny_folder: Path, on_device: None, devices: int, dtype: str) -> None:
    """Three devices pad two KV heads, and 64 feed-forward columns, with zeros."""
    plan = plan_for(str(tiny_folder), tensor_parallel_size=devices, dtype=dtype)
    tensors = load_file(tiny_folder / "model.safetensors")
    found = values(str(tiny_folder), plan)
    D, N, K, H, F = 32, 4, 2, 8, 64

    def check(path: str, expected: np.ndarray) -> None:
        kept = tuple(slice(size) for size in expected.shape)
        np.testing.assert_array_equal(found[path][kept], expected.astype(found[path].dtype))
        padding = found[path].astype(np.float32)
        padding[kept] = 0
        assert not padding.any()

    check("embed_VD", tensors["model.embed_tokens.weight"])
    for i in range(2):
        hf, ours = f"model.layers.{i}.", f"layers.{i}."
        q_TD, o_DT = (tensors[f"{hf}self_attn.{name}_proj.weight"] for name in "qo")
        q_DNH, o_NHD = np.empty((D, N, H), np.float32), np.empty((N, H, D), np.float32)
        for n in range(N):
            for h in range(H):
                q_DNH[:, n, h], o_NHD[n, h] = q_TD[n * H + h], o_DT[:, n * H + h]
        check(ours + "attn.q_DNH", q_DNH)
        check(ours + "attn.o_NHD", o_NHD)
        check(ours + "mlp.down_FD", np.einsum("df->fd", tensors[hf + "mlp.down_proj.weight"]))
    assert found["layers.0.attn.k_DKH"].shape == (D, -(-K // devices) * devices, H)
    assert found["layers.0.mlp.up_DF"].shape == (D, -(-F // devices) * devices)


def test_of_experts(tmp_path: Path, on_device: None) -> None:
    folder = write_tiny_mixture(tmp_path)
    tensors = load_file(folder / "model.safetensors")
    up_EDF = values(str(folder), plan_for(str(folder)))["layers.0.mlp.up_EDF"]
    for e, up_DF in enumerate(up_EDF):
        name = f"model.layers.0.block_sparse_moe.experts.{e}.w3.weight"
        np.testing.assert_array_equal(up_DF, tensors[name].T)


@pytest.mark.parametrize("options", [{}, {"weight_dtype": "int8"}], ids=["wide", "int8"])
def test_blocks_of_q8_0(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    """A device makes of them what llama.cpp's package does, queries' rows in order."""
    weights, kind = make_weights(), gguf.GGMLQuantizationType.Q8_0
    types = {name: kind for name, array in weights.items() if array.ndim == 2}
    file = make_gguf(tmp_path / "x.gguf", weights, types)
    plan = plan_for(str(file), **options)
    monkeypatch.setattr(load_weights, "ON_DEVICE", 0)
    monkeypatch.setattr(GGUFTensor, "load", partialmethod(_only_vectors, GGUFTensor.load))
    by_device = values(str(file), plan)
    monkeypatch.undo()
    by_numpy = values(str(file), plan)
    for path, array in by_numpy.items():
        wide = array.astype(np.float32), by_device[path].astype(np.float32)
        # A compiler multiplies scales by what numpy divides by.
        np.testing.assert_allclose(*wide, rtol=1.3e-7 if "_scale_" in path else 0, err_msg=path)
    if not options:
        rows = gguf.dequantize(
            gguf.quantize(weights[LAYER + "self_attn.q_proj.weight"], kind), kind
        )
        np.testing.assert_array_equal(
            by_device["layers.0.attn.q_DNH"], rows.reshape(4, 8, 32).transpose(2, 0, 1)
        )


def _only_vectors(tensor: GGUFTensor, load: Callable[[GGUFTensor], np.ndarray]) -> np.ndarray:
    assert len(tensor.shape) == 1, "dequantised on the host"
    return load(tensor)


@examples(10)
@given(st.data())
def test_numpy_and_the_device_agree(data: st.DataObject) -> None:
    draw, sizes = data.draw, st.integers(1, 4)
    heads, head_dim, D = draw(sizes), draw(sizes), draw(sizes)
    spec = draw(
        st.sampled_from(
            [
                heads_out("x", heads, head_dim, D),
                heads_in("x", heads, head_dim, D),
                stacked("x{}", heads, head_dim, D),
            ]
        )
    )
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    tensors = [rng.normal(size=spec.shape).astype(np.float16) for _ in spec.tensors]
    expected = spec.made_of(tensors, np.stack)
    pads = [draw(st.integers(0, 2)) for _ in expected.shape]
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("tp",))
    whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    shape = tuple(size + more for size, more in zip(expected.shape, pads, strict=True))
    to = jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=whole)
    goal = ParameterGoal(to, None, to.dtype)
    program = load_weights._program(spec.convert, isinstance(spec.names, str), goal)
    (by_device,) = program([jnp.asarray(tensor) for tensor in tensors])
    (by_numpy,) = goal.made_of(expected, np)
    assert by_numpy.shape == shape
    np.testing.assert_array_equal(by_device, by_numpy)


def test_layers_share_programs(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers are alike: q, k and v, o, gate and up, down; and the scales' and tables' are none."""
    made = []

    def program(*args: Any) -> Callable[..., jax.Array]:
        made.append(args)
        return load(*args)

    load = load_weights._program
    monkeypatch.setattr(load_weights, "ON_DEVICE", 0)
    monkeypatch.setattr(load_weights, "_program", program)
    load_parameters(open_checkpoint(str(tiny_folder)), [plan_for(str(tiny_folder))])
    assert len(made) == len(set(made)) == 5


def test_tensors_of_two_parameters_at_most_are_read_at_once() -> None:
    checkpoint, second, reading, most = small_checkpoint(), threading.Event(), [], []

    def read(name: str, load: Callable[[], np.ndarray]) -> np.ndarray:
        reading.append(name)
        most.append(len(reading))
        if len(reading) > 1:
            second.set()
        assert second.wait(HANG_S)
        reading.remove(name)
        return load()

    tensors = {
        name: replace(tensor, load=partial(read, name, tensor.load))
        for name, tensor in checkpoint.tensors.items()
    }
    options: dict[str, Any] = {"max_num_seqs": 4, "max_num_batched_tokens": 32, "num_pages": 9}
    plan = plan_alone(checkpoint.config, EngineOptions(max_model_len=64, **options))
    load_parameters(replace(checkpoint, tensors=tensors), [plan])
    assert len(most) == len(tensors)
    assert max(most) == 2
