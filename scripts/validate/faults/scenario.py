"""A hand-off with neighbours: other requests on both sides, next to those that move."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache

import numpy as np

from jaxinfer.lab.conformance.check import Finding, check
from jaxinfer.lab.conformance.golden import FORMER, GoldenModel
from jaxinfer.lab.conformance.layout import KVLayout
from jaxinfer.lab.conformance.mover import SLAB_TOKENS, Mover
from jaxinfer.lab.conformance.side import Side

MODEL = GoldenModel()
# Layers that attend to the last 24 tokens; an engine may send only these.
WINDOWED = GoldenModel(windows=(None, 24, None, 24))
# Number of heads of which two devices have one and a half each, so the last is padded.
WIDE = GoldenModel(heads=3, head_dim=32)
# The two requests that move: pages end within one, slabs end within the other.
LENGTHS = {1: 75, 2: 50}
# A request that only the source has; one that only the destination has; and one whose pages at the
# destination were given to request 2 before its transfer arrived.
SOURCE_ONLY, DEST_ONLY, FREED = 3, 4, 9
# A request that is in neither side's tables.
UNKNOWN = 6
OTHER_LENGTH = 40
_SPARE_PAGES = 3
PAIRS: tuple[tuple[KVLayout, KVLayout, GoldenModel], ...] = (
    (KVLayout(), KVLayout(), MODEL),
    (KVLayout(tp=2, page_size=8), KVLayout(page_size=24, keys="NHD", values="NHD"), MODEL),
    (KVLayout(stages=(1, 3), keys="HDN"), KVLayout(tp=4, stages=(2, 2), page_size=8), MODEL),
    (KVLayout(kv_dtype="bfloat16", page_size=24), KVLayout(tp=2, kv_dtype="bfloat16", keys="HDN"),
     MODEL),
    (KVLayout(tp=8, kv_dtype="float16"), KVLayout(tp=2, stages=(3, 1), kv_dtype="float16"), MODEL),
    (KVLayout(page_size=8), KVLayout(tp=2, page_size=8, kv_dtype="int8"), MODEL),
    (KVLayout(stages=(2, 2), kv_dtype="int8", page_size=8), KVLayout(kv_dtype="int8", page_size=24),
     MODEL),
    (KVLayout(kv_dtype="bfloat16", keys="NHD", values="NHD"),
     KVLayout(stages=(2, 2), kv_dtype="float8_e4m3fn", page_size=8), MODEL),
    (KVLayout(kv_dtype="float8_e4m3fn", page_size=8),
     KVLayout(tp=8, page_size=64, keys="HDN"), MODEL),
    (KVLayout(tp=4, kv_dtype="bfloat16", keys="HDN"), KVLayout(tp=2), MODEL),
    (KVLayout(tp=2, stages=(2, 2)), KVLayout(page_size=24), WINDOWED),
    (KVLayout(tp=2, page_size=24), KVLayout(keys="NHD", values="NHD", kv_dtype="bfloat16"), WIDE),
)  # fmt: skip


@dataclass
class Scenario:
    """Two sides before a hand-off.

    Attributes:
        source: side that sends.
        dest: side that receives.
        before: copy of the destination before the hand-off.
        cached: by request, the number of its first tokens that the destination has.
    """

    source: Side
    dest: Side
    before: Side
    cached: Mapping[int, int] = field(default_factory=dict)

    def run(self, mover: Mover) -> list[Finding]:
        """Move all requests, and check them."""
        for request in LENGTHS:
            mover.move(request)
        mover.finish()
        return check(
            self.source,
            self.dest,
            list(LENGTHS),
            before=self.before,
            freed=[FREED],
            cached=self.cached,
        )


def scenario(
    source: KVLayout,
    dest: KVLayout,
    model: GoldenModel,
    cached: Mapping[int, int] | None = None,
    change: Callable[[Side], None] | None = None,
) -> Scenario:
    """Return a new scenario; its sides may be changed.

    Args:
        cached: see ``Scenario``; these entries are moved here.
        change: changes the destination after that.
    """
    given, taken = _side(model, source, True), _side(model, dest, False)
    case = Scenario(given.copy(), taken.copy(), taken, cached or {})
    for request, count in case.cached.items():
        Mover(case.source, case.dest).send(request, 0, count)
    if change:
        change(case.dest)
    if case.cached:
        case.before = case.dest.copy()
    return case


def cached_of(page_size: int) -> dict[int, int]:
    """Return whole pages of each request, if that leaves something to send."""
    counts = {r: max(page_size, SLAB_TOKENS // page_size * page_size) for r in LENGTHS}
    return {request: count for request, count in counts.items() if count < LENGTHS[request]}


@cache
def _side(model: GoldenModel, layout: KVLayout, is_source: bool) -> Side:
    lengths = LENGTHS | {SOURCE_ONLY if is_source else DEST_ONLY: OTHER_LENGTH}
    if is_source:
        lengths |= {FREED: OTHER_LENGTH}
    counts = {request: -(-length // layout.page_size) for request, length in lengths.items()}
    num_pages = 1 + sum(counts.values()) + _SPARE_PAGES
    side = Side(model, layout, num_pages, FORMER + 1 + (not is_source))
    free = (1 + np.random.default_rng(is_source).permutation(num_pages - 1)).tolist()
    for request, count in counts.items():
        side.add(request, lengths[request], [free.pop() for _ in range(count)])
        if is_source or request == DEST_ONLY:
            side.fill(request)
    return side
