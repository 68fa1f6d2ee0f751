"""A folder of published operators, made up: times are sums whose parts tell."""

from collections.abc import Callable, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from jaxinfer.hardware.catalogue import ModelShape
from jaxinfer.simulate.published.convert import Wanted

MODEL = ModelShape(
    hidden_size=512,
    intermediate_size=1024,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=4096,
    head_dim=128,
)
M = (1, 2, 4, 8, 16, 32, 64, 128, 256, 1024)
N = (32, 64, 128, 256, 512, 1024, 2048, 4096)
K = (64, 128, 256, 512, 1024, 2048)


def gemm_ms(dtype: str, m: int, n: int, k: int) -> float:
    """Powers of n and k, so that what lies between is known; in fp8, half of it and a scaling."""
    whole = 1e-6 * (10 + m) * n**0.75 * k**0.5
    return whole if dtype == "bfloat16" else 0.5 * whole + 1e-4 * m * k**0.5


def chunks_ms(batch: int, length: int) -> float:
    """A launch, tokens and pairs."""
    return 0.01 + 1e-5 * batch * length + 1e-8 * batch * length * length / 2


def decodes_ms(batch: int, entries: int) -> float:
    """A launch, rows and entries that they see."""
    return 0.005 + 1e-4 * batch + 1e-6 * batch * entries


def all_reduce_ms(elements: int, kind: str = "trtllm") -> float:
    """A launch, which a graph takes off, and elements."""
    return (0.002 if kind != "vllm_eager" else 0.02) + 1e-8 * elements


def write(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write one table."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist([dict(row) for row in rows]), path)


def make_card(
    root: Path,
    card: str = "x9_sxm",
    backend: str = "trtllm",
    version: str = "1.2.0",
    link: float = 4.5e11,
    reduce_ms: Callable[[int, str], float] = all_reduce_ms,
    model: ModelShape = MODEL,
) -> Path:
    """A card with one version of one backend."""
    numbers = {
        "gpu": {
            "mem_bw": 1e12,
            "mem_bw_empirical_scaling_factor": 0.8,
            "mem_empirical_constant_latency": 3e-6,
        },
        "node": {"intra_node_bw": link},
    }
    root.mkdir(exist_ok=True)
    (root / f"{card}.yaml").write_text(yaml.safe_dump(numbers))
    where = backend, version
    write(
        root.joinpath(card, "gemm", *where, "gemm_perf.parquet"),
        [
            {"gemm_dtype": d, "m": m, "n": n, "k": k, "latency": gemm_ms(d, m, n, k)}
            for d, m, n, k in product(("bfloat16", "fp8"), M, N, K)
        ],
    )
    own: dict[str, Any] = {"head_dim": model.head_size, "beam_width": 1, "window_size": 0}
    heads = [
        own
        | {
            "num_heads": model.num_attention_heads // tp,
            "num_key_value_heads": model.num_key_value_heads // tp,
            "attn_dtype": "bfloat16",
            "kv_cache_dtype": kv,
        }
        for tp in (1, 2)
        for kv in ("bfloat16", "fp8")
    ]
    write(
        root.joinpath(card, "attention", *where, "context_attention_perf.parquet"),
        [
            h | {"batch_size": b, "isl": s, "step": 0, "latency": chunks_ms(b, s)}
            for h, b, s in product(heads, (1, 2, 4), (16, 64, 256, 1024))
        ],
    )
    write(
        root.joinpath(card, "attention", *where, "generation_attention_perf.parquet"),
        [
            h | {"batch_size": b, "isl": 1, "step": s, "latency": decodes_ms(b, 1 + s)}
            for h, b, s in product(heads, (1, 4, 16, 64), (15, 255, 2047))
        ],
    )
    kinds = ("vllm_graph", "vllm_eager") if backend == "vllm" else ("trtllm",)
    write(
        root.joinpath(card, "comm", *where, "custom_allreduce_perf.parquet"),
        [
            {
                "num_gpus": 2,
                "allreduce_dtype": "bfloat16",
                "backend": kind,
                "message_size": 2**power,
                "latency": reduce_ms(2**power, kind),
            }
            for kind in kinds
            for power in range(7, 21)
        ],
    )
    return root


def wanted(root: Path, **changes: Any) -> Wanted:
    """The made-up model on one device."""
    asked: dict[str, Any] = {
        "folder": root, "backend": "trtllm", "version": "1.2.0", "card": None, "kind": "X9-SXM",
        "model": MODEL, "devices": 1, "products": "bfloat16", "kv": "bfloat16",
        "static_scales": False, "quickest_all_reduce": True, "possible_attention": True,
        "other_heads": False, "small_operators": True, "sharers": 1, "experts": None,
        "expert_parallel": 1, "routing": "balanced", "expert_blocks": False,
    }  # fmt: skip
    return Wanted(**(asked | changes))
