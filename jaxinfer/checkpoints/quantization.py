"""Reads ``quantization_config``: the stored format of linear weights, and the layers it excludes.

Supported formats are those of compressed-tensors and ``fp8``, with one scale for each output
channel or one for all. Everything else is refused by name, and so is an unknown key, since it may
change the numbers. This file needs no JAX.
"""

import re
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace

from jaxinfer.errors import JaxinferError
from jaxinfer.models.config import ModelConfig
from jaxinfer.models.config_keys import Keys

_KINDS = {"int": "int8", "float": "float8_e4m3fn"}
_FORMATS = ("int-quantized", "float-quantized", "naive-quantized")
# Keys that change nothing here, by their section, because activations stay wide.
_HARMLESS = {
    "fp8": {"activation_scheme", "dequantize", "is_checkpoint_fp8_serialized"},
    "compressed-tensors": {
        "global_compression_ratio", "quantization_status", "version", "compression_version",
        "run_compressed",
    },
    "group": {"input_activations", "output_activations"},
    "weights": {"observer", "observer_kwargs", "scale_dtype", "zp_dtype"},
}  # fmt: skip
# Names of a layer's linear weights, at Hugging Face and here.
_ATTENTION = {
    "self_attn.q_proj": "attn.q_DNH",
    "self_attn.k_proj": "attn.k_DKH",
    "self_attn.v_proj": "attn.v_DKH",
    "self_attn.o_proj": "attn.o_NHD",
}
_DENSE = {
    "mlp.gate_proj": "mlp.gate_DF",
    "mlp.up_proj": "mlp.up_DF",
    "mlp.down_proj": "mlp.down_FD",
}
# A layer's experts are equal, so the first one is enough.
_LINEAR = {
    "Qwen3MoeForCausalLM": _ATTENTION
    | {
        "mlp.experts.0.gate_proj": "mlp.gate_EDF",
        "mlp.experts.0.up_proj": "mlp.up_EDF",
        "mlp.experts.0.down_proj": "mlp.down_EFD",
    },
    "MixtralForCausalLM": _ATTENTION
    | {
        "block_sparse_moe.experts.0.w1": "mlp.gate_EDF",
        "block_sparse_moe.experts.0.w3": "mlp.up_EDF",
        "block_sparse_moe.experts.0.w2": "mlp.down_EFD",
    },
    "OPTForCausalLM": {
        "self_attn.q_proj": "q_DNH",
        "self_attn.k_proj": "k_DKH",
        "self_attn.v_proj": "v_DKH",
        "self_attn.out_proj": "o_NHD",
        "fc1": "up_DF",
        "fc2": "down_FD",
    },
}
# Tells whether the module with a name has 8 bits.
_IsNarrow = Callable[[str], bool]


def with_stored_bits(config: ModelConfig, keys: Keys) -> ModelConfig:
    """Return the config with the stored format of its linear weights, if that has 8 bits.

    Activations that the checkpoint would also quantise are left unchanged, and so is the head.

    Raises:
        JaxinferError: weights are quantised in another way.
    """
    # The second is an old name of compressed-tensors.
    names = ("quantization_config", "compression_config")
    name = next((name for name in names if keys.get(name) is not None), None)
    if name is None:
        return config
    found = keys.within(name)
    match method := found.get("quant_method"):
        case "fp8":
            stored, is_narrow = _read_fp8(found)
        case "compressed-tensors":
            stored, is_narrow = _read_compressed(found)
        case _:
            raise found.wrong("quant_method", method, "one of: compressed-tensors, fp8")
    wide = tuple(path for module, path in linear_weights(config) if not is_narrow(module))
    if len(wide) == len(list(linear_weights(config))):
        raise JaxinferError(f"{keys.path}: {name} leaves out all linear layers: remove it")
    return replace(config, stored_bits=stored, wide_weights=wide)


def linear_weights(config: ModelConfig) -> Iterator[tuple[str, str]]:
    """Yield the linear modules of all layers: Hugging Face's names and our paths."""
    root = "model.decoder" if config.architecture == "OPTForCausalLM" else "model"
    table = _LINEAR.get(config.architecture, _ATTENTION | _DENSE)
    for i in range(config.num_hidden_layers):
        for module, path in table.items():
            yield f"{root}.layers.{i}.{module}", f"layers.{i}.{path}"


def _read_fp8(found: Keys) -> tuple[str, _IsNarrow]:
    read = {
        "quant_method",
        "weight_block_size",
        "fmt",
        "scale_fmt",
        "expert_dtype",
        "modules_to_convert",
    }
    found.only("weight_block_size", None)
    found.only("fmt", None, "e4m3")
    found.only("scale_fmt", None, "float")
    found.only("expert_dtype", None, "fp8")
    found.only("modules_to_convert", None, [])
    lists = ("modules_to_not_convert", "ignored_layers")
    ignored = [each for name in lists for each in _texts(found, name)]
    _check_unknown(found, read | set(lists) | _HARMLESS["fp8"])
    # As in transformers: a match from the start of a name to the end of a part or of the name.
    patterns = [
        _pattern(found, lists[0], f"(?:{each})" + r"(?:(?<=\.)|(?=\.|$))")
        for each in (text.removeprefix("re:") for text in ignored)
    ]

    def is_narrow(module: str) -> bool:
        by_end = any(module.endswith(each) for each in ignored)
        return not by_end and not any(each.match(module) for each in patterns)

    return _KINDS["float"], is_narrow


def _read_compressed(found: Keys) -> tuple[str, _IsNarrow]:
    if found.get("format") not in _FORMATS:
        raise found.wrong("format", found.get("format"), f"one of: {', '.join(_FORMATS)}")
    sparsity = found.within("sparsity_config")
    if sparsity.values:
        sparsity.only("format", "dense")
    found.only("transform_config", None, {})
    groups = found.within("config_groups")
    if len(groups.values) != 1:
        raise found.wrong("config_groups", list(groups.values), "one group")
    group = groups.within(next(iter(groups.values)))
    stored = _read_group(group)
    ignored, targets = _matches(found, "ignore"), _matches(group, "targets")
    read = {"quant_method", "format", "sparsity_config", "transform_config", "config_groups"}
    _check_unknown(found, read | {"ignore"} | _HARMLESS["compressed-tensors"])
    return stored, lambda module: targets(module) and not ignored(module)


def _read_group(group: Keys) -> str:
    """Return the dtype of the weights of a group."""
    group.only("format", None, *_FORMATS)
    _check_unknown(group, {"targets", "weights", "format"} | _HARMLESS["group"])
    weights = group.within("weights")
    for key, known in {"num_bits": 8, "symmetric": True}.items():
        weights.only(key, known)
    for key, allowed in {"type": list(_KINDS), "strategy": ["channel", "tensor"]}.items():
        if weights.get(key) not in allowed:
            raise weights.wrong(key, weights.get(key), f"one of: {', '.join(allowed)}")
    weights.only("group_size", None, -1)
    weights.only("dynamic", False, None)
    weights.only("actorder", None, False)
    read = {"num_bits", "symmetric", "type", "strategy", "group_size", "dynamic", "actorder"}
    _check_unknown(weights, read | _HARMLESS["weights"])
    return _KINDS[weights.get("type")]


def _check_unknown(found: Keys, known: Collection[str]) -> None:
    for key in found.values:
        if key not in known:
            found.only(key, None)


def _matches(found: Keys, key: str) -> _IsNarrow:
    """Return a test for names in a list of compressed-tensors: modules, "Linear", expressions."""
    texts = _texts(found, key)
    patterns = [_pattern(found, key, text[3:]) for text in texts if text.startswith("re:")]
    names = set(texts)
    return lambda module: (
        module in names or "Linear" in names or any(each.match(module) for each in patterns)
    )


def _texts(found: Keys, key: str) -> list[str]:
    values = found.get(key, [])
    if not isinstance(values, list) or not all(isinstance(each, str) for each in values):
        raise found.wrong(key, values, "a list of names")
    return values


def _pattern(found: Keys, key: str, text: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error as error:
        raise found.wrong(key, text, f"regular expressions: {error}") from None
