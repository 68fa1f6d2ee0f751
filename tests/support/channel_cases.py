"""Pairs of stages between which one number goes, and transfers to and from pages that are none."""

from itertools import count
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.config.cluster import LinkConfig
from jaxinfer.runtime.kv.stage_pair import StagePair
from jaxinfer.serving.batch import Transfer

LINK = LinkConfig(between=("g", "h"), gb_s=2e-3, latency_s=0.05)  # 2,000 tokens a second.
ENDS = count()


class Pages:
    """The form of a pair's slabs, and the pages at both ends, of which one number is sent.

    A stage's plan is the number of its device.
    """

    token_bytes, first = 1000, 0
    shape, dtype = (8,), np.dtype("float32")

    def __init__(self) -> None:
        self.array: Any = jnp.zeros(1)
        self.sent: Any = None
        self.checked: Any = None
        self.placed: list[tuple[int, int]] = []

    def sharding(self, plan: int) -> jax.sharding.Sharding:
        return jax.sharding.SingleDeviceSharding(jax.devices()[plan])

    def take(self, table: list[int], start: int, stop: int) -> tuple[Any, Any]:
        return self.array, self.sent

    def place(self, array: jax.Array, table: list[int], start: int, stop: int) -> Any:
        assert array.sharding == self.sharding(1)
        self.placed.append((start, stop))
        return self.checked


def between(
    link: LinkConfig | None = None, groups: tuple[str, str] = ("g", "h"), shard: int = 0
) -> StagePair:
    pages: Any = Pages()
    return StagePair(pages, shard, shard, 16, groups, link, next(ENDS), next(ENDS))


class Hold:
    def __init__(self) -> None:
        self.tables = [[[3, 4, 5]]] * 2


def transfer(
    source: str, dest: str, start: int = 0, stop: int = 100, to: object = None
) -> Transfer:
    """Return a transfer to pages of its own, or to those of ``to``."""
    request: Any = SimpleNamespace(id="r")
    holds: list[Any] = [Hold(), to or Hold()]
    return Transfer(request, 0, source, dest, *holds, start, stop, 0.0)
