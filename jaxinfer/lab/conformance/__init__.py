"""A conformance kit for KV hand-offs between any engines; it needs only numpy.

The value of each golden entry says which request, layer, head and token it belongs to (``golden``).
Two sides store them as their engines do (``layout``, ``side``). After any hand-off, ``check``
compares the entries that arrived, and names the fault by the origin of wrong ones. ``mover`` is a
correct hand-off between any two layouts, and ``faults`` has incorrect ones. ``adapter`` is the only
interface to an engine. docs/proof.md has the table of names.
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
