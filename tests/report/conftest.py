"""Two groups and four requests, small enough for figures by hand."""

import pytest

from jaxinfer.report.records import RequestRecord, RunRecord, StepRecord, TransferRecord


@pytest.fixture
def small_run() -> RunRecord:
    """Ten seconds: instance ``a`` on ``low``, and ``b`` with a stage on each group.

    On ``low``, steps of ``a`` and of ``b`` overlap; the transfers of ``a`` do, too.
    """
    return RunRecord(
        name="small",
        wall_s=10.0,
        groups={"a": ("low",), "b": ("low", "high")},
        emulated=(),
        steps=(
            StepRecord("a", ((0.0, 2.0),), 100, 0),
            StepRecord("b", ((1.0, 3.0), (3.0, 6.0)), 50, 2),
            StepRecord("b", ((3.0, 4.5), (6.0, 7.0)), 0, 3),
            StepRecord("a", ((4.0, 5.0),), 60, 0),
        ),
        transfers=(
            TransferRecord("r0", "a", "b", 50, 1000, 2.0, 2.25, 2.75, 0.5),
            TransferRecord("r3", "a", "b", 20, 400, 2.5, 2.5, 3.5, 0.25),
        ),
        requests=(
            RequestRecord("r0", 0.0, 100, (1.0, 2.0, 4.0), 50, 1, None),
            RequestRecord("r1", 1.0, 50, (2.0, 2.5), 0, 0, None),
            RequestRecord("r2", 1.5, 9000, (), 0, 0, "the prompt is too long"),
            RequestRecord("r3", 2.0, 80, (7.0,), 20, 2, None),
        ),
        run={},
    )
