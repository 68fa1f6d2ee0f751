"""Made-up rows of measured points."""

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxinfer.lab.validate.points import COLUMNS, OPTIONAL


def row(**changes: str) -> dict[str, str]:
    """A point of aiconfigurator's columns."""
    given = {
        "id": "a", "backend": "trtllm", "backend_version": "1.2.0", "model_path": "made/up",
        "system": "x9_sxm", "precision": "fp8", "mode": "agg", "isl": "64", "osl": "8",
        "gemm_quant_mode": "", "batch_size": "4.0", "tp_size": "1.0", "pp_size": "1.0",
        "silicon_ttft_ms": "10.0", "silicon_tpot_ms": "5.0",
    }  # fmt: skip
    return given | changes


def write_points(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    """Write rows as a CSV."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, [*COLUMNS, *OPTIONAL])
        writer.writeheader()
        writer.writerows(rows)
    return path
