"""Sampling defaults of generation_config.json; what vLLM 0.32 takes of such files is recorded."""

import json
from pathlib import Path
from typing import Any

import pytest
from checkpoint_files import make_folder, make_gguf, make_weights

from jaxinfer import JaxinferError, SamplingParams
from jaxinfer.checkpoints.checkpoint import open_checkpoint
from jaxinfer.checkpoints.generation import Generation, read_generation

# What vLLM 0.32.0's ModelConfig.get_diff_sampling_param() returns, with transformers 5.
AS_VLLM: list[tuple[dict[str, Any], dict[str, Any]]] = [
    (
        {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "eos_token_id": 2},
        {"temperature": 0.6, "top_k": 20, "top_p": 0.95},
    ),
    ({"do_sample": False, "temperature": 0.7}, {"temperature": 0.7}),
    (
        {"top_k": 50, "top_p": 1.0, "temperature": 1.0},
        {"top_k": 50, "top_p": 1.0, "temperature": 1},
    ),
    ({"max_new_tokens": 9, "max_length": 5, "min_new_tokens": 3}, {"max_tokens": 9}),
    (
        {"min_p": 0.1, "repetition_penalty": 1.05, "typical_p": 0.5},
        {"min_p": 0.1, "repetition_penalty": 1.05},
    ),
    ({"temperature": None, "bos_token_id": 1}, {}),
]


def folder_with(path: Path, values: dict[str, Any]) -> Path:
    make_folder(path)
    (path / "generation_config.json").write_text(json.dumps(values))
    return path


@pytest.mark.parametrize(("values", "taken"), AS_VLLM)
def test_what_is_taken(tmp_path: Path, values: dict[str, Any], taken: dict[str, Any]) -> None:
    checkpoint = open_checkpoint(str(folder_with(tmp_path / "m", values)))
    found = read_generation(checkpoint, "auto")
    assert found.defaults == taken
    assert found.params() == SamplingParams(**taken)
    assert (found.most_tokens, found.eos_token_ids) == (None, ())
    assert read_generation(checkpoint, "vllm") == Generation()


def test_another_folder_s(tmp_path: Path) -> None:
    """Its defaults in place of the model's, its ends besides, its limit for all lines."""
    checkpoint = open_checkpoint(str(folder_with(tmp_path / "m", {"top_k": 3, "eos_token_id": 5})))
    other = {"temperature": 0.5, "max_new_tokens": 9, "eos_token_id": [7, 8]}
    folder_with(tmp_path / "other", other)
    found = read_generation(checkpoint, str(tmp_path / "other"))
    assert found == Generation({"temperature": 0.5, "max_tokens": 9}, 9, (7, 8))
    assert found.complete(SamplingParams(max_tokens=20)).max_tokens == 9
    assert found.complete(SamplingParams(max_tokens=4)).max_tokens == 4
    gguf = open_checkpoint(str(make_gguf(tmp_path / "a.gguf", make_weights())))
    assert read_generation(gguf, str(tmp_path / "other")) == found
    assert read_generation(gguf, "auto") == Generation()


def test_what_is_given_stays() -> None:
    defaults = Generation({"temperature": 0.5, "top_k": 3, "max_tokens": 9})
    given = SamplingParams(temperature=1.0, top_p=0.5)
    assert defaults.complete(given) == SamplingParams(
        temperature=1.0, top_p=0.5, top_k=3, max_tokens=9
    )
    assert Generation().complete(given) is given
    assert Generation({"max_tokens": 500}).complete(given).max_tokens == 500
    with pytest.raises(JaxinferError, match="min_tokens is 12, must be at most max_tokens, 9"):
        defaults.complete(SamplingParams.model_construct(_fields_set={"min_tokens"}, min_tokens=12))


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        (
            {"temperature": "hot"},
            r"temperature is 'hot', must be a number; generation_config: vllm",
        ),
        ({"top_p": 2.0}, "top_p is 2"),
        ({"max_new_tokens": 0}, "max_tokens is 0, must be"),
    ],
)
def test_a_wrong_value_is_named_with_its_file(
    tmp_path: Path, values: dict[str, Any], reason: str
) -> None:
    checkpoint = open_checkpoint(str(folder_with(tmp_path / "m", values)))
    with pytest.raises(JaxinferError, match=rf"m/generation_config\.json: {reason}"):
        read_generation(checkpoint, "auto")
    assert read_generation(checkpoint, "vllm") == Generation()


def test_a_folder_without_the_file(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(str(make_folder(tmp_path / "m")))
    assert read_generation(checkpoint, "auto") == Generation()
    for choice in (str(tmp_path / "m"), "vlm"):
        with pytest.raises(JaxinferError, match="must be auto, vllm or a folder with generation"):
            read_generation(checkpoint, choice)
