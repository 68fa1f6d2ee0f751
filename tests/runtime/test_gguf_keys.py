"""How positions rotate by a GGUF file's keys, by hand and beside Hugging Face folders."""

from pathlib import Path

import gguf
import numpy as np
import pytest
from checkpoint_files import make_folder, make_gguf, make_weights

from jaxinfer.models.config import Rope
from jaxinfer.runtime.checkpoint import open_checkpoint


@pytest.mark.parametrize(
    ("keys", "divisor", "factor"),
    [
        ({}, 1, 1),
        ({"scaling.factor": 4.0}, 4, 1),
        ({"scaling.type": "linear", "scaling.factor": 4.0}, 4, 1),
        ({"scaling.type": "linear"}, 1, 1),
        ({"scale_linear": 4.0}, 4, 1),
        ({"scaling.factor": 2.0, "scale_linear": 4.0}, 2, 1),
        ({"scaling.factor": 0.0, "scale_linear": 4.0}, 4, 1),
        ({"scaling.type": "none", "scaling.factor": 4.0, "scale_linear": 4.0}, 1, 1),
        ({"scaling.attn_factor": 1.5, "scaling.yarn_attn_factor": 2.0}, 1, 3),
    ],
)
def test_scales_of_positions(
    tmp_path: Path, keys: dict[str, float | str], divisor: float, factor: float
) -> None:
    """The defaults are llama.cpp's: a factor without a type is linear, and 0 is none."""
    rope = rope_of(tmp_path, keys)
    np.testing.assert_allclose(rope.frequencies, 10000.0 ** (-np.arange(4) / 4) / divisor)
    assert rope.factor == pytest.approx(factor)


def test_yarn_is_that_of_hugging_face(tmp_path: Path) -> None:
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    folder = make_folder(tmp_path / "hf", rope_theta=10000.0, rope_scaling=scaling)
    wanted = open_checkpoint(str(folder)).config.rope
    keys: dict[str, float | str] = {
        "scaling.type": "yarn",
        "scaling.factor": 4.0,
        "scaling.original_context_length": 64,
    }
    rope = rope_of(tmp_path, keys)
    assert wanted
    np.testing.assert_allclose(rope.frequencies, wanted.frequencies)
    assert rope.factor == pytest.approx(wanted.factor) == pytest.approx(1 + 0.1 * np.log(4))
    slower = rope_of(tmp_path, keys | {"scaling.yarn_beta_slow": 6.0})
    assert slower.frequencies != rope.frequencies


def rope_of(folder: Path, keys: dict[str, float | str]) -> Rope:
    def add(writer: gguf.GGUFWriter) -> None:
        for key, value in keys.items():
            name = f"llama.rope.{key}"
            if isinstance(value, str):
                writer.add_string(name, value)
            elif isinstance(value, int):
                writer.add_uint32(name, value)
            else:
                writer.add_float32(name, value)

    path = make_gguf(folder / "rope.gguf", make_weights(), metadata=add)
    rope = open_checkpoint(str(path)).config.rope
    assert rope
    return rope
