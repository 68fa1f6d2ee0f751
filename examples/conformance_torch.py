"""An adapter of the conformance kit for torch tensors with the layout of vLLM's paged KV.

There is one tensor per layer, [2, page, token, head, channel], of any 16-bit or 32-bit dtype, on
any device. The test needs torch (2.13.0 was used), on which the project does not depend.
"""

from collections.abc import Callable, Mapping, Sequence

import torch

from jaxinfer.lab.conformance import KVLayout
from jaxinfer.lab.conformance.layout import LayerPages
from jaxinfer.lab.conformance.side import Pool


class TorchEngine:
    """Pages in torch tensors; ``allocate`` is the engine's own, so that its tables are tested."""

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
