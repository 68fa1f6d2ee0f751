"""Options that name measured operators which others have published."""

from collections.abc import Mapping
from functools import cache
from typing import Literal

import yaml
from pydantic import Field

from jaxinfer.files.shipped import OPERATORS, OPERATORS_NAME
from jaxinfer.options.validation import Options


class PublishedTables(Options):
    """A folder of measured operators in the format of NVIDIA's aiconfigurator.

    Products and KV have the instance's ``weight_dtype`` and ``kv_cache_dtype``. Each correction may
    be switched off.

    Attributes:
        folder: Folder with the tables of a GPU.
        backend: Engine that was measured: ``vllm``, ``sglang`` or ``trtllm``.
        version: Version of that engine. Only all-reduces may come from another version: the newest
            one that is not newer.
        card: GPU whose tables are used; by default the group's ``kind``.
        fp8: Scales of fp8 weights: one per tensor, or one per block of 128.
        static_scales: Whether the checkpoint has scales for activations. The time to quantise
            activations is then subtracted from products.
        quickest_all_reduce: Use the fastest all-reduce of all GPUs in the folder whose links are
            equally fast.
        possible_attention: Replace measured attention that the GPU's peaks rule out. Where prompts
            exceed the peak FLOPs, use the table of another GPU in the folder with the same peak.
            Where decodes exceed the peak bandwidth, reduce them to the bandwidth that other
            operators reach; where another GPU with the same FLOPs and no more bandwidth is faster,
            use its decodes.
        other_heads: If an attention table lacks the model's number of heads, use a fraction of the
            heads with proportionally more sequences, or the mean of the next smaller and larger
            numbers of query heads.
        small_operators: Include norms, activations and other small operators, with times that
            follow from their bytes.
        experts: Format of the experts' weights, named as in the tables; by default, the format of
            the other weights.
        expert_parallel: Degree of expert parallelism: number of parts into which the devices are
            divided; each part holds different experts, and the devices of a part split each expert.
        routing: Distribution of tokens over experts, named as in the tables.
        expert_blocks: Compute a full block of 128 rows for each expert, as vLLM 0.12 does. A block
            takes as long as a dense product with as many rows.
    """

    folder: str = Field(min_length=1)
    backend: str = Field(min_length=1)
    version: str = Field(min_length=1)
    card: str | None = None
    fp8: Literal["tensor", "block"] = "tensor"
    static_scales: bool = False
    quickest_all_reduce: bool = True
    possible_attention: bool = True
    other_heads: bool = False
    small_operators: bool = True
    experts: Literal["w4a16_mxfp4", "int4_wo"] | None = None
    expert_parallel: int = Field(default=1, ge=1)
    # As in aiconfigurator's MOEModel; its DeepSeek models use 1.01.
    routing: str = "power_law_1.2"
    expert_blocks: bool = False


@cache
def shipped_tables() -> Mapping[str, PublishedTables]:
    """Return shipped tables by the names that run files use, such as ``h100``."""
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
