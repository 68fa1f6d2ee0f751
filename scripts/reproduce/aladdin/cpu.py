"""Aladdin and the shortest queue in real runs: requests in time, and seconds of workers by role.

The runs are those of ``jaxinfer compare configs/cpu/aladdin.yaml LEAST_LOADED.yaml --out FOLDER``,
where LEAST_LOADED.yaml is the first file with ``system: least_loaded``.
"""

from pathlib import Path

from jaxinfer.report.records import RunRecord, read_run
from scripts.tables import Row

TTFT_S, ATGT_S = 3.0, 0.4


def in_time(run: RunRecord) -> str:
    """Return the number of requests that keep both targets."""
    kept = 0
    for request in run.requests:
        times = request.token_times
        gap = (times[-1] - times[0]) / (len(times) - 1)
        kept += times[0] - request.arrival <= TTFT_S and gap <= ATGT_S
    return f"{kept} of {len(run.requests)}"


def row_of(name: str, run: RunRecord) -> Row:
    """Return the row of a system; if it has no roles, all workers count as on."""
    metrics = run.run["metrics"]
    uses = metrics["instances"].values()
    off = sum(use["role_s"].get("off", 0.0) for use in uses) if name == "Aladdin" else 0.0
    return {
        "system": name,
        "makespan (s)": round(metrics["wall_s"], 1),
        "in time": in_time(run),
        "TTFT p50 (s)": round(metrics["ttft_p50"], 2),
        "TTFT p99 (s)": round(metrics["ttft_p99"], 2),
        "mean gap p50 (ms)": round(1000 * metrics["tpot_p50"]),
        "mean gap p99 (ms)": round(1000 * metrics["tpot_p99"]),
        "workers used": sum(use["first_step"] is not None for use in uses),
        "busy (s)": round(sum(use["busy_s"] for use in uses), 1),
        "on (s)": round(len(uses) * metrics["wall_s"] - off, 1),
        "off (s)": round(off, 1),
    }


def roles(run: RunRecord) -> list[Row]:
    """Return the seconds in which each worker was busy, on and off."""
    metrics, rows = run.run["metrics"], []
    for name, use in metrics["instances"].items():
        off = use["role_s"].get("off", 0.0)
        on = metrics["wall_s"] - off
        rows.append(
            {
                "worker": name,
                "busy (s)": round(use["busy_s"], 1),
                "on (s)": round(on, 1),
                "off (s)": round(off, 1),
            }
        )
    return rows


def both(folder: Path) -> tuple[list[Row], list[Row]]:
    """Return a row for each system, and for each of Aladdin's workers."""
    runs = {
        name: read_run(folder / "runs" / file / "1", name)
        for name, file in (("Aladdin", "aladdin"), ("shortest queue", "least_loaded"))
    }
    return [row_of(name, run) for name, run in runs.items()], roles(runs["Aladdin"])
