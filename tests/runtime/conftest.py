"""Small models, one instance of each alone, and clusters one at a time."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from cluster_cases import HEADS, Pair, free_executables, load, make_model
from cluster_checks import Done, serve

from jaxinfer import LLM


@pytest.fixture(scope="module")
def models(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {heads: make_model(folder / heads, tiny_folder, heads) for heads in HEADS}


@pytest.fixture(scope="module")
def alone(models: dict[str, Path]) -> Iterator[dict[str, LLM]]:
    """One instance on one device that computes a prompt in one piece, and keeps none."""
    llms = {
        heads: LLM(
            str(model), progress=False, page_size=64, max_num_seqs=1,
            max_num_batched_tokens=128, enable_prefix_caching=False,
        )
        for heads, model in models.items()
    }  # fmt: skip
    yield llms
    llms.clear()
    free_executables()


@pytest.fixture(scope="module")
def expected(alone: dict[str, LLM]) -> dict[str, list[Done]]:
    return {heads: serve(llm) for heads, llm in alone.items()}


class Loader:
    """Loads one cluster at a time."""

    def __init__(self, models: Mapping[str, Path], folder: Path) -> None:
        self._models, self._folder = models, folder
        self._pair: Pair | None = None
        self._llm: LLM | None = None

    def pair(self, pair: Pair) -> LLM:
        """Anew only where it is not the one that was asked for last."""
        if pair != self._pair or not self._llm:
            self._llm = self.load(pair.heads, **pair.sections)
            self._pair = pair
        return self._llm

    def load(self, heads: str, **sections: Any) -> LLM:
        self.close()
        self._llm = load(self._models[heads], self._folder, **sections)
        return self._llm

    def close(self) -> None:
        self._llm = self._pair = None
        free_executables()


@pytest.fixture(scope="module")
def loader(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Loader]:
    loader = Loader(models, tmp_path_factory.mktemp("clusters"))
    yield loader
    loader.close()
