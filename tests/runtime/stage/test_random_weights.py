"""``load_format: dummy``: random weights for a model of which there is but the configuration."""

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from checkpoint_files import CONFIG, error_of, make_folder, make_gguf, make_weights, plan_alone

from jaxinfer import LLM, SamplingParams
from jaxinfer.checkpoints import hub
from jaxinfer.checkpoints.checkpoint import open_checkpoint
from jaxinfer.config.engine import EngineOptions
from jaxinfer.config.run_file import as_run_file
from jaxinfer.convert import convert
from jaxinfer.runtime.stage.goal import ParameterGoal
from jaxinfer.runtime.stage.random_weights import _key_data, _program, random_parameters
from jaxinfer.text.tokenizer import NoTokenizer

ENGINE: dict[str, Any] = {
    "load_format": "dummy",
    "page_size": 8,
    "num_pages": 65,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 32,
    "max_model_len": 64,
}
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
PROMPT = {"prompt_token_ids": [1]}


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with nothing but ``config.json``: three KV heads, so that two devices pad them."""
    folder = tmp_path_factory.mktemp("bare")
    heads = {"num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 16}
    config = CONFIG | heads | {"intermediate_size": 99, "tie_word_embeddings": False}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def llm(bare: Path) -> LLM:
    return LLM(str(bare), progress=False, **ENGINE)


@pytest.fixture(scope="module")
def expected(llm: LLM) -> list[list[int]]:
    return tokens(llm)


def tokens(llm: LLM) -> list[list[int]]:
    prompts = [{"prompt_token_ids": list(range(3, 3 + n))} for n in (1, 5, 40)]
    return [o.outputs[0].token_ids for o in llm.generate(prompts, GREEDY, progress=False)]


def weights(model: str, **options: Any) -> dict[str, np.ndarray]:
    """Return the weights by path, without compiling a step."""
    config = open_checkpoint(model, "dummy").config
    plan = plan_alone(config, EngineOptions(**ENGINE | options))
    leaves = jax.tree.leaves_with_path(random_parameters(config, [plan])[0])
    return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves}


def test_same_for_a_seed_and_other_for_another(bare: Path) -> None:
    first, again, other = (weights(str(bare), seed=seed) for seed in (1, 1, 2**70))
    matrices = [path for path, array in first.items() if array.ndim > 1]
    assert len({first[path].tobytes() for path in matrices}) == len(matrices) == 9
    for path, array in first.items():
        np.testing.assert_array_equal(array, again[path])
        if path in matrices:
            assert not np.array_equal(array, other[path])
            assert np.std(array) == pytest.approx(0.02, rel=0.1)
            assert abs(np.mean(array)) < 0.002
        else:
            assert (array == 1).all()


@pytest.mark.slow
@pytest.mark.parametrize("devices", [2, 3])
def test_same_tokens_on_several_devices(
    bare: Path, expected: list[list[int]], devices: int
) -> None:
    """Two devices pad the heads, three do not."""
    several = LLM(str(bare), progress=False, tensor_parallel_size=devices, **ENGINE)
    assert tokens(several) == expected
    assert all(len(set(found)) > 1 for found in expected)


def test_each_device_draws_its_own_shard(bare: Path) -> None:
    options = EngineOptions(**ENGINE, tensor_parallel_size=3)
    to = plan_alone(open_checkpoint(str(bare), "dummy").config, options).parameters
    query = to["layers.0.attn.q_DNH"]
    goal = ParameterGoal(query, None, query.dtype)
    text = _program(query.shape, goal, False).lower(_key_data(0, "x")).compile().as_text()
    assert text
    assert "f32[32,2,16]" in text
    assert "f32[32,6,16]" not in text
    assert "all-" not in text


def test_dtype(bare: Path) -> None:
    drawn = weights(str(bare), dtype="bfloat16").values()
    kinds = {(array.ndim > 1, array.dtype.name) for array in drawn}
    assert kinds == {(True, "bfloat16"), (False, "float32")}


def test_pipeline_stages_and_segments_draw_the_same(tiny_folder: Path, uncompiled: None) -> None:
    whole = weights(str(tiny_folder))
    stages = [{"group": "a", "layers": 1}, {"group": "b", "layers": 1}]
    groups = {"a": {"devices": 1}, "b": {"devices": 1}}
    for parts in (
        {"groups": groups, "system": "pipeline_parallel", "instances": {"i": {"stages": stages}}},
        {"groups": {"a": {"devices": 1}}, "instances": {"i": {"group": "a", "segments": 2}}},
    ):
        data = {"model": str(tiny_folder), "engine": ENGINE} | parts
        llm = LLM.from_config(as_run_file(data), progress=False)
        found: list[bytes] = []
        for stage in llm.cluster.stages:
            found += [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(stage.parameters)]
        assert sorted(found) == sorted(array.tobytes() for array in whole.values())


def test_every_kind_of_checkpoint_gives_its_configuration(
    tiny_folder: Path, tmp_path: Path
) -> None:
    converted = str(convert(str(tiny_folder), str(tmp_path / "converted"), None, False))
    drawn, again = weights(str(tiny_folder)), weights(converted)
    assert all(np.array_equal(array, again[path]) for path, array in drawn.items())
    assert weights(str(make_gguf(tmp_path / "tiny.gguf", make_weights())))


def test_weights_beside_it_are_left_alone_and_the_tokenizer_is_used(
    tiny_folder: Path, tmp_path: Path
) -> None:
    folder = make_folder(tmp_path / "tiny", make_weights())
    (folder / "model.safetensors").write_bytes(b"damaged")
    assert weights(str(folder))
    error_of(lambda: open_checkpoint(str(folder)))
    (output,) = LLM(str(tiny_folder), progress=False, **ENGINE).generate("Hello", progress=False)
    assert output.prompt_token_ids
    assert output.outputs[0].text


def test_hub_weights_are_not_fetched(monkeypatch: pytest.MonkeyPatch, bare: Path) -> None:
    asked = []

    def download(repository: str, revision: str | None, allow_patterns: list[str]) -> str:
        asked.extend(allow_patterns)
        return str(bare)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert hub.fetch("org/name", weights=False) == bare
    assert "config.json" in asked
    assert not [name for name in asked if "safetensors" in name]


def test_without_tokenizer(llm: LLM) -> None:
    assert isinstance(llm.tokenizer, NoTokenizer)
    assert llm.generate(PROMPT, GREEDY, progress=False)[0].outputs[0].text == ""
    wanted = "has no tokenizer for a text: give prompt_token_ids"
    assert wanted in error_of(lambda: llm.generate("Hello"))
    assert wanted in error_of(lambda: llm.chat([{"role": "user", "content": "Hello"}]))
    message = error_of(lambda: llm.generate(PROMPT, SamplingParams(stop="x")))
    assert "has no tokenizer for stop strings: give stop_token_ids" in message


def test_refusals(bare: Path) -> None:
    assert "load_format is 'random'" in error_of(lambda: EngineOptions(load_format="random"))
    assert "has neither model.safetensors nor" in error_of(lambda: LLM(str(bare), progress=False))


@pytest.mark.parametrize(
    ("one", "other", "wanted"),
    [
        ({"load_format": "dummy"}, {}, "load_format is auto and dummy, must be the same"),
        (
            {"load_format": "dummy"},
            {"load_format": "dummy", "seed": 3},
            "instances.y.seed is 3, must be engine.seed's 0",
        ),
    ],
)
def test_instances_must_have_the_same_weights(
    one: dict[str, Any], other: dict[str, Any], wanted: str
) -> None:
    data = {
        "groups": {"a": {"devices": 2, "tensor_parallel_size": 1}},
        "instances": {"x": {"group": "a"} | one, "y": {"group": "a"} | other},
    }
    assert wanted in error_of(lambda: as_run_file(data).cluster())
