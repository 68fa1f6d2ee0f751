"""Simulations whose records are read and then deleted."""

from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypeVar

from jaxinfer.config.run_file import RunFile
from jaxinfer.report.metrics import RunMetrics
from jaxinfer.simulate.run import simulate
from jaxinfer.workload.lengths import BenchRequest

T = TypeVar("T")


def recorded(
    config: RunFile, work: Sequence[BenchRequest], read: Callable[[Path], T]
) -> tuple[RunMetrics, T]:
    """Return a simulation's metrics, and the result of ``read`` on its folder."""
    with TemporaryDirectory() as folder:
        metrics = simulate(config, work, folder)
        (run,) = Path(folder).iterdir()
        return metrics, read(run)
