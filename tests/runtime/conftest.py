"""Small models, one instance of each alone, and clusters one at a time."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster_cases import HEADS, Loader, free_executables, make_model
from cluster_checks import Done, serve

from jaxinfer import LLM


@pytest.fixture(scope="module")
def models(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {heads: make_model(folder / heads, tiny_folder, heads) for heads in HEADS}


@pytest.fixture(scope="module")
def alone(models: dict[str, Path]) -> Iterator[dict[str, LLM]]:
    """An instance on one device that computes a prompt in one piece, and keeps none."""
    llms = {
        heads: LLM(
            str(model),
            progress=False,
            page_size=64,
            max_num_seqs=1,
            max_num_batched_tokens=128,
            enable_prefix_caching=False,
        )
        for heads, model in models.items()
    }
    yield llms
    llms.clear()
    free_executables()


@pytest.fixture(scope="module")
def expected(alone: dict[str, LLM]) -> dict[str, list[Done]]:
    return {heads: serve(llm) for heads, llm in alone.items()}


@pytest.fixture(scope="module")
def loader(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Loader]:
    loader = Loader(models, tmp_path_factory.mktemp("clusters"))
    yield loader
    loader.close()
