"""Runs with weights of 8 bits, beside runs of the same weights in float32, quantised by numpy."""

import json
import re
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from checkpoint_files import plan_alone
from cluster_cases import load as load_cluster_of
from safetensors.numpy import load_file, save_file
from scatter import spread
from tiny_model import TINY_OPTIONS, write_tiny_mixture, write_tiny_model

from jaxinfer import LLM, JaxinferError, SamplingParams
from jaxinfer.checkpoints.checkpoint import open_checkpoint
from jaxinfer.config.cluster import ClusterConfig
from jaxinfer.config.engine import EngineOptions
from jaxinfer.convert import convert
from jaxinfer.runtime.stage import load_weights
from jaxinfer.runtime.stage.cluster_plan import plan_cluster
from jaxinfer.runtime.stage.load_weights import load_parameters

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=1)
PROMPTS = [{"prompt_token_ids": list(range(3, 3 + n))} for n in (1, 5, 40)]
FORMATS = {"int8": (np.dtype(np.int8), 127), "fp8": (np.dtype(ml_dtypes.float8_e4m3fn), 448)}
formats = pytest.mark.parametrize("weight_dtype", FORMATS)


def run(folder: Path, **options: Any) -> tuple[list[list[int]], np.ndarray]:
    """Greedy tokens, and their log probabilities."""
    llm = LLM(str(folder), progress=False, **TINY_OPTIONS | options)
    outputs = [each.outputs[0] for each in llm.generate(PROMPTS, GREEDY, progress=False)]
    found = [
        entry[token].logprob
        for output in outputs
        for token, entry in zip(output.token_ids, output.logprobs or (), strict=True)
    ]
    return [output.token_ids for output in outputs], np.array(found)


def is_linear(name: str) -> bool:
    return "_proj." in name


def channels(weight: np.ndarray, weight_dtype: str) -> tuple[np.ndarray, np.ndarray]:
    """Values of 8 bits [out, in] and scales [out], channel by channel."""
    dtype, largest = FORMATS[weight_dtype]
    values, scale = np.zeros(weight.shape, dtype), np.zeros(len(weight), np.float32)
    for row, channel in enumerate(weight):
        scale[row] = np.float32(np.abs(channel).max()) / np.float32(largest)
        share = channel / scale[row]
        values[row] = (np.rint(share) if weight_dtype == "int8" else share).astype(dtype)
    return values, scale


def write_dequantised(folder: Path, weight_dtype: str) -> Path:
    """The tiny model in float32, of the numbers that its weights of 8 bits stand for."""
    folder.mkdir()
    write_tiny_model(folder)
    tensors = load_file(folder / "model.safetensors")
    for name, weight in tensors.items():
        if is_linear(name):
            values, scale = channels(weight, weight_dtype)
            tensors[name] = values.astype(np.float32) * scale[:, None]
    save_file(tensors, folder / "model.safetensors")
    return folder


@formats
@pytest.mark.parametrize("kernels", ["plain", "numba"])
@pytest.mark.slow
def test_tokens_of_the_same_weights_in_float32(
    tiny_folder: Path, tmp_path: Path, weight_dtype: str, kernels: str
) -> None:
    wide = write_dequantised(tmp_path / "wide", weight_dtype)
    expected, logprobs = run(wide, kernels=kernels)
    tokens, found = run(tiny_folder, kernels=kernels, weight_dtype=weight_dtype)
    assert tokens == expected
    np.testing.assert_allclose(found, logprobs, atol=1e-4)
    # The numbers are others than those that were not rounded.
    assert np.abs(found - run(tiny_folder, kernels=kernels)[1]).max() > 1e-3


@formats
@pytest.mark.parametrize("devices", [2, 3])
@pytest.mark.slow
def test_several_devices_find_the_tokens_of_one(
    tiny_folder: Path, weight_dtype: str, devices: int
) -> None:
    """Scales lie where their channels do; three devices pad heads and columns."""
    expected, logprobs = run(tiny_folder, weight_dtype=weight_dtype)
    tokens, found = run(tiny_folder, weight_dtype=weight_dtype, tensor_parallel_size=devices)
    assert tokens == expected
    np.testing.assert_allclose(found, logprobs, atol=1e-4)


CONFIGS = {
    "int8": {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "ignore": ["lm_head"],
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "input_activations": None,
                "weights": {
                    "num_bits": 8,
                    "type": "int",
                    "strategy": "channel",
                    "symmetric": True,
                },
            }
        },
    },
    "fp8": {"quant_method": "fp8", "activation_scheme": "static"},
}


def write_quantised(
    folder: Path, weight_dtype: str, left_out: str = "none", **changes: Any
) -> tuple[Path, dict[str, np.ndarray]]:
    """The tiny model with weights of 8 bits and scales, by channel for int8, by tensor for fp8.

    Also what its tensors are in float32. Names that match ``left_out`` stay as they are.
    """
    folder.mkdir()
    write_tiny_model(folder)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = CONFIGS[weight_dtype] | changes
    (folder / "config.json").write_text(json.dumps(config))
    tensors = load_file(folder / "model.safetensors")
    wide = dict(tensors)
    for name in [name for name in tensors if is_linear(name) and not re.search(left_out, name)]:
        values, scale = channels(tensors[name], weight_dtype)
        if weight_dtype == "fp8":
            scale = np.abs(tensors[name]).max() / np.float32(448)
            values = (tensors[name] / scale).astype(values.dtype)
            tensors[name.replace("weight", "input_scale")] = np.float32([0.5])
        tensors[name] = values
        tensors[f"{name}_scale"] = np.float32(scale).reshape(-1, *[1] * (weight_dtype == "int8"))
        wide[name] = values.astype(np.float32) * tensors[f"{name}_scale"]
    save_file(tensors, folder / "model.safetensors")
    return folder, wide


@pytest.mark.slow
@formats
@pytest.mark.parametrize("on_device", [0, 2**30])
@pytest.mark.parametrize("devices", [1, 3])
def test_a_checkpoint_of_8_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, weight_dtype: str, on_device: int, devices: int
) -> None:
    """The checkpoint's own numbers and scales count, by default."""
    monkeypatch.setattr(load_weights, "ON_DEVICE", on_device)
    folder, numbers = write_quantised(tmp_path / "narrow", weight_dtype)
    wide = write_dequantised(tmp_path / "wide", weight_dtype)
    save_file(numbers, wide / "model.safetensors")
    expected, logprobs = run(wide, kernels="plain")
    tokens, found = run(folder, kernels="plain", tensor_parallel_size=devices)
    assert tokens == expected
    np.testing.assert_allclose(found, logprobs, atol=1e-4)


@formats
def test_what_a_checkpoint_of_8_bits_is_loaded_as(tmp_path: Path, weight_dtype: str) -> None:
    folder, wide = write_quantised(tmp_path / "narrow", weight_dtype)
    checkpoint = open_checkpoint(str(folder))
    plan = plan_alone(checkpoint.config, EngineOptions(**TINY_OPTIONS))
    (state,) = load_parameters(checkpoint, [plan])
    mlp = state["layers"][0]["mlp"]
    expected = wide["model.layers.0.mlp.up_proj.weight"].T
    assert mlp["up_DF"][...].dtype == FORMATS[weight_dtype][0]
    got = np.asarray(mlp["up_DF"][...]).astype(np.float32) * np.asarray(mlp["up_scale_F"][...])
    np.testing.assert_array_equal(got, expected)


# A whole attention, one half of a gated pair, and the last product of a layer.
LEFT_OUT = {
    "int8": {"ignore": ["lm_head", "re:.*layers\\.0\\.self_attn", "model.layers.0.mlp.gate_proj",
                        "model.layers.1.mlp.down_proj"]},
    "fp8": {"modules_to_not_convert": ["lm_head", "model.layers.0.self_attn", "0.mlp.gate_proj",
                                       "model.layers.1.mlp.down_proj"]},
}  # fmt: skip
NAMES_LEFT_OUT = "layers.0.self_attn|layers.0.mlp.gate|layers.1.mlp.down"


@formats
@pytest.mark.parametrize(
    "options",
    [
        {"kernels": "plain"},
        pytest.param({"kernels": "numba"}, marks=pytest.mark.slow),
        pytest.param({"tensor_parallel_size": 3, "kernels": "plain"}, marks=pytest.mark.slow),
        pytest.param(
            {"tensor_parallel_size": 2, "layout": "fsdp", "kernels": "plain"},
            marks=pytest.mark.slow,
        ),
    ],
)
def test_layers_left_out_of_a_checkpoint_of_8_bits(
    tmp_path: Path, weight_dtype: str, options: dict[str, Any]
) -> None:
    """Tokens and log probabilities are those of the dequantised numbers in float32."""
    folder, numbers = write_quantised(
        tmp_path / "narrow", weight_dtype, NAMES_LEFT_OUT, **LEFT_OUT[weight_dtype]
    )
    wide = write_dequantised(tmp_path / "wide", weight_dtype)
    save_file(numbers, wide / "model.safetensors")
    expected, logprobs = run(wide, kernels="plain")
    tokens, found = run(folder, **options)
    assert tokens == expected
    np.testing.assert_allclose(found, logprobs, atol=1e-4)


@formats
@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_layers_left_out_keep_their_numbers(
    tmp_path: Path, weight_dtype: str, load_format: str
) -> None:
    """In stages, too, whose layers have numbers of their own; bytes are counted."""
    folder, numbers = write_quantised(
        tmp_path / "narrow", weight_dtype, NAMES_LEFT_OUT, **LEFT_OUT[weight_dtype]
    )
    checkpoint = open_checkpoint(str(folder), load_format)
    stages = [{"group": name, "layers": 1} for name in "pq"]
    options = TINY_OPTIONS | {"load_format": load_format}
    cluster = ClusterConfig.model_validate(
        {
            "groups": {"p": {}, "q": {}},
            "instances": {"x": {"stages": stages, **options}},
        }
    )
    (plans,) = plan_cluster(checkpoint.config, cluster).values()
    first, second = load_parameters(checkpoint, plans)
    narrow = FORMATS[weight_dtype][0]
    for state, kinds in ((first, {"q": 32, "gate": 32, "up": 8}), (second, {"q": 8, "down": 32})):
        layer = state["layers"][0]
        leaves = {"q": layer["attn"]["q_DNH"], "gate": layer["mlp"]["gate_DF"]}
        leaves |= {"up": layer["mlp"]["up_DF"], "down": layer["mlp"]["down_FD"]}
        for kind, bits in kinds.items():
            wanted = narrow if bits == 8 else np.dtype(np.float32)
            assert leaves[kind][...].dtype == wanted, kind
    if load_format == "auto":
        down = np.asarray(second["layers"][0]["mlp"]["down_FD"][...])
        np.testing.assert_array_equal(down, numbers["model.layers.1.mlp.down_proj.weight"].T)
    for plan, state in zip(plans, (first, second), strict=True):
        held = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
        assert plan.weight_bytes == held


UP = "model.layers.1.mlp.up_proj.weight"


@pytest.mark.parametrize(
    ("changes", "options", "tensors", "message"),
    [
        (
            {},
            {"weight_dtype": "fp8"},
            {},
            "weight_dtype is fp8, the checkpoint has int8: leave it auto",
        ),
        ({}, {}, {f"{UP}_scale": None}, f"missing {UP}_scale"),
        ({}, {}, {UP: np.ones((64, 32), np.float32)}, f"{UP} has type F32, must be I8"),
        (
            {},
            {},
            {f"{UP}_scale": np.ones((5, 1), np.float32)},
            f"{UP}_scale has shape (5, 1), must be one of",
        ),
        ({"format": "pack-quantized"}, {}, {}, "format is 'pack-quantized', must be one of"),
        (
            {"quant_method": "fp8", "weight_block_size": [128, 128]},
            {},
            {},
            "quantization_config.weight_block_size is [128, 128], must be None",
        ),
        ({"quant_method": "gptq"}, {}, {}, "quant_method is 'gptq', must be one of"),
        ({"ignore": ["re:.*layers.1.mlp.up_proj"]}, {}, {}, f"{UP} has type I8, must be of 16 or"),
    ],
)
def test_checkpoints_of_8_bits_that_are_refused(
    tmp_path: Path,
    changes: dict[str, Any],
    options: dict[str, Any],
    tensors: dict[str, np.ndarray | None],
    message: str,
) -> None:
    folder, _ = write_quantised(tmp_path / "narrow", "int8", **changes)
    found = load_file(folder / "model.safetensors") | tensors
    save_file({n: x for n, x in found.items() if x is not None}, folder / "model.safetensors")
    with pytest.raises(JaxinferError) as error:
        load(folder, **options)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def load(folder: Path, **options: Any) -> None:
    checkpoint = open_checkpoint(str(folder))
    load_parameters(
        checkpoint, [plan_alone(checkpoint.config, EngineOptions(**TINY_OPTIONS | options))]
    )


def test_weights_of_8_bits_without_a_word_in_the_configuration(tmp_path: Path) -> None:
    folder, _ = write_quantised(tmp_path / "narrow", "int8")
    with pytest.raises(JaxinferError, match="has weights of 8 bits: run it as it is"):
        convert(str(folder), str(tmp_path / "converted"), None, False)
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    tensors = load_file(folder / "model.safetensors")
    bare = {name: x for name, x in tensors.items() if not name.endswith("_scale")}
    save_file(bare, folder / "model.safetensors")
    with pytest.raises(JaxinferError, match=r"q_proj.weight has type I8, must be of 16 or 32 bits"):
        load(folder)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["fsdp", "weight_stationary_2d", "attention_dp"])
def test_layouts_find_the_tokens_of_one_device(tiny_folder: Path, layout: str) -> None:
    expected, logprobs = run(tiny_folder, weight_dtype="int8")
    tokens, found = run(
        tiny_folder, weight_dtype="int8", layout=layout, tensor_parallel_size=2, kernels="plain"
    )
    assert tokens == expected
    np.testing.assert_allclose(found, logprobs, atol=1e-4)


@formats
@pytest.mark.parametrize("on_device", [0, 2**30])
@pytest.mark.parametrize("devices", [1, 3])
def test_values_and_scales(
    tiny_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    weight_dtype: str,
    on_device: int,
    devices: int,
) -> None:
    """Numpy, the device and a converted folder agree; padding is zero; bytes are counted."""
    monkeypatch.setattr(load_weights, "ON_DEVICE", on_device)
    tensors = load_file(tiny_folder / "model.safetensors")
    options = EngineOptions(**TINY_OPTIONS, weight_dtype=weight_dtype, tensor_parallel_size=devices)
    for model in (
        str(tiny_folder),
        str(convert(str(tiny_folder), str(tmp_path / "c"), None, False)),
    ):
        checkpoint = open_checkpoint(model)
        plan = plan_alone(checkpoint.config, options)
        (state,) = load_parameters(checkpoint, [plan])
        attn, mlp = state["layers"][1]["attn"], state["layers"][1]["mlp"]
        hf = "model.layers.1."
        for leaf, scales, name, heads in (
            (attn["k_DKH"], attn["k_scale_KH"], "self_attn.k_proj", 2),
            (attn["o_NHD"], attn["o_scale_D"], "self_attn.o_proj", None),
            (mlp["down_FD"], mlp["down_scale_D"], "mlp.down_proj", None),
        ):
            values, scale = channels(tensors[f"{hf}{name}.weight"], weight_dtype)
            if heads:
                values = values.reshape(heads, -1, values.shape[1]).transpose(2, 0, 1)
                scale = scale.reshape(heads, -1)
            else:
                values = values.T.reshape(-1, *leaf[...].shape[1:])
            got, got_scale = np.asarray(leaf[...]), np.asarray(scales[...])
            assert got.dtype == FORMATS[weight_dtype][0]
            at = tuple(slice(size) for size in values.shape)
            np.testing.assert_array_equal(got[at].view(np.uint8), values.view(np.uint8))
            # A compiler multiplies by what numpy divides by.
            kept = tuple(slice(size) for size in scale.shape)
            np.testing.assert_allclose(got_scale[kept], scale, rtol=1.3e-7)
            rest = got.astype(np.float32)
            rest[at] = 0
            assert not rest.any()
        leaves = jax.tree.leaves(state)
        held = sum(s.data.nbytes for leaf in leaves for s in leaf.addressable_shards)
        assert plan.weight_bytes == held
        assert {leaf.dtype for leaf in leaves} == {jnp.dtype("float32"), FORMATS[weight_dtype][0]}


def test_random_weights_are_those_of_wide_ones(tiny_folder: Path) -> None:
    checkpoint, found = open_checkpoint(str(tiny_folder)), []
    for options in ({"weight_dtype": "int8"}, {}):
        plan = plan_alone(
            checkpoint.config, EngineOptions(**TINY_OPTIONS, **options, load_format="dummy")
        )
        found += load_parameters(checkpoint, [plan])
    ours, wide = (state["layers"][0]["mlp"] for state in found)
    near = np.asarray(ours["up_DF"][...]) * np.asarray(ours["up_scale_F"][...])
    largest = np.abs(np.asarray(wide["up_DF"][...])).max(0)
    assert np.all(np.abs(near - wide["up_DF"][...]) <= 0.51 * largest / 127)


def test_a_mixture_is_refused(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(str(write_tiny_mixture(tmp_path)))
    with pytest.raises(
        JaxinferError, match=r"^weight_dtype is fp8: a mixture's weights must be of 16"
    ):
        plan_alone(checkpoint.config, EngineOptions(**TINY_OPTIONS, weight_dtype="fp8"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("weight_dtype", "bound"),
    [("int8", 0.075), pytest.param("fp8", 0.2, marks=pytest.mark.long)],
)
def test_log_probabilities_of_the_demo_model(weight_dtype: str, bound: float) -> None:
    """The changes are small, over 900 tokens of Python's own help."""
    found = []
    for options in ({}, {"weight_dtype": weight_dtype}):
        llm = LLM(
            "smollm2-135m-instruct",
            progress=False,
            dtype="float32",
            max_num_seqs=2,
            max_num_batched_tokens=64,
            token_buckets=[64],
            num_pages=20,
            max_model_len=512,
            **options,  # type: ignore[arg-type]
        )
        texts = [topics[name] for name in ("formatstrings", "types")]
        prompts = [{"prompt_token_ids": [*llm.tokenizer.encode(text)][:450]} for text in texts]
        params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
        outputs = llm.generate(prompts, params, progress=False)
        rows = [row for out in outputs for row in (out.prompt_logprobs or ())[1:] if row]
        found.append(np.array([next(iter(row.values())).logprob for row in rows]))
    change = np.abs(found[1] - found[0])
    assert len(change) == 2 * 449
    assert 0.001 < change.mean() < bound, change.mean()


@pytest.mark.slow
@pytest.mark.parametrize("where", ["stages", "attention groups"])
def test_instances_of_several_parts_find_the_tokens_of_one(
    tiny_folder: Path, tmp_path: Path, where: str
) -> None:
    expected, _ = run(tiny_folder, weight_dtype="int8", kernels="plain")
    sections: dict[str, Any] = spread([20, 40])
    if where == "stages":
        stages = [{"group": name, "layers": 1} for name in "pq"]
        sections = {"groups": {"p": {}, "q": {}}, "instances": {"x": {"stages": stages}}}
        sections["system"] = "single"
    sections["instances"]["x"] |= TINY_OPTIONS | {"weight_dtype": "int8", "kernels": "plain"}
    llm = load_cluster_of(tiny_folder, tmp_path, **sections)
    outputs = llm.generate(PROMPTS, GREEDY, progress=False)
    assert [each.outputs[0].token_ids for each in outputs] == expected
