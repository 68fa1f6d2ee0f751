"""Runs of steps beside the same steps one by one."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxinfer import JaxinferError
from jaxinfer.config.run_file import RunFile
from jaxinfer.serving.request_state import RequestState
from jaxinfer.simulate.run import prepare, serve
from jaxinfer.workload.bench_request import BenchRequest

# Figures of the process, not of what it has simulated.
MEASURED = {"loop_s", "peak_rss_mib"}


def outcome(
    config: RunFile, work: Sequence[BenchRequest], runs: bool, folder: Path | None = None
) -> dict[str, Any]:
    """Return the figures of a run, the times of its requests, and what its folder has."""
    cluster = prepare(config.model_copy(update={"ledger": folder is not None}))
    found: dict[str, Any] = {}
    times: list[tuple[str, list[float]]] = []

    def on_request(request: RequestState, each: Sequence[float]) -> None:
        times.append((request.id, list(each)))

    try:
        metrics = serve(cluster, work, folder, on_request, in_runs=runs)
        found["figures"] = {k: v for k, v in vars(metrics).items() if k not in MEASURED}
    except JaxinferError as error:
        found["error"] = str(error)
    lines = sorted(folder.rglob("*.jsonl")) if folder else ()
    return found | {"times": times, "files": {path.name: path.read_bytes() for path in lines}}


def compare_runs(config: RunFile, work: Sequence[BenchRequest], folder: Path, said: str) -> None:
    """Run step by step, and in runs with and without files."""
    steps = outcome(config, work, False, folder / "steps")
    if "error" not in steps:
        assert set(steps["files"]) == {"ledger.jsonl", "steps.jsonl", "requests.jsonl"}
    assert steps == outcome(config, work, True, folder / "runs"), f"{said}: other files"
    assert steps | {"files": {}} == outcome(config, work, True), f"{said}: other figures"
