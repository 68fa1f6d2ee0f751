"""A request whose logits are NaN fails alone: those after it and beside it answer as ever."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from safetensors.numpy import load_file, save_file
from tiny_model import TINY_OPTIONS, write_tiny_model

from jaxinfer import LLM, RequestOutput, SamplingParams
from jaxinfer.commands.app import cli
from jaxinfer.config.run_file import as_run_file
from jaxinfer.lab.validate.same_decisions import check_decisions

BROKEN = 97
# A token of the broken embedding is never drawn.
PARAMS = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logit_bias={BROKEN: -100})


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that gives NaN for every prompt with the token 97."""
    return _with(write_tiny_model(tmp_path_factory.mktemp("nan")), "model.embed_tokens.weight")


def _with(model: Path, name: str) -> Path:
    tensors = load_file(model / "model.safetensors")
    tensors[name] = tensors[name].copy()
    tensors[name][BROKEN % len(tensors[name]), 2] = np.inf
    save_file(tensors, model / "model.safetensors")
    return model


def prompt(*tokens: int) -> dict[str, list[int]]:
    return {"prompt_token_ids": list(tokens)}


def tokens_and_logprobs(outputs: list[RequestOutput]) -> np.ndarray:
    assert all(output.error is None for output in outputs)
    found = [output.outputs[0] for output in outputs]
    return np.array([[*o.token_ids, o.cumulative_logprob] for o in found])


@pytest.mark.parametrize(
    "options",
    [
        {"kernels": "plain"},
        {"kernels": "auto"},
        pytest.param({"kernels": "plain", "kv_cache_dtype": "int8"}, marks=pytest.mark.slow),
        pytest.param({"kernels": "plain", "kv_cache_dtype": "fp8"}, marks=pytest.mark.slow),
        pytest.param({"kernels": "plain", "dtype": "bfloat16"}, marks=pytest.mark.slow),
    ],
    ids=lambda options: "-".join(options.values()),
)
def test_nan_of_one_request(model: Path, tmp_path: Path, options: dict[str, Any]) -> None:
    """Its pages are used again, its beginning is asked for again, others run beside it."""
    engine = {**TINY_OPTIONS, "num_pages": 9, "max_model_len": 48, **options}
    sections = {"model": str(model), "engine": engine, "ledger": True}
    llm = LLM.from_config(as_run_file(sections), progress=False)
    shared = range(100, 117)
    good, other = prompt(98, 99, 100), prompt(*shared, 5, 6)
    bad = prompt(*shared, BROKEN, *range(30, 40))

    run = tmp_path / "runs"

    def ask(*prompts: dict[str, list[int]]) -> list[RequestOutput]:
        return llm.generate(list(prompts), PARAMS, progress=False, run_dir=run)

    alone = tokens_and_logprobs(ask(good) + ask(other))

    def same(outputs: list[RequestOutput]) -> bool:
        return tokens_and_logprobs(outputs) == pytest.approx(alone, abs=1e-4)

    llm.reset_prefix_cache()
    (failed,) = ask(bad)
    assert failed.error
    assert "NaN" in failed.error
    assert not failed.outputs
    # The beginning that both have was computed beside NaN.
    assert same(ask(good, other))
    llm.reset_prefix_cache()
    first, broken, last = ask(good, bad, other)
    assert broken.error
    assert same([first, last])
    assert check_decisions(run / "5").difference is None
    for _ in range(3):
        assert same(ask(other, good)[::-1])


def test_broken_weights_are_error_lines(tmp_path: Path) -> None:
    model = _with(write_tiny_model(tmp_path), "model.layers.1.mlp.down_proj.weight")
    lines = [
        {"custom_id": "greedy", "prompt": "abc", "temperature": 0},
        {"custom_id": "drawn", "prompt": "abc", "seed": 1},
        {"custom_id": "logprobs", "prompt": "abc", "logprobs": 2},
    ]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "run.yaml").write_text(
        json.dumps({"model": str(model), "engine": {**TINY_OPTIONS, "kernels": "plain"}})
    )
    out = tmp_path / "out.jsonl"
    files = [str(tmp_path / "run.yaml"), "--input", str(tmp_path / "in.jsonl")]
    assert CliRunner().invoke(cli, ["run", *files, "--output", str(out)]).exit_code == 1
    found = [json.loads(line) for line in out.read_text().splitlines()]
    assert {line["custom_id"] for line in found} == {line["custom_id"] for line in lines}
    assert all("NaN" in line["error"]["message"] for line in found)
