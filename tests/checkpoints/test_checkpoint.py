"""Opening any checkpoint, and loading its weights."""

from dataclasses import replace
from pathlib import Path

import numpy as np
from checkpoint_files import DEMO, LAYER, SHAPES, error_of, make_folder, make_weights

from jaxinfer.checkpoints.checkpoint import open_checkpoint
from jaxinfer.checkpoints.open_tensors import load_weights
from jaxinfer.models.config import WeightSpec


def specs(names: dict[str, tuple[int, ...]] = SHAPES) -> dict[str, WeightSpec]:
    return {
        "embed_VD" if "embed" in name else f"param.{name}": WeightSpec(
            name, shape, lambda array: array
        )
        for name, shape in names.items()
    }


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
        transposed = {path: replace(spec, convert=np.transpose) for path, spec in specs().items()}
        placed = load_weights(opened, transposed, lambda path, array: (path, array))
        assert placed.keys() == transposed.keys()
        for wanted, spec in transposed.items():
            path, array = placed[wanted]
            assert path == wanted
            assert isinstance(spec.names, str)
            np.testing.assert_array_equal(array, weights[spec.names].T)

    def test_several_tensors_are_stacked(self, tmp_path: Path) -> None:
        weights = make_weights()
        opened = open_checkpoint(str(make_folder(tmp_path / "tiny", weights)))
        names = LAYER + "mlp.up_proj.weight", LAYER + "mlp.gate_proj.weight"
        wanted = {path: spec for path, spec in specs().items() if spec.names not in names}
        wanted["both"] = WeightSpec(names, (64, 32), np.transpose)
        both = load_weights(opened, wanted, lambda path, array: array)["both"]
        np.testing.assert_array_equal(both, np.stack([weights[name].T for name in names]))

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
