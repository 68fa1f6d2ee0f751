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
        backend: Engine that was measured: ``vllm``, ``sglang`` or ``trtllm``.
        version: Its version. No other is taken, but for all-reduces, of which the newest that is
            not newer counts.
        card: Card whose tables count; by default the group's ``kind``.
        fp8: Scales of fp8 products: one per tensor, or per block of 128.
        static_scales: Whether the checkpoint has the activations' scales. Then the quantization
            that was measured within products is taken off.
        quickest_all_reduce: Take the quickest all-reduce of all the folder's cards with links of
            one speed.
        possible_attention: Take another card's prefill attention where the peak FLOPs forbid the
            card's own. The other card of the folder has the same peak.
        small_operators: Count operators on vectors by their bytes.
        experts: Format of experts, in the tables' words, where it is another one.
        expert_parallel: Ways that experts are shared whole; other devices divide each.
        routing: Spread of tokens over experts, in the tables' words.
        expert_blocks: Compute a block of 128 rows for each expert, as vLLM 0.12 does. Filled or
            not, they take as long as dense products of as many rows.
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
    # As aiconfigurator's MOEModel has it; its DeepSeek models have 1.01.
    routing: str = "power_law_1.2"
    expert_blocks: bool = False


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
