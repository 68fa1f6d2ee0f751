"""What quantization_config says of linear weights: taken, with the layers left out, or refused."""

import copy
from pathlib import Path
from typing import Any

import pytest

from jaxinfer.checkpoints.config_readers import read_architecture
from jaxinfer.checkpoints.quantization import linear_weights, with_stored_bits
from jaxinfer.errors import JaxinferError
from jaxinfer.models.config import ModelConfig
from jaxinfer.models.config_keys import Keys
from jaxinfer.models.eight_bits import scale_path
from jaxinfer.models.registry import ARCHITECTURES

SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "ffn_dim": 48,
    "num_hidden_layers": 12, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
}  # fmt: skip
WEIGHTS = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}
GROUP = {"targets": ["Linear"], "weights": WEIGHTS, "input_activations": None}
COMPRESSED = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "ignore": ["lm_head"],
    "config_groups": {"group_0": GROUP},
}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}


def read(quantization: Any, architecture: str = "LlamaForCausalLM", **more: Any) -> ModelConfig:
    values = SIZES | {"architectures": [architecture], "quantization_config": quantization} | more
    keys = Keys(Path("config.json"), values)
    return with_stored_bits(read_architecture(keys), keys)


def with_group(**changes: Any) -> dict[str, Any]:
    return COMPRESSED | {"config_groups": {"group_0": GROUP | changes}}


def with_weights(**changes: Any) -> dict[str, Any]:
    return with_group(weights=WEIGHTS | changes)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_names_are_those_of_the_weights(architecture: str) -> None:
    config = read(None, architecture)
    specs = ARCHITECTURES[architecture].hf_weights(config)
    named = dict(linear_weights(config))
    if config.num_experts:
        for module, path in named.items():
            assert specs[path].tensors[0] == f"{module}.weight"
    else:
        narrow = {spec.tensors[0]: path for path, spec in specs.items() if scale_path(path)}
        assert narrow == {f"{module}.weight": path for module, path in named.items()}
    assert len(set(named.values())) == len(named)


def at(*paths: str, layers: range = range(12)) -> set[str]:
    return {f"layers.{i}.{path}" for i in layers for path in paths}


ATTENTION = ("attn.q_DNH", "attn.k_DKH", "attn.v_DKH", "attn.o_NHD")
FEED_FORWARD = ("mlp.gate_DF", "mlp.up_DF", "mlp.down_FD")
OF_LAYER_1 = at(*ATTENTION, *FEED_FORWARD, layers=range(1, 2))


@pytest.mark.parametrize(
    ("quantization", "wide"),
    [
        (COMPRESSED, set()),
        (FP8, set()),
        (COMPRESSED | {"ignore": None}, set()),
        (COMPRESSED | {"ignore": ["re:.*layers\\.1\\..*"]}, OF_LAYER_1),
        # An expression is matched from the start; a name is that of one module.
        (COMPRESSED | {"ignore": ["re:layers", "model.layers.1", "self_attn.q_proj"]}, set()),
        (
            COMPRESSED | {"ignore": ["lm_head", "model.layers.1.mlp.down_proj"]},
            at("mlp.down_FD", layers=range(1, 2)),
        ),
        (COMPRESSED | {"ignore": ["re:.*self_attn.*"]}, at(*ATTENTION)),
        (with_group(targets=["re:.*mlp.*"]), at(*ATTENTION)),
        (with_group(targets=["re:.*self_attn", "model.layers.0.mlp.up_proj"]),
         at(*FEED_FORWARD) - {"layers.0.mlp.up_DF"}),
        # By transformers' rule: from the start to a boundary, or at the end; 11 is not 1.
        (FP8 | {"modules_to_not_convert": ["lm_head", "model.layers.1"]}, OF_LAYER_1),
        (FP8 | {"modules_to_not_convert": ["k_proj"]}, at("attn.k_DKH")),
        (FP8 | {"ignored_layers": ["model.layers.1.mlp", "lm_head"]},
         at(*FEED_FORWARD, layers=range(1, 2))),
        (FP8 | {"modules_to_not_convert": ["model.layers.*.mlp.gate"]}, set()),
    ],
)  # fmt: skip
def test_layers_left_out_stay_wide(quantization: dict[str, Any], wide: set[str]) -> None:
    found = read(quantization)
    assert found.stored_bits == "float8_e4m3fn"
    assert set(found.wide_weights) == wide


@pytest.mark.parametrize(
    "quantization",
    [
        COMPRESSED | {"quantization_status": "compressed", "global_compression_ratio": 1.5},
        COMPRESSED | {"version": "0.9.1", "kv_cache_scheme": None, "transform_config": {}},
        COMPRESSED | {"sparsity_config": {}},
        COMPRESSED | {"sparsity_config": {"format": "dense", "targets": [], "ignore": []}},
        with_group(output_activations=None, format="float-quantized"),
        with_group(input_activations=WEIGHTS | {"strategy": "token", "dynamic": True}),
        with_weights(group_size=None, block_structure=None, actorder=None, dynamic=False),
        with_weights(observer="minmax", observer_kwargs={}, zp_dtype=None, scale_dtype=None),
        FP8 | {"weight_block_size": None, "fmt": "e4m3", "modules_to_not_convert": None},
    ],
)
def test_keys_that_change_nothing(quantization: dict[str, Any]) -> None:
    assert read(quantization).stored_bits == "float8_e4m3fn"


def test_an_older_key_says_the_same() -> None:
    assert read(None, compression_config=COMPRESSED) == read(COMPRESSED)


@pytest.mark.parametrize(
    ("quantization", "message"),
    [
        (COMPRESSED | {"transform_config": {"config_groups": {}}}, "transform_config is {'config"),
        (COMPRESSED | {"kv_cache_scheme": WEIGHTS}, "kv_cache_scheme is"),
        (COMPRESSED | {"rotations": True}, "quantization_config.rotations is True, must be None"),
        (COMPRESSED | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config.form"),
        (COMPRESSED | {"ignore": "lm_head"}, "ignore is 'lm_head', must be a list of names"),
        (COMPRESSED | {"ignore": ["re:(("]}, "ignore is '((', must be regular expressions"),
        (COMPRESSED | {"ignore": ["Linear"]}, "leaves out all linear layers"),
        (with_group(targets=["Conv2d"]), "leaves out all linear layers"),
        (with_group(scaling="twice"), "group_0.scaling is 'twice', must be None"),
        (with_group(format="pack-quantized"), "group_0.format is 'pack-quantized'"),
        (with_weights(group_size=128), "weights.group_size is 128"),
        (with_weights(actorder="group"), "weights.actorder is 'group'"),
        (with_weights(is_rotated=True), "weights.is_rotated is True, must be None"),
        (with_weights(num_bits=4), "weights.num_bits is 4"),
        (FP8 | {"weight_block_size": [128, 128]}, "weight_block_size is [128, 128]"),
        (FP8 | {"scale_fmt": "ue8m0"}, "scale_fmt is 'ue8m0'"),
        (FP8 | {"fmt": "e5m2"}, "fmt is 'e5m2'"),
        (FP8 | {"modules_to_convert": ["model.embed_tokens"]}, "modules_to_convert is"),
        (FP8 | {"transform": 1}, "quantization_config.transform is 1, must be None"),
        *(({"quant_method": method}, f"quant_method is {method!r}") for method in (
            "awq", "gptq", "bitsandbytes", "mxfp4", "modelopt", "fbgemm_fp8", "hqq", "torchao")),
    ],
)  # fmt: skip
def test_what_may_change_the_numbers_is_refused(quantization: dict[str, Any], message: str) -> None:
    before = copy.deepcopy(quantization)
    with pytest.raises(JaxinferError) as error:
        read(quantization)
    assert message in str(error.value)
    assert "\n" not in str(error.value)
    assert quantization == before
