"""Readers of config.json beside transformers' own configuration classes."""

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers
from hypothesis import given
from hypothesis import strategies as st
from properties import examples

from jaxinfer.checkpoints.config_readers import READERS, read_architecture
from jaxinfer.checkpoints.hugging_face import read_folder_config
from jaxinfer.errors import JaxinferError
from jaxinfer.models.config import ModelConfig
from jaxinfer.models.config_keys import Keys
from jaxinfer.models.registry import ARCHITECTURES

# Values that keys may have, besides being absent or null.
COMMON: dict[str, list[Any]] = {
    "vocab_size": [1000],
    "hidden_size": [512],
    "intermediate_size": [1024],
    "num_hidden_layers": [7],
    "num_attention_heads": [16, 32],
    "num_key_value_heads": [4, 8],
    "max_position_embeddings": [4096],
    "rms_norm_eps": [1e-4],
    "tie_word_embeddings": [True, False],
    "bos_token_id": [7],
    "eos_token_id": [9, [8, 9]],
    "rope_theta": [5e5],
    "hidden_act": ["silu"],
}
WINDOWS: dict[str, list[Any]] = {
    "sliding_window": [128],
    "use_sliding_window": [True, False],
    "max_window_layers": [0, 3],
}
KEYS: dict[str, dict[str, list[Any]]] = {
    "Llama": COMMON | {"head_dim": [64], "attention_bias": [True, False], "mlp_bias": [False]},
    "Mistral": COMMON | {"head_dim": [64], "sliding_window": [128]},
    "Mixtral": COMMON
    | {
        "head_dim": [64],
        "sliding_window": [128],
        "num_local_experts": [4],
        "num_experts_per_tok": [1],
    },
    "Qwen2": COMMON | WINDOWS,
    "Qwen3": COMMON | WINDOWS | {"head_dim": [64], "attention_bias": [False]},
    "Qwen3Moe": COMMON
    | {
        "head_dim": [64],
        "attention_bias": [False],
        "sliding_window": [128],
        "use_sliding_window": [True, False],
        "num_experts": [16],
        "num_experts_per_tok": [3],
        "moe_intermediate_size": [96],
        "norm_topk_prob": [True, False],
        "decoder_sparse_step": [1],
        "mlp_only_layers": [[]],
    },
    "Gemma3": {key: values for key, values in COMMON.items() if key != "hidden_act"}
    | {
        "head_dim": [64],
        "attention_bias": [False],
        "sliding_window": [128],
        "sliding_window_pattern": [2],
        "query_pre_attn_scalar": [64],
        "rope_local_base_freq": [2e4],
        "hidden_activation": ["gelu_pytorch_tanh"],
        "attn_logit_softcapping": [],
        "final_logit_softcapping": [],
        "use_bidirectional_attention": [False],
    },
    "OPT": {
        "vocab_size": [1000],
        "hidden_size": [512],
        "ffn_dim": [1024],
        "num_hidden_layers": [7],
        "num_attention_heads": [16],
        "max_position_embeddings": [4096],
        "tie_word_embeddings": [True, False],
        "bos_token_id": [7],
        "eos_token_id": [9],
        "do_layer_norm_before": [True],
        "word_embed_proj_dim": [512],
        "_remove_final_layer_norm": [False],
        "enable_bias": [True],
        "layer_norm_elementwise_affine": [True],
        "activation_function": ["relu"],
    },
}
# They have no default here: a folder that lacks one is refused, however transformers reads it.
SIZES = {
    "vocab_size", "hidden_size", "intermediate_size", "ffn_dim", "num_hidden_layers",
    "num_attention_heads",
}  # fmt: skip
ABSENT = object()


@st.composite
def configs(draw: st.DrawFn) -> tuple[str, dict[str, Any]]:
    name = draw(st.sampled_from(list(KEYS)))
    changed = draw(st.sets(st.sampled_from(sorted(KEYS[name])), max_size=6))
    found = {}
    for key, values in KEYS[name].items():
        usual = values[0] if values else None
        value = draw(st.sampled_from([*values, None, ABSENT])) if key in changed else usual
        if value is not ABSENT:
            found[key] = value
    return name, found


def theirs(name: str, values: dict[str, Any]) -> Any:
    kind = "Gemma3TextConfig" if name == "Gemma3" else f"{name}Config"
    return getattr(transformers, kind)(**values)


def theta_of(config: ModelConfig, local: bool = False) -> float:
    rope = config.local_rope if local else config.rope
    assert rope
    return float((1 / rope.frequencies[1]) ** (config.head_dim / 2))


@given(configs())
@examples(400)
def test_what_keys_mean_is_as_in_transformers(drawn: tuple[str, dict[str, Any]]) -> None:
    name, values = drawn
    try:
        wanted = theirs(name, values)
    except Exception:
        wanted = None
    ours = {**values, "architectures": [f"{name}ForCausalLM"]}
    # Transformers makes a configuration of these nulls, for which its model has no numbers.
    broken = {"rope_theta", "rope_local_base_freq"} | (
        {"sliding_window"} if name == "Gemma3" else set()
    )
    is_broken = any(key in values and values[key] is None for key in broken)
    lacks = SIZES & KEYS[name].keys() - values.keys()
    heads = wanted and (wanted.num_attention_heads, getattr(wanted, "num_key_value_heads", 1))
    if wanted is None or is_broken or lacks or heads[0] % heads[1]:
        with pytest.raises(JaxinferError):
            read_architecture(Keys(Path("config.json"), ours))
        return
    found = read_architecture(Keys(Path("config.json"), ours))
    head_dim = getattr(wanted, "head_dim", None)
    eos = wanted.eos_token_id
    ends = tuple(eos) if isinstance(eos, list) else (() if eos is None else (eos,))
    assert found.vocab_size == wanted.vocab_size
    assert found.hidden_size == wanted.hidden_size
    assert found.num_hidden_layers == wanted.num_hidden_layers
    assert found.num_attention_heads == wanted.num_attention_heads
    assert found.head_dim == (head_dim or wanted.hidden_size // wanted.num_attention_heads)
    assert found.max_position_embeddings == wanted.max_position_embeddings
    assert found.tie_word_embeddings == wanted.tie_word_embeddings
    assert (found.bos_token_id, found.eos_token_ids) == (wanted.bos_token_id, ends)
    if name == "OPT":
        assert found.intermediate_size == wanted.ffn_dim
        return
    assert found.num_key_value_heads == wanted.num_key_value_heads
    assert found.norm_eps == wanted.rms_norm_eps
    width = "moe_intermediate_size" if name == "Qwen3Moe" else "intermediate_size"
    assert found.intermediate_size == getattr(wanted, width)
    kinds = {"Qwen2", "Qwen3", "Gemma3"}
    window = getattr(wanted, "sliding_window", None)
    if name in kinds:
        slides = [kind == "sliding_attention" for kind in wanted.layer_types]
        assert found.windows == tuple(window if each else None for each in slides)
    else:
        assert found.windows == (window,) * wanted.num_hidden_layers
    if name in ("Mixtral", "Qwen3Moe"):
        experts = getattr(wanted, "num_local_experts", None) or wanted.num_experts
        assert (found.num_experts, found.num_experts_per_tok) == (
            experts,
            wanted.num_experts_per_tok,
        )
    if name == "Qwen3Moe":
        assert found.norm_topk_prob == wanted.norm_topk_prob
    if name == "Llama":
        assert found.attention_bias == wanted.attention_bias
    rope = wanted.rope_parameters
    if name == "Gemma3":
        assert found.attention_scale == pytest.approx(wanted.query_pre_attn_scalar**-0.5)
        local = rope["sliding_attention"]["rope_theta"]
        assert theta_of(found, local=True) == pytest.approx(local, rel=1e-3)
        rope = rope["full_attention"]
    assert theta_of(found) == pytest.approx(rope["rope_theta"], rel=1e-3)


def test_every_architecture_is_read_and_compared() -> None:
    assert [f"{name}ForCausalLM" for name in sorted(KEYS)] == sorted(READERS)
    assert READERS.keys() == ARCHITECTURES.keys()


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("Mixtral", {"num_local_experts": 0}, "num_local_experts is 0, must be a positive integer"),
        ("Llama", {"layer_types": ["sliding_attention"] * 7}, "layer_types is ['sliding_att"),
        (
            "Mistral",
            {"layer_types": ["full_attention"] * 6 + ["sliding_attention"]},
            "layer_types is ['full_att",
        ),
        ("Qwen3", {"use_sliding_window": False, "layer_types": ["sliding_attention"] * 7}, "layer"),
    ],
)
def test_contradictions_are_refused(name: str, changes: dict[str, Any], message: str) -> None:
    values = {key: values[0] for key, values in KEYS[name].items() if values} | changes
    values["architectures"] = [f"{name}ForCausalLM"]
    with pytest.raises(JaxinferError) as error:
        read_architecture(Keys(Path("config.json"), values))
    assert message in str(error.value)


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}


@pytest.mark.parametrize("key", ["attn_factor", "beta_slwo"])
def test_a_rope_key_that_nothing_reads_gets_a_word(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, key: str
) -> None:
    values = {key: values[0] for key, values in KEYS["Qwen3"].items()}
    values |= {"architectures": ["Qwen3ForCausalLM"], "rope_scaling": YARN}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(values))
    with caplog.at_level(logging.WARNING):
        usual = read_folder_config(tmp_path)
        assert not caplog.records
        path.write_text(json.dumps(values | {"rope_scaling": YARN | {key: 0.5}}))
        found = read_folder_config(tmp_path)
    (record,) = caplog.records
    assert f"{path}: rope_scaling.{key} is not a key of rope_type yarn" in record.getMessage()
    assert usual.rope == found.rope
    assert found.rope
    assert found.rope.factor == pytest.approx(0.1 * np.log(4) + 1)


def test_an_absent_end_is_that_of_the_class_unless_another_file_has_ends(tmp_path: Path) -> None:
    values = {key: values[0] for key, values in KEYS["Llama"].items()}
    values["architectures"] = ["LlamaForCausalLM"]
    del values["eos_token_id"]
    (tmp_path / "config.json").write_text(json.dumps(values))
    assert read_folder_config(tmp_path).eos_token_ids == (2,)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": 5}))
    assert read_folder_config(tmp_path).eos_token_ids == (5,)
