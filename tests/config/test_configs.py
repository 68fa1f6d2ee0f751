"""The run files that come with jaxinfer are read without a complaint, and mistakes are named."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from jaxinfer import JaxinferError
from jaxinfer.commands.common import workload_settings
from jaxinfer.config.cluster import InstanceConfig
from jaxinfer.config.engine import EngineOptions
from jaxinfer.config.groups import GroupConfig
from jaxinfer.config.run_file import RunFile, load_run_file
from jaxinfer.lab.compare import load_systems
from jaxinfer.lab.plan.candidate import Candidate, Score
from jaxinfer.lab.plan.problem import load_options, load_problem
from jaxinfer.lab.plan.registry import make_planner
from jaxinfer.lab.plan.search import DrivenSearch
from jaxinfer.lab.plan.sweep.sweep import clusters
from jaxinfer.lab.plan.sweep.sweep_file import Sweep

ROOT = Path(__file__).parents[2]
# Others than run files: test_nodes.py, test_targets.py and test_shipped_tables.py have them.
OTHERS = ("clusters", "targets", "plan", "sweep", "operators")
CONFIGS = ROOT / "configs"
FILES = sorted(
    p for p in CONFIGS.rglob("*/*.yaml") if p.relative_to(CONFIGS).parts[0] not in OTHERS
)
DEAR = ("hexgen2", "splitwise", "splitwise_power")  # Their planners search for seconds.
PLANS = [
    pytest.param(path, marks=pytest.mark.slow if path.stem in DEAR else [], id=path.stem)
    for path in sorted((CONFIGS / "plan").glob("*.yaml"))
]
SWEEPS = sorted((CONFIGS / "sweep").glob("*.yaml"))
CRONUS = CONFIGS / "cpu" / "cronus.yaml"


@pytest.mark.parametrize("path", FILES, ids=lambda p: f"{p.parent.name}/{p.stem}")
def test_run_files_are_valid(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    config = load_run_file(path)
    if config.workload.trace:
        assert len(config.requests()) > 0


@pytest.mark.parametrize("path", PLANS)
def test_plan_files_are_valid(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    seen: list[Candidate] = []

    class Look(DrivenSearch):
        """Simulates nothing."""

        def best(self, candidates: list[Candidate], *known: object, **more: object) -> Candidate:
            seen.extend(candidates)
            return next(each for each in candidates if not each.refused)

        def scores(self, candidates: list[Candidate], rate: float | None = None) -> list[Score]:
            seen.extend(candidates)
            return [Score(1.0) for _ in candidates]

    search = Look(load_problem(path))
    chosen = make_planner(search.problem.planner).plan(search.problem, search)
    costs = [search.evaluator.costs(search.problem.run_file(c.part)) for c in (*seen, chosen)]
    # One finds its plan by itself, before any simulation.
    assert len(costs) > 2 or search.problem.planner["name"] == "hexgen2"


@pytest.mark.parametrize("path", SWEEPS, ids=lambda p: p.stem)
def test_sweep_files_are_valid(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    sweep = load_options(Sweep, "sweep file", path, ())
    assert len(clusters(sweep)) == len(list(sweep.candidates()))


def test_there_is_one_for_each_system() -> None:
    systems = {"single", "data_parallel", "pipeline_parallel", "disaggregated", "cronus"}
    of_cpu = {"least_loaded", "distserve", "splitwise", "tetriinfer", "hexgen2", "hetis"}
    of_cpu |= {"aladdin", "takeover", "prefix_aware", "session_affinity"}
    for platform, more in (("cpu", of_cpu), ("gpu", of_cpu)):
        here = [path for path in FILES if path.parent.name == platform]
        assert {load_run_file(path).system["name"] for path in here} == systems | more
    papers = {"cronus", "distserve", "splitwise", "tetriinfer", "disaggregated", "hetis"}
    here = [path for path in FILES if path.parent.name == "one_card"]
    found = {load_run_file(path).system["name"] for path in here}
    assert found == papers | {"hexgen2", "aladdin", "takeover", "single"}


# (what is set, what the error says)
MISTAKES: list[tuple[dict[str, Any], str]] = [
    ({"instances.cpi.group": "strnog"}, "no group 'strnog': did you mean 'strong'?"),
    ({"instances.cpi.group": None}, "instances.cpi: needs either group or stages"),
    ({"instances.cpi.page_sise": 8}, "did you mean 'page_size'?"),
    ({"instances.cpi.tensor_parallel_size": 2}, "instances.cpi.tensor_parallel_size: an option"),
    ({"groups.strong.devices": 0}, "groups.strong.devices is 0"),
    ({"groups.strong.tensor_parallel_size": 2}, "groups.strong.tensor_parallel_size is 2, the g"),
    ({"groups.third": {"platform": "cpu"}}, "groups.third: no instance stands on it"),
    ({"groups.strong.emulate.slowdown": 0.5}, "slowdown is 0.5"),
    (
        {"groups.weak.shares": "strong"},
        "groups.weak.platform: leave it out, the devices are those of strong",
    ),
    ({"groups.weak": {"shares": "strnog"}}, "groups.weak.shares: no group 'strnog': did you mean"),
    ({"groups.strong.platform": "tpu"}, "groups.strong.platform is 'tpu'"),
    ({"system": "cronos"}, "system 'cronos': did you mean 'cronus'?"),
    ({"system.name": None}, "system.name is missing, must be one of single, "),
    ({"system.partial": "pip"}, "system.partial is 'pip': did you mean 'ppi'?"),
    ({"system.partial": "cpi"}, "system cronus: partial and chunked are both 'cpi'"),
    ({"system.cut_shar": 1}, "system.cut_shar: unknown option, did you mean 'cut_share'?"),
    ({"system": "no_module:Thing"}, "No module named 'no_module'"),
    ({"system": "json:loads"}, "loads is no jaxinfer.serving.system.System"),
    (
        {"system": "single"},
        "system single: needs exactly one instance, but the run file has cpi, ppi",
    ),
    (
        {"links": [{"between": ["strong", "wek"], "gb_s": 1}]},
        "no group 'wek': did you mean 'weak'?",
    ),
    (
        {"links": [{"between": ["strong"], "gb_s": 1}]},
        "links[0].between: must be the names of two groups",
    ),
    ({"links": [{"between": ["strong", "weak"], "gb_s": 0}]}, "links[0].gb_s is 0"),
    ({"workload.arrivals": "poisson"}, "workload.arrivals: kind poisson needs rate"),
    ({"workload.arrivals": {"kind": "interval", "rate": 1}}, "rate is for kind poisson or gamma"),
    ({"instances.ppi.token_buckets": [32, 64]}, "token_buckets is [32, 64], must rise from"),
    ({"watchdog_s": -1}, "watchdog_s is -1"),
    ({"instances.cpi.seed": 5}, "instances.cpi.seed is 5, must be engine.seed's 0"),
    (
        {"instances.cpi.generation_config": "vllm"},
        "instances.cpi.generation_config is vllm, must be engine.generation_config's auto",
    ),
]


@pytest.mark.parametrize(("changes", "message"), MISTAKES, ids=lambda m: str(m)[:50])
def test_mistakes_are_named(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    data = yaml.safe_load(CRONUS.read_text())
    for key, value in changes.items():
        *path, last = key.split(".")
        at = data
        for name in path:
            at = at.setdefault(name, {})
        at[last] = value
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(data))
    with pytest.raises(JaxinferError) as caught:
        load_run_file(file)
    assert str(caught.value).startswith(f"{file}: ")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_groups_without_instances(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("groups: {a: {devices: 1}}\n")
    with pytest.raises(JaxinferError, match="groups and links need instances"):
        load_run_file(file)
    file.write_text("groups: [a]\n")
    with pytest.raises(JaxinferError, match=r"groups is \['a'\], must be a mapping"):
        load_run_file(file)


def test_instances_made_in_python_have_the_engine_s_options() -> None:
    instances = {"a": InstanceConfig(group="a", page_size=8), "b": InstanceConfig(group="b")}
    config = RunFile(
        engine=EngineOptions(page_size=32, max_num_seqs=4),
        groups={"a": GroupConfig(), "b": GroupConfig()},
        instances=instances,
    )
    made = config.cluster().instances
    assert [(i.group, i.page_size, i.max_num_seqs) for i in made.values()] == [
        ("a", 8, 4),
        ("b", 32, 4),
    ]
    with pytest.raises(JaxinferError, match=r"instances\.a\.tensor_parallel_size: an option of"):
        RunFile(engine=EngineOptions(tensor_parallel_size=2), instances=instances)


@pytest.mark.parametrize("name", ["my trace #1.csv", "a: b.csv", "'q'.csv", "null", "1.5"])
def test_a_trace_s_name_is_taken_as_it_is(name: str) -> None:
    assert load_run_file(None, workload_settings(name, None)).workload.trace == name


@pytest.mark.parametrize(
    ("systems", "found"),
    [
        ([], ["cronus"]),
        (["single"], ["cronus", "single"]),
        (["single", "data_parallel"], ["cronus", "single", "data_parallel"]),
        (["single", "cronus"], ["single", "cronus"]),
    ],
)
def test_a_file_is_compared_with_the_systems_beside_it(
    systems: list[str], found: list[str]
) -> None:
    configs = load_systems([str(CRONUS)], systems)
    assert list(configs) == found
    assert [config.system["name"] for config in configs.values()] == found


def test_a_file_of_another_suffix_is_compared_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "mine.yml").write_text(CRONUS.read_text())
    (tmp_path / "other.yaml").write_text("system: single\n")
    configs = load_systems([str(tmp_path / "mine.yml")], ["other"])
    assert [config.system["name"] for config in configs.values()] == ["cronus", "single"]
    with pytest.raises(JaxinferError, match=r"two of .*other\.yaml, .*other\.yaml have one name"):
        load_systems([str(tmp_path / "mine.yml")], ["other", "other"])


def test_systems_stand_beside_one_file() -> None:
    with pytest.raises(JaxinferError, match=r"folder of a\.yaml: give only this run file"):
        load_systems(["a.yaml", "b.yaml"], ["cronus"])
