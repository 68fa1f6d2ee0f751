"""The adapter for torch tensors, where torch is installed: the project does not depend on it."""

import runpy
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from jaxinfer.lab.conformance import GoldenModel, hand_over

torch: Any = pytest.importorskip("torch")
EXAMPLE = Path(__file__).parents[2] / "examples" / "conformance_torch.py"
DTYPES = "float32", "float16", "bfloat16"


class Engine:
    """Pages of an engine; by head, a layer's memory has heads before tokens, as FlashInfer's."""

    def __init__(self, dtype: str, size: int, num_pages: int, by_head: bool = False) -> None:
        model, self.size = GoldenModel(), size
        self.free, self.tables = [*range(num_pages - 1, 0, -1)], dict[int, list[int]]()
        inner = (model.heads, size) if by_head else (size, model.heads)
        shape = 2, num_pages, *inner, model.head_dim
        kv = [torch.zeros(shape, dtype=getattr(torch, dtype)) for _ in range(model.layers)]
        self.kv = [pages.transpose(2, 3) if by_head else pages for pages in kv]
        self.adapter = runpy.run_path(str(EXAMPLE))["TorchEngine"](self.kv, self.allocate)

    def allocate(self, request: int, length: int) -> list[int]:
        self.tables[request] = [self.free.pop() for _ in range(-(-length // self.size))]
        return self.tables[request]


def found(source: Engine, dest: Engine, off: int) -> list[str]:
    """Return the names of the checks that a hand-off fails when it starts some tokens too late."""

    def transfer(request: int, length: int) -> None:
        for token in range(length - off):
            a, i = divmod(token, source.size)
            b, j = divmod(token + off, dest.size)
            for ours, theirs in zip(source.kv, dest.kv, strict=True):
                theirs[:, dest.tables[request][b], j] = ours[:, source.tables[request][a], i]

    findings = hand_over(GoldenModel(), source.adapter, dest.adapter, transfer)
    return [each.name for each in findings]


@pytest.mark.parametrize(("ours", "theirs"), [*product(DTYPES, repeat=2)])
@pytest.mark.parametrize("by_head", [False, True])
def test_a_hand_off_and_one_that_is_off(ours: str, theirs: str, by_head: bool) -> None:
    assert found(Engine(ours, 16, 16, by_head), Engine(theirs, 24, 10), 0) == []
    wrong = found(Engine(ours, 16, 16, by_head), Engine(theirs, 24, 10), 1)
    assert wrong[0] == "page offset off by one"
