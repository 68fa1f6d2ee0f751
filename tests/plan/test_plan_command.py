"""``jaxinfer plan`` from a file to a run file."""

import csv
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner
from plan_cases import RUN

from jaxinfer import JaxinferError
from jaxinfer.commands.capacity import capacity
from jaxinfer.commands.plan import plan
from jaxinfer.config.run_file import as_run_file, load_run_file
from jaxinfer.lab.plan.planners.colocated import Colocated, ColocatedOptions

FILE: dict[str, Any] = {
    "planner": {
        "name": "colocated",
        "gpus": {"A10": 2, "A100-80G-SXM": 1},
        "tensor_parallel": [1, 2],
        "engines": {"small": {"max_num_batched_tokens": 256}, "large": {"max_num_seqs": 1024}},
        "seqs_per_stage": [4, 512],
    },
    "goal": {"maximise": "gpu", "slo": "ttft:p90=2,tbt:p99=0.2", "at_once": 3, "fresh_seeds": 2},
    "run": RUN
    | {
        "workload": {"synthetic": {"lengths": "azure_code", "count": 30, "seed": 0}},
        "engine": {"max_model_len": 16384, "max_num_batched_tokens": 2048},
    },
}


class OneArgument:
    def plan(self, search: Any) -> None: ...


def run(folder: Path, file: dict[str, Any], *more: str) -> str:
    path = folder / "plan.yaml"
    path.write_text(yaml.safe_dump(file))
    asked = [str(path), "--out", str(folder / "out"), *more]
    return CliRunner().invoke(plan, asked, catch_exceptions=False).stdout


def test_a_search_from_file_to_file(tmp_path: Path) -> None:
    said = run(tmp_path, FILE, "--jobs", "1")
    out = tmp_path / "out"
    with (out / "plan.csv").open() as file:
        table = list(csv.DictReader(file))
    # A10s: 2 shapes; A100: 1; times 2 engines and 2 numbers of sequences. 256 tokens do not do for
    # 512 sequences.
    assert len(table) == 3 * 4
    refused = [row for row in table if row["refused"]]
    assert {(row["engine"], row["seqs_per_stage"]) for row in refused} == {("small", "512")}
    exact = [row for row in table if not row["given_up"] and not row["refused"]]
    best = max(exact, key=lambda row: float(row["value"]))
    assert all(float(row["requests_s"]) > 0 for row in exact)
    text = (out / "run.yaml").read_text()
    chosen = load_run_file(out / "run.yaml")
    (group,) = chosen.groups.values()
    assert (group.kind, str(group.stage_devices)) == (best["gpu"], best["tp"])
    # The command at its head finds the same rate.
    command = next(line for line in text.splitlines() if "jaxinfer capacity" in line)
    words = command.split("jaxinfer capacity ")[1].split()
    found = CliRunner().invoke(capacity, words, catch_exceptions=False).stdout.splitlines()
    assert f"capacity: {float(best['requests_s']):.3g} requests/s" in found[-2]
    # Thirty requests do not tell, which is said wherever the rate is.
    rate = f"{float(best['requests_s']):.3g} requests/s"
    warning = f"warning: too few requests to show whether the cluster can sustain {rate}"
    assert found[-1].startswith(warning)
    assert found[-1] in said.splitlines()
    assert found[-1].endswith(f"use {best['enough_requests']} requests or more")
    assert f"# {found[-1]}" in text.splitlines()
    assert f"{float(best['value']):.4g} requests/s per GPU" in said
    assert all((out / f"{name}.png").stat().st_size > 1000 for name in ("rates", "latencies"))
    # Again, with as many processes as there are: nothing is left to do, and nothing changes.
    files = {path.name: path.read_bytes() for path in out.iterdir()}
    run(tmp_path, FILE)
    assert {path.name: path.read_bytes() for path in out.iterdir()} == files
    # But for what was edited, which stays until it is said that it may go.
    edited = out / "run.yaml"
    edited.write_text(text + "# mine\n")
    with pytest.raises(
        JaxinferError, match=r"^.*run\.yaml: was edited since it was found here.*--force"
    ):
        run(tmp_path, FILE, "--jobs", "1")
    assert edited.read_text() == text + "# mine\n"
    run(tmp_path, FILE, "--jobs", "1", "--force")
    assert {path.name: path.read_bytes() for path in out.iterdir()} == files


def test_two_processes_find_the_same_files(tmp_path: Path) -> None:
    small = FILE | {"planner": FILE["planner"] | {"gpus": {"A10": 2}}}
    found = []
    for jobs in ("1", "2"):
        folder = tmp_path / jobs
        folder.mkdir()
        run(folder, small, "--jobs", jobs)
        names = ("plan.csv", "run.yaml", "evaluations.jsonl")
        texts = [(folder / "out" / name).read_text().replace(str(folder), "") for name in names]
        # The last line of a run file tells of its path, too, which is at its head.
        *plain, kept = [text.partition("# sha256")[0] for text in texts]
        found.append([*plain, sorted(kept.splitlines())])  # In the order in which they were found.
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"planner": "colocatd"}, "did you mean 'colocated'"),
        ({"planner": {"gpus": {}}}, "planner.name is missing"),
        ({"planner": {"name": "colocated", "gpus": {"A10": 0}}}, "planner.gpus.A10 is 0"),
        ({"planner": {"name": "colocated", "gpus": {"A10": 1}, "tp": [1]}}, "planner.tp: unknown"),
        (
            {"planner": {"name": "colocated", "gpus": {"A10": 1}, "costs": {"A1": {}}}},
            "planner.costs.A1: gpus has none: did you mean 'A10'",
        ),
        ({"planner": 3}, "planner: must be a name, or a mapping of name and options, not 3"),
        ({"planner": {"name": "colocated", "gpus": {"B1": 1}}}, "none of 1 candidates is valid"),
        ({"planner": "no_such:Planner"}, "no_such"),
        ({"planner": "json:JSONDecoder"}, "no class with a method plan"),
        # As planners were once written.
        ({"planner": f"{__name__}:OneArgument"}, r"method plan\(problem, search\)"),
        ({"goal": {"slo": "ttft=1"}}, "goal: give either maximise or minimise"),
        ({"goal": {"slo": "ttft=1", "minimise": "usd"}}, "goal.rate is missing"),
        ({"goal": {"slo": "ttft=1", "maximise": "gpu", "rate": 1}}, "goal.rate is 1, and is for"),
        ({"goal": {"slo": "ttf=1", "maximise": "gpu"}}, "did you mean 'ttft'"),
        ({"goal": {"slo": "ttft=1", "maximise": "usd"}}, "are needed, but not known"),
        ({"prices": {"A10": 0}}, "prices.A10 is 0, must be above 0"),
        ({"run": {"model": "llama-3-8b"}}, "run.workload: needs a trace"),
        ({"run": RUN | {"workload": {"synthetic": "nowhere"}}}, "run.workload.synthetic"),
        ({"plan": 1}, "plan: unknown option"),
    ],
)
def test_a_plan_file_that_is_none(change: dict[str, Any], says: str, tmp_path: Path) -> None:
    with pytest.raises(JaxinferError, match=says) as raised:
        run(tmp_path, FILE | change, "--jobs", "1")
    assert "\n" not in str(raised.value)
    assert str(raised.value).startswith(f"plan file {tmp_path / 'plan.yaml'}: ")


def test_a_folder_of_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("mine")
    with pytest.raises(JaxinferError, match="out: has files of something else"):
        run(tmp_path, FILE)
    (tmp_path / "out" / "plan.json").write_text("{}")
    with pytest.raises(JaxinferError, match=r"out: plan\.json holds another task"):
        run(tmp_path, FILE)


def test_vidurs_space_has_450_configurations() -> None:
    """Section 7.3: two GPUs, TP and PP of 1, 2 and 4, five schedulers, five batch sizes."""
    options = ColocatedOptions(
        gpus={"A100-80G-SXM": 16, "H100-SXM": 16},
        tensor_parallel=(1, 2, 4),
        pipeline_parallel=(1, 2, 4),
        engines={name: {} for name in ("vllm", "orca", "chunk_512", "chunk_1k", "chunk_2k")},
        seqs_per_stage=(32, 64, 128, 256, 512),
    )
    found = list(Colocated(options).candidates())
    assert len({candidate.key for candidate in found}) == len(found) == 450
    for candidate in found:
        axes = candidate.axes
        assert axes["replicas"] == 16 // (int(axes["tp"] or 0) * int(axes["pp"] or 0))


def test_sequences_by_stage_and_costs_by_kind() -> None:
    options = ColocatedOptions.model_validate(
        {
            "gpus": {"A10": 2, "L4": 2},
            "pipeline_parallel": [1, 2],
            "seqs_per_stage": [8],
            "engines": {"chunks": {"max_num_batched_tokens": 8}},
            "costs": {"L4": {"flops": 0.3}},
        }
    )
    seqs, flops = {}, {}
    for candidate in Colocated(options).candidates():
        config = as_run_file(RUN | dict(candidate.part))
        at = candidate.axes["gpu"], candidate.axes["pp"]
        (seqs[at],) = {each.max_num_seqs for each in config.cluster().instances.values()}
        flops[at] = config.simulate.of("g").flops
    # A step has tokens for as many as a stage's share of them.
    assert seqs == {("A10", 1): 8, ("A10", 2): 16, ("L4", 1): 8, ("L4", 2): 16}
    assert flops == {("A10", 1): 0.6, ("A10", 2): 0.6, ("L4", 1): 0.3, ("L4", 2): 0.3}
