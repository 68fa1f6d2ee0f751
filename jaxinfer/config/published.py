"""Operators that others have measured and published, as a run file names them."""

from collections.abc import Mapping
from functools import cache
from typing import Literal

import yaml
from pydantic import Field

from jaxinfer.files.shipped import OPERATORS, OPERATORS_NAME
from jaxinfer.options.validation import Options


class PublishedTables(Options):
    """A folder of measured operators as NVIDIA's aiconfigurator has it, read as it lies.

    Products and KV are of the instance's ``weight_dtype`` and ``kv_cache_dtype``. Each correction
    may be switched off.

    Attributes:
        folder: Folder with a card's tables.
        backend: Engine whose kernels were measured, as ``vllm``, ``sglang`` or ``trtllm``.
        version: Version of that engine. No other is taken, but for all-reduces, of which the newest
            that is not newer counts.
        card: Card whose tables count; by default the one that the group's ``kind`` names.
        fp8: Scales of fp8 products: of each tensor, or of blocks of 128.
        static_scales: Whether the checkpoint has the activations' scales, so that the quantization
            that was measured within products is taken off.
        quickest_all_reduce: Whether the quickest all-reduce counts of all cards of the folder with
            a link of one speed.
        possible_attention: Whether prompts' attention that the card's peak FLOPs forbid counts by
            the table of another card of the folder with the same peak.
        small_operators: Whether operators on vectors, which no table has, count by their bytes.
        experts: Format of experts in the tables' words, where it is not that of the other products.
        expert_parallel: Ways that experts are shared whole; each is divided by the other devices.
        routing: How tokens spread over experts, in the tables' words.
    """

    folder: str = Field(min_length=1)
    backend: str = Field(min_length=1)
    version: str = Field(min_length=1)
    card: str | None = None
    fp8: Literal["tensor", "block"] = "tensor"
    static_scales: bool = False
    quickest_all_reduce: bool = True
    possible_attention: bool = True
    small_operators: bool = True
    experts: Literal["w4a16_mxfp4", "int4_wo"] | None = None
    expert_parallel: int = Field(default=1, ge=1)
    routing: str = "power_law_1.01"


@cache
def shipped_tables() -> Mapping[str, PublishedTables]:
    """Tables that ship, by the names that stand for them in run files, as ``h100``."""
    found = {}
    for path in sorted(OPERATORS.glob("*.yaml")):
        ships = yaml.safe_load(path.read_text(encoding="utf-8"))["ships_as"]
        found[str(ships["name"])] = PublishedTables(
            folder=OPERATORS_NAME,
            backend=ships["backend"],
            version=ships["version"],
            card=path.stem,
        )
    return found
