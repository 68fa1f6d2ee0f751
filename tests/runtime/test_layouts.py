"""Layouts in the engine: the tokens of one device, alone and over hand-offs."""

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
from tiny_model import write_tiny_mixture, write_tiny_model

from jaxinfer import LLM, SamplingParams
from jaxinfer.config.run_file import as_run_file
from jaxinfer.models.layouts import LAYOUTS

OPTIONS: dict[str, Any] = {
    "page_size": 8,
    "num_pages": 33,
    "max_num_seqs": 3,
    "max_num_batched_tokens": 16,
    "strict_shapes": True,
}
PROMPTS = [{"prompt_token_ids": tokens} for tokens in ([5, 7, 9, 11, 13], [*range(3, 33)], [40, 41])]
PARAMS = [SamplingParams(temperature=t, seed=3, max_tokens=6, ignore_eos=True) for t in (0, 1.0, 0)]
MESHES = ({"x": 1, "y": 8}, {"x": 2, "y": 4})

Tokens = list[list[int]]


def load(model: str, groups: dict[str, Any], layouts: dict[str, str], **more: Any) -> LLM:
    """An instance on each group, with the layout of its name."""
    instances = {name: {"group": name, "layout": layouts[name]} | OPTIONS for name in groups}
    sections = {"model": model, "groups": groups, "instances": instances}
    return LLM.from_config(as_run_file(sections | more), progress=False)


def tokens(llm: LLM, run_dir: str | None = None) -> Tokens:
    done = llm.generate(PROMPTS, PARAMS, progress=False, run_dir=run_dir)
    return [answer.outputs[0].token_ids for answer in done]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    dense, mixture = (tmp_path_factory.mktemp(name) for name in ("dense", "mixture"))
    return {"dense": str(write_tiny_model(dense)), "mixture": str(write_tiny_mixture(mixture))}


@pytest.fixture(scope="module")
def expected(models: dict[str, str]) -> Callable[[str], Tokens]:
    """The tokens of one device."""
    return cache(lambda name: tokens(load(models[name], {"g": {}}, {"g": "megatron"})))


@pytest.mark.parametrize("name", ["dense", "mixture"])
@pytest.mark.parametrize("mesh", MESHES, ids=["1x8", "2x4"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_gives_the_tokens_of_one_device(
    name: str,
    mesh: dict[str, int],
    layout: str,
    models: dict[str, str],
    expected: Callable[[str], Tokens],
) -> None:
    llm = load(models[name], {"g": {"devices": 8, "mesh": mesh}}, {"g": layout})
    assert tokens(llm) == expected(name)
    assert set(expected(name)[0]) != {expected(name)[0][0]}, "a model that says one word"
