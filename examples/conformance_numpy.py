"""Check a hand-off of your own with the conformance kit: pages in numpy arrays.

The adapter of an engine is a class of about twenty lines; ``transfer`` stands for the engine's own
hand-off. The second hand-off has a fault, which the kit names.

    python examples/conformance_numpy.py
"""

from collections.abc import Mapping

import numpy as np

from jaxinfer.lab.conformance import Finding, GoldenModel, KVLayout, hand_over
from jaxinfer.lab.conformance.layout import LayerPages
from jaxinfer.lab.conformance.side import Pool

Pools = Mapping[LayerPages, tuple[Pool, Pool]]


class NumpyEngine:
    """An engine whose pages are ``self.kv[layer][part]``: [page, token, head, channel]."""

    def __init__(self, page_size: int, num_pages: int) -> None:
        self.layout = KVLayout(page_size=page_size, keys="NHD", values="NHD")
        self.num_pages = num_pages
        self.kv: list[list[np.ndarray]] = []
        self._free = list(range(num_pages - 1, 0, -1))
        self.tables: dict[int, list[int]] = {}

    def write(self, pools: Pools) -> None:
        """Set all pages."""
        self.kv = [[pool.pages.copy() for pool in pair] for pair in pools.values()]

    def read(self) -> Pools:
        """Return all pages as they are."""
        pairs = [(Pool(keys), Pool(values)) for keys, values in self.kv]
        return {LayerPages(0, 0, layer): pair for layer, pair in enumerate(pairs)}

    def reserve(self, request: int, length: int) -> list[int]:
        """Give a request its pages."""
        count = -(-length // self.layout.page_size)
        self.tables[request] = [self._free.pop() for _ in range(count)]
        return self.tables[request]


def transfer(
    source: NumpyEngine, dest: NumpyEngine, request: int, length: int, off: int = 0
) -> None:
    """Hand KV over, token by token; ``off`` above 0 is a fault."""
    for token in range(length - off):
        a, i = divmod(token, source.layout.page_size)
        b, j = divmod(token + off, dest.layout.page_size)
        for ours, theirs in zip(source.kv, dest.kv, strict=True):
            for keys_or_values in (0, 1):
                entry = ours[keys_or_values][source.tables[request][a], i]
                theirs[keys_or_values][dest.tables[request][b], j] = entry


def findings(off: int) -> list[Finding]:
    """Hand golden requests over from pages of 16 to pages of 24."""
    source, dest = NumpyEngine(16, 16), NumpyEngine(24, 10)
    return hand_over(
        GoldenModel(), source, dest, lambda *request: transfer(source, dest, *request, off=off)
    )


if __name__ == "__main__":
    for off in (0, 1):
        found = findings(off)
        print(found[0] if found else "all is well")
