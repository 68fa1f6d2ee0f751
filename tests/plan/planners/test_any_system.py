"""Run files and their axes as candidates."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from plan_cases import Carries, problem

from jaxinfer import JaxinferError
from jaxinfer.config.run_file import RunFile, as_run_file
from jaxinfer.lab.plan.planners.any_system import AnySystem, AnySystemOptions
from jaxinfer.lab.plan.search import DrivenSearch

TWO = {
    "groups": {"g": {"kind": "A10", "devices": 2, "tensor_parallel_size": 1}},
    "instances": {"a": {"group": "g"}, "b": {"group": "g"}},
}


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    """Two systems on the same two GPUs, of another model and workload."""
    made = []
    for name, system in (
        ("balanced", "least_loaded"),
        ("split", {"name": "disaggregated", "prefill": "a", "decode": "b"}),
    ):
        path = tmp_path / f"{name}.yaml"
        file = {"model": "none", "workload": {"trace": "none.csv"}, "system": system} | TWO
        path.write_text(yaml.safe_dump(file))
        made.append(str(path))
    return made


def test_each_file_has_all_values_of_its_axes(files: list[str]) -> None:
    options = AnySystemOptions(
        files={files[0]: {}, files[1]: {"instances.a.max_num_seqs": [1, 2, 4]}},
        axes={"engine.max_num_batched_tokens": [256, 512], "engine.max_model_len": [1024]},
    )
    found = list(AnySystem(options).candidates())
    assert len(found) == 2 + 2 * 3
    base = problem({"maximise": "gpu"})
    seen = set()
    for candidate in found:
        config = as_run_file(base.run_file(candidate.part))
        a = config.instances["a"]
        assert (config.model, a.max_model_len) == ("llama-3-8b", 1024)
        assert config.workload == as_run_file(base.run).workload
        axes = candidate.axes
        assert a.max_num_batched_tokens == axes["engine.max_num_batched_tokens"]
        if axes["file"] == "split":
            assert a.max_num_seqs == axes["instances.a.max_num_seqs"]
        else:
            assert config.system["name"] == "least_loaded"
        seen.add((axes["file"], a.max_num_batched_tokens, a.max_num_seqs))
    assert len(seen) == len(found)


def test_the_system_that_carries_most_is_chosen(files: list[str], carries: Carries) -> None:
    def rate(config: RunFile) -> float:
        return {"least_loaded": 2.0, "disaggregated": 3.0}[config.system["name"]]

    carries.rate = rate
    planner = AnySystem(AnySystemOptions(files={key: {} for key in files}))
    search = DrivenSearch(problem({"maximise": "cluster"}))
    assert planner.plan(search.problem, search).axes == {"file": "split"}


@pytest.mark.parametrize(
    ("file", "axes", "says"),
    [
        ("nothing.yaml", {}, r"planner.files: .*nothing.yaml: No such file"),
        ("list.yaml", {}, r"planner.files: .*list.yaml: must be a run file"),
        ("split.yaml", {"system.name.x": [1]}, "system.name is 'disaggregated', has no options"),
    ],
)
def test_files_that_are_none(
    files: list[str], file: str, axes: dict[str, Any], says: str, tmp_path: Path
) -> None:
    (tmp_path / "list.yaml").write_text("[1]")
    options = AnySystemOptions(files={str(tmp_path / file): axes})
    with pytest.raises(JaxinferError, match=says):
        list(AnySystem(options).candidates())
