"""Run files that ship come to the same files and figures step by step and in runs of steps."""

from pathlib import Path

import pytest
from same_runs import compare_runs

from jaxinfer import JaxinferError
from jaxinfer.config.run_file import load_run_file
from jaxinfer.config.workload import Workload
from jaxinfer.files.shipped import SHIPPED, shipped_files
from jaxinfer.simulate.run import prepare

WORKLOAD = {
    "synthetic": "azure_conversation",
    "arrivals": {"kind": "poisson", "rate": 4.0},
    "limit": 40,
}
SOME = (
    "cronus/cronus.yaml",
    "takeover/pair.yaml",
    "policies/whole_prompts.yaml",
    "splitwise/ha.yaml",
)


def check(name: str, folder: Path) -> bool:
    """Compare the runs of a file; False where it is no run file, or has no simulation."""
    try:
        config = load_run_file(SHIPPED / name)
        config = config.model_copy(update={"workload": Workload.model_validate(WORKLOAD)})
        prepare(config)
    except JaxinferError:
        return False
    compare_runs(config, config.requests(), folder, name)
    return True


@pytest.mark.parametrize("name", SOME)
def test_some_run_files(name: str, tmp_path: Path) -> None:
    assert check(name, tmp_path)


@pytest.mark.slow
def test_all_run_files(tmp_path: Path) -> None:
    names = [name for name in shipped_files() if name.endswith(".yaml") and "/" in name]
    checked = [name for number, name in enumerate(names) if check(name, tmp_path / str(number))]
    assert len(checked) > 40
