"""Hugging Face folders: what is read, and the one-line errors of what cannot be."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from checkpoint_files import error_of, make_folder, make_sharded, make_weights, theta_of
from safetensors.numpy import save_file

from jaxinfer.checkpoints.checkpoint import open_checkpoint


class TestFolder:
    def test_single_file(self, tmp_path: Path) -> None:
        weights = make_weights()
        opened = open_checkpoint(str(make_folder(tmp_path / "tiny", weights)))
        assert opened.name == "tiny"
        assert opened.tokenizer_source == tmp_path / "tiny"
        assert opened.config.head_dim == 8
        assert theta_of(opened.config) == pytest.approx(5000.0)
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

    @pytest.mark.parametrize("stale", ["model-00001-of-00002", "model-00002-of-00002"])
    def test_a_copy_in_a_file_that_the_index_does_not_name_for_it(
        self, tmp_path: Path, stale: str
    ) -> None:
        """Whichever of the files has it, the index decides."""
        weights, folder = make_weights(), tmp_path / "tiny"
        weight_map = make_sharded(folder, weights)
        of_file = {name: weights[name] for name, file in weight_map.items() if stale in file}
        others = {name: values * 3 + 1 for name, values in weights.items() if name not in of_file}
        save_file(of_file | others, folder / f"{stale}.safetensors")
        tensors = open_checkpoint(str(folder)).tensors
        assert tensors.keys() == weights.keys()
        for name, values in weights.items():
            np.testing.assert_array_equal(tensors[name].load(), values)

    def test_the_index_names_a_file_without_the_tensor(self, tmp_path: Path) -> None:
        folder = tmp_path / "tiny"
        weight_map = make_sharded(folder, make_weights())
        name = next(name for name, file in weight_map.items() if "00002-of" in file)
        weight_map[name] = "model-00001-of-00002.safetensors"
        self.write_index(folder, weight_map)
        message = error_of(lambda: open_checkpoint(str(folder)))
        assert f"index.json: has {name!r} in model-00001-of-00002.safetensors, which l" in message

    def test_a_tensor_that_the_index_does_not_name(self, tmp_path: Path) -> None:
        """Taken from the one file that has it, as transformers does; of two, neither is."""
        weights, folder = make_weights(), tmp_path / "tiny"
        weight_map = make_sharded(folder, weights)
        name = next(name for name, file in weight_map.items() if "00002-of" in file)
        del weight_map[name]
        self.write_index(folder, weight_map)
        loaded = open_checkpoint(str(folder)).tensors[name].load()
        np.testing.assert_array_equal(loaded, weights[name])
        first = {name for name, file in weight_map.items() if "00001-of" in file} | {name}
        save_file(
            {name: weights[name] for name in first}, folder / "model-00001-of-00002.safetensors"
        )
        message = error_of(lambda: open_checkpoint(str(folder)))
        assert f"does not say whether {name!r} is that of model-00001-of-00002.saf" in message

    def test_a_whole_file_goes_before_an_index(self, tmp_path: Path) -> None:
        """Transformers does so; what an earlier save has left is not read."""
        weights, folder = make_weights(), tmp_path / "tiny"
        make_sharded(folder, {name: values * 3 for name, values in weights.items()})
        save_file(weights, folder / "model.safetensors")
        for name, tensor in open_checkpoint(str(folder)).tensors.items():
            np.testing.assert_array_equal(tensor.load(), weights[name])

    def write_index(self, folder: Path, weight_map: dict[str, str]) -> None:
        index = folder / "model.safetensors.index.json"
        index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))

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
        assert theta_of(open_checkpoint(str(folder)).config) == pytest.approx(7000.0)

    def test_absent_keys_have_transformers_defaults(self, tmp_path: Path) -> None:
        optional = (
            "num_key_value_heads",
            "rope_theta",
            "rms_norm_eps",
            "tie_word_embeddings",
            "bos_token_id",
            "eos_token_id",
        )
        folder = make_folder(tmp_path / "tiny", **dict.fromkeys(optional))
        config = open_checkpoint(str(folder)).config
        assert config.num_key_value_heads == 4
        assert theta_of(config) == pytest.approx(10000.0)
        assert config.norm_eps == 1e-6
        assert not config.tie_word_embeddings
        assert (config.bos_token_id, config.eos_token_ids) == (1, (2,))

    def test_head_dim_of_its_own(self, tmp_path: Path) -> None:
        assert open_checkpoint(str(make_folder(tmp_path / "t", head_dim=24))).config.head_dim == 24

    @pytest.mark.parametrize(
        ("changes", "fragment"),
        [
            ({"architectures": ["GPT2LMHeadModel"]}, "must be one of: LlamaForCausalLM, Qwen2"),
            (
                {"architectures": ["MixtralForCausalLM"], "num_experts_per_tok": 9},
                "num_experts_per_tok is 9, must be at most num_local_experts, 8",
            ),
            (
                {"architectures": ["Qwen3MoeForCausalLM"], "mlp_only_layers": [0]},
                "mlp_only_layers is [0], must be []: nothing else is implemented",
            ),
            (
                {"architectures": ["Qwen3MoeForCausalLM"], "decoder_sparse_step": 2},
                "decoder_sparse_step is 2, must be 1: nothing else is implemented",
            ),
            (
                {"architectures": ["Qwen3MoeForCausalLM"], "num_experts": 7},
                "num_experts_per_tok is 8, must be at most num_experts, 7",
            ),
            ({"architectures": ["MistralForCausalLM"], "sliding_window": 0}, "sliding_window is 0"),
            (
                {"architectures": ["Gemma3ForCausalLM"], "layer_types": ["full_attention"] * 2},
                "must be 1 of full_attention or sliding_attention",
            ),
            (
                {"architectures": ["Gemma3ForCausalLM"], "final_logit_softcapping": 30.0},
                "final_logit_softcapping is 30.0",
            ),
            (
                {"architectures": ["OPTForCausalLM"], "do_layer_norm_before": False},
                "do_layer_norm_before is False",
            ),
            ({"architectures": None}, "architectures is None"),
            (
                {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
                "rope_scaling.rope_type is 'dynamic', must be one of: default, linear, llama3",
            ),
            (
                {"rope_parameters": {"rope_type": "llama3", "rope_theta": 1.0, "factor": 2.0}},
                "lacks 'rope_parameters.low_freq_factor'",
            ),
            ({"attention_bias": 1}, "attention_bias is 1, must be true or false"),
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
        weights = make_weights() | {"model.norm.weight": np.ones(32, np.int16)}
        folder = make_folder(tmp_path / "tiny", weights)
        message = error_of(lambda: open_checkpoint(str(folder)))
        assert "tensor 'model.norm.weight' has type I16" in message
