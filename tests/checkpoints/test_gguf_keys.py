"""Rotations of positions by a GGUF file's keys, by hand and beside Hugging Face folders."""

from pathlib import Path

import gguf
import numpy as np
import pytest
from checkpoint_files import make_folder, make_gguf, make_weights

from jaxinfer.checkpoints.checkpoint import open_checkpoint
from jaxinfer.checkpoints.gguf_keys import Rotation, read_rotation
from jaxinfer.models.config import Rope
from jaxinfer.models.config_keys import Keys


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


def rotation(kind: str, head_dim: int, **keys: object) -> Rotation:
    """A double underscore stands for a point."""
    values = {f"{kind}.{key.replace('__', '.')}": value for key, value in keys.items()}
    return read_rotation(Keys(Path("x.gguf"), values), kind, head_dim, np.ones(1))


def test_yarn_s_defaults_are_those_of_llama_cpp() -> None:
    """Betas of 32 and 1, over the context that the model was trained on."""
    given: dict[str, object] = {
        "rope__scaling__type": "yarn",
        "rope__scaling__factor": 8.0,
        "context_length": 2048,
    }
    found = rotation("llama", 128, **given)
    said: dict[str, object] = {
        "rope__scaling__original_context_length": 2048,
        "rope__scaling__yarn_beta_fast": 32.0,
        "rope__scaling__yarn_beta_slow": 1.0,
        "rope__scaling__yarn_ext_factor": 1.0,
    }
    assert found == rotation("llama", 128, **given | said)
    for key, other in (
        ("original_context_length", 4096),
        ("yarn_beta_fast", 16.0),
        ("yarn_beta_slow", 2.0),
    ):
        assert found != rotation("llama", 128, **given | said | {f"rope__scaling__{key}": other})


def test_gemma_s_two_rotations() -> None:
    """The report has 10^6 where all is seen, stretched by 8; 10^4 in windows, never stretched."""
    turns = -np.arange(4) / 4
    cases: list[tuple[dict[str, object], float, float]] = [
        ({}, 1e6, 1e4),
        ({"rope__freq_base": 5e5, "rope__freq_base_swa": 3e4}, 5e5, 3e4),
    ]
    for more, theta, local in cases:
        found = rotation("gemma3", 8, rope__scaling__factor=8.0, **more)
        np.testing.assert_allclose(found.rope.frequencies, theta**turns / 8)
        np.testing.assert_allclose(found.local_rope.frequencies, local**turns)


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
