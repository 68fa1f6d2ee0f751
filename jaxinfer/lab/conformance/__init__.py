"""A conformance kit for hand-offs of KV between engines: numpy alone, no engine of ours.

Golden entries say by their values which request, layer, head and token they belong to (``golden``);
two sides lay them out as their engines do (``layout``, ``side``); after any hand-off, ``check``
compares the entries that arrived, and names the fault by the origin of wrong ones. ``mover`` is a
correct hand-off between any two layouts, and ``faults`` has incorrect ones. ``adapter`` is the
whole seam to an engine. docs/proof.md has the table of names.
"""

from jaxinfer.lab.conformance.adapter import HandOffEngine, hand_over
from jaxinfer.lab.conformance.check import Finding, check
from jaxinfer.lab.conformance.golden import GoldenModel
from jaxinfer.lab.conformance.layout import KVLayout
from jaxinfer.lab.conformance.mover import move
from jaxinfer.lab.conformance.side import Side

__all__ = [
    "Finding",
    "GoldenModel",
    "HandOffEngine",
    "KVLayout",
    "Side",
    "check",
    "hand_over",
    "move",
]
