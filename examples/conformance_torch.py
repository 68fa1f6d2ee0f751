"""The conformance kit's adapter to an engine of torch tensors, as vLLM's paged KV lies.

One tensor a layer, [2, page, token, head, channel], of any dtype of 16 or 32 bits, on any device.
Tested where torch is installed (with 2.13.0): the project does not depend on it.
"""

from collections.abc import Callable, Mapping, Sequence

import torch

from jaxinfer.lab.conformance import KVLayout
from jaxinfer.lab.conformance.layout import LayerPages
from jaxinfer.lab.conformance.side import Pool


class TorchEngine:
    """``allocate`` gives a request pages: the engine's own, so that its tables are under test."""

    def __init__(
        self, kv: Sequence[torch.Tensor], allocate: Callable[[int, int], list[int]]
    ) -> None:
        self.kv, self._allocate = kv, allocate
        _, self.num_pages, page_size, _, _ = kv[0].shape
        name = str(kv[0].dtype).removeprefix("torch.")
        self.layout = KVLayout(page_size=page_size, kv_dtype=name, keys="NHD", values="NHD")

    def write(self, pools: Mapping[LayerPages, tuple[Pool, Pool]]) -> None:
        """Set all pages."""
        for shard, pair in pools.items():
            for part, pool in enumerate(pair):
                bits = torch.from_numpy(pool.pages.view(f"i{pool.pages.itemsize}"))
                tensor = self.kv[shard.layer]
                tensor[part].copy_(bits.view(tensor.dtype))

    def read(self) -> Mapping[LayerPages, tuple[Pool, Pool]]:
        """Return all pages as they are."""
        found = {}
        for layer, tensor in enumerate(self.kv):
            bits = tensor.cpu().view(torch.int16 if tensor.itemsize == 2 else torch.int32).numpy()
            stored = (
                "f4"
                if tensor.dtype == torch.float32
                else ("f2" if tensor.dtype == torch.float16 else "u2")
            )
            found[LayerPages(0, 0, layer)] = Pool(bits[0].view(stored)), Pool(bits[1].view(stored))
        return found

    def reserve(self, request: int, length: int) -> list[int]:
        """Give a request its pages."""
        return self._allocate(request, length)
