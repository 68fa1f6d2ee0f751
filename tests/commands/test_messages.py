"""A mistake in a run file, a setting or a hardware file: one line that begins with its path."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from jaxinfer import JaxinferError
from jaxinfer.config.cluster import InstanceConfig
from jaxinfer.config.groups import GroupConfig
from jaxinfer.config.nodes import read_hardware
from jaxinfer.config.run_file import RunFile, load_run_file
from jaxinfer.config.stages import StageConfig
from jaxinfer.options.validation import OptionError, Options, within
from jaxinfer.request import SamplingParams

CRONUS: dict[str, Any] = {
    "model": "m",
    "engine": {"page_size": 16},
    "groups": {
        "strong": {"devices": 2, "tensor_parallel_size": 1, "emulate": {"slowdown": 2}},
        "weak": {"kind": "A10"},
    },
    "links": [{"between": ["strong", "weak"], "gb_s": 1}],
    "instances": {
        "cpi": {"stages": [{"group": "strong"}, {"group": "strong", "share": 1}]},
        "ppi": {"group": "weak"},
    },
    "system": {"name": "cronus"},
    "workload": {
        "synthetic": {"lengths": "sharegpt"},
        "arrivals": {"kind": "poisson", "rate": 1},
    },
    "simulate": {
        "linear": {"token_s": 1},
        "groups": {"weak": {"linear": {"step_s": 1}}},
    },
    "metrics": {},
}
CRONUS["instances"]["cpi"]["stages"][0]["share"] = 1
SHARES = {name: {"weight": 1, "max_waiting": 1} for name in ("cpi", "ppi")}
PARALLEL = CRONUS | {"system": {"name": "data_parallel", "shares": SHARES}}
HARDWARE: dict[str, Any] = {
    "source": "made up",
    "latency_s": 0,
    "nodes": {"x": {"gpu": "A10", "gpus": 1, "nic_gb_s": 1}},
}

# A group of options: a known one of them that takes a number, and a number out of its bounds.
SECTIONS = [
    (CRONUS, "", "watchdog_s", 0),
    (CRONUS, "engine", "page_size", 0),
    (CRONUS, "groups.strong", "devices", 0),
    (CRONUS, "groups.strong.emulate", "slowdown", 0.5),
    (CRONUS, "instances.cpi", "max_num_seqs", 0),
    (CRONUS, "instances.cpi.stages[1]", "layers", 0),
    (CRONUS, "links[0]", "gb_s", 0),
    (CRONUS, "system", "candidates", 0),
    (PARALLEL, "system.shares.ppi", "weight", 0),
    (CRONUS, "workload", "limit", 0),
    (CRONUS, "workload.synthetic", "count", 0),
    (CRONUS, "workload.arrivals", "rate", 0),
    (CRONUS, "simulate", "hop_s", -1),
    (CRONUS, "simulate.linear", "token_s", -1),
    (CRONUS, "simulate.groups.weak", "reserve_gb", -1),
    (CRONUS, "simulate.groups.weak.linear", "token_s", -1),
    (HARDWARE, "", "latency_s", -1),
    (HARDWARE, "nodes.x", "gpus", 0),
]
# By name: a mapping must hold them.
MAPPINGS = [
    (CRONUS, "groups"),
    (CRONUS, "instances"),
    (PARALLEL, "system.shares"),
    (CRONUS, "simulate.groups"),
    (HARDWARE, "nodes"),
]
WHOLE = [
    (CRONUS, "engine"), (CRONUS, "groups.weak"), (CRONUS, "instances.ppi"), (CRONUS, "metrics"),
    (CRONUS, "instances.cpi.stages[0]"), (CRONUS, "links[0]"), (PARALLEL, "system.shares.cpi"),
    (CRONUS, "workload"), (CRONUS, "workload.arrivals"), (CRONUS, "simulate"),
    (CRONUS, "simulate.groups.weak"), (HARDWARE, "nodes.x"),
]  # fmt: skip
OPTIONAL = [
    (CRONUS, "groups.strong.emulate"),
    (CRONUS, "workload.synthetic"),
    (CRONUS, "simulate.linear"),
    (CRONUS, "simulate.groups.weak.linear"),
]
LISTS = [(CRONUS, "links"), (CRONUS, "instances.cpi.stages"), (CRONUS, "engine.token_buckets")]


def under(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def changed(data: dict[str, Any], path: str, value: object) -> dict[str, Any]:
    """The data with a value in place of what is at a path such as ``links[0].gb_s``."""
    at = data = copy.deepcopy(data)
    *names, last = [
        int(n) if n.isdigit() else n for n in path.replace("[", ".").replace("]", "").split(".")
    ]
    for name in names:
        at = at[name]  # type: ignore[index]
    at[last] = value  # type: ignore[index]
    return data


def complaint(data: dict[str, Any], folder: Path) -> str:
    """Return the complaint about a file, without the file's name."""
    file = folder / "file.yaml"
    file.write_text(yaml.safe_dump(data))
    read: Callable[[Any], Any] = read_hardware if "nodes" in data else load_run_file
    with pytest.raises(JaxinferError) as caught:
        read(str(file))
    (line,) = str(caught.value).splitlines()
    name, colon, reason = line.partition("file.yaml: ")
    assert name.removeprefix("simulate.hardware: ") == f"{folder}/"
    assert colon
    return reason


def check(data: dict[str, Any], path: str, value: object, starts: str, folder: Path) -> None:
    """Check that a value is refused alike in the file and as a setting."""
    assert complaint(changed(data, path, value), folder).startswith(starts)
    if data is HARDWARE or "[" in path:
        return
    file = folder / "right.yaml"
    file.write_text(yaml.safe_dump(data))
    with pytest.raises(JaxinferError) as caught:
        load_run_file(file, [f"{path}={yaml.safe_dump(value, default_flow_style=True)}"])
    (line,) = str(caught.value).splitlines()
    assert line.startswith(f"{file}: {starts}")


def test_the_files_are_right_as_they_stand(tmp_path: Path) -> None:
    for data in (CRONUS, PARALLEL):
        (tmp_path / "right.yaml").write_text(yaml.safe_dump(data))
        load_run_file(tmp_path / "right.yaml")
    (tmp_path / "right.yaml").write_text(yaml.safe_dump(HARDWARE))
    read_hardware(str(tmp_path / "right.yaml"))


@pytest.mark.parametrize(("data", "path", "option", "beyond"), SECTIONS)
def test_an_option_is_named_with_its_path(
    tmp_path: Path, data: dict[str, Any], path: str, option: str, beyond: float
) -> None:
    whole, mistyped = under(path, option), under(path, f"{option}x")
    unknown = f"{mistyped}: unknown option, did you mean {option!r}?"
    check(data, mistyped, 1, unknown, tmp_path)
    check(data, whole, beyond, f"{whole} is {beyond}, must be greater than ", tmp_path)
    check(data, whole, "many", f"{whole} is 'many', must be a", tmp_path)
    check(data, whole, [1], f"{whole} is [1], must be a", tmp_path)


@pytest.mark.parametrize(("data", "path"), MAPPINGS + WHOLE + OPTIONAL)
def test_a_group_of_options_is_a_mapping(tmp_path: Path, data: dict[str, Any], path: str) -> None:
    check(data, path, [1], f"{path} is [1], must be a mapping", tmp_path)
    check(data, path, 3, f"{path} is 3, must be a mapping", tmp_path)
    if (data, path) not in OPTIONAL:
        check(data, path, None, f"{path} is None, must be a mapping", tmp_path)


@pytest.mark.parametrize(("data", "path"), LISTS)
def test_a_list_is_called_a_list(tmp_path: Path, data: dict[str, Any], path: str) -> None:
    check(data, path, {"a": 1}, f"{path} is {{'a': 1}}, must be a list", tmp_path)
    check(data, path, "a", f"{path} is 'a', must be a list", tmp_path)
    if path != "engine.token_buckets":
        check(data, path, None, f"{path} is None, must be a list", tmp_path)


@pytest.mark.parametrize(
    ("data", "path", "value", "starts"),
    [
        (
            CRONUS,
            "instances.cpi.stages[0]",
            {"grup": "strong"},
            "instances.cpi.stages[0].grup: unk",
        ),
        (CRONUS, "instances.cpi.stages[0].group", "strnog", "instances.cpi.stages[0].group: no gr"),
        (CRONUS, "instances.cpi.stages[0].share", None, "instances.cpi.stages: give layers for a"),
        (CRONUS, "instances.ppi.group", "week", "instances.ppi.group: no group 'week': did you m"),
        (CRONUS, "instances.ppi.tensor_parallel_size", 2, "instances.ppi.tensor_parallel_size: an"),
        (CRONUS, "instances.cpi.launch_ahead", True, "instances.cpi.launch_ahead is True, must "),
        (CRONUS, "instances.cpi.max_num_seqs", 1999, "instances.cpi.max_num_batched_tokens is 512"),
        (CRONUS, "instances.cpi.seed", 5, "instances.cpi.seed is 5, must be engine.seed's 0"),
        (CRONUS, "instances.cpi.token_buckets", [64, "a"], "instances.cpi.token_buckets[1] is 'a'"),
        (CRONUS, "groups.strong.devices", 1, "groups.strong.devices is 1, its instances need 2"),
        (
            CRONUS,
            "groups.strong.tensor_parallel_size",
            3,
            "groups.strong.tensor_parallel_size is 3",
        ),
        (CRONUS, "groups.weak.shares", "strong", "groups.weak.kind: leave it out, the devices are"),
        (CRONUS, "groups.1", {"devices": 0}, "groups.1.devices is 0, must be"),
        (CRONUS, "groups.weak.host", "there", "groups.weak.host: must be HOST:PORT, not 'there'"),
        (CRONUS, "groups.weak.host", "a:70000", "groups.weak.host: 'a:70000': the port must be at"),
        (CRONUS, "groups.weak.host", "a:0", "groups.weak.host: must be a port that a worker li"),
        (CRONUS, "groups.weak.ray", True, "groups.weak.ray is True, must be a mapping"),
        (CRONUS, "groups.weak.ray", {"num_gpu": 1}, "groups.weak.ray.num_gpu: unknown option, did"),
        (
            CRONUS,
            "groups.weak",
            {"ray": {}, "process": "own"},
            "groups.weak.process, host, ray: a group has one of them",
        ),
        (CRONUS, "groups.weak.environment", {"A": "b"}, "groups.weak.environment: for a group wi"),
        (CRONUS, "ray", "auto", "ray is auto: no group asks for it, as groups.x.ray: {} does"),
        (CRONUS, "links[0]", {"between": ["a", "b"]}, "links[0].gb_s is missing"),
        (CRONUS, "links[0].between", ["a"], "links[0].between: must be the names of two groups"),
        (CRONUS, "links[0].between", ["a", 1], "links[0].between[1] is 1, must be a string"),
        (CRONUS, "links[0].between", ["strong", "wek"], "links[0].between: no group 'wek': did"),
        (CRONUS, "system", 3, "system: must be a name, or a mapping of name and options, not 3"),
        (CRONUS, "system", None, "system: must be a name, or a mapping of name and options, not N"),
        (CRONUS, "system", "cronos", "system 'cronos': did you mean 'cronus'?"),
        (CRONUS, "system.partial", "pip", "system.partial is 'pip': did you mean 'ppi'?"),
        (CRONUS, "system.hand_off", "late", "system.hand_off is 'late', must be 'on_demand', 'at"),
        (PARALLEL, "system.shares.cpi", {"weight": 1}, "system.shares.cpi.max_waiting is missing"),
        (PARALLEL, "system.shares.ppj", SHARES["ppi"], "system.shares.ppj: did you mean 'ppi'?"),
        (CRONUS, "metrics.ttft_counts_transfr", 1, "metrics.ttft_counts_transfr: unknown option, "),
        (
            CRONUS,
            "metrics.ttft_counts_transfer",
            1,
            "metrics.ttft_counts_transfer is 1, must be tr",
        ),
        (CRONUS, "workload.arrivals.kind", "at_once", "workload.arrivals.rate is for kind poisson"),
        (CRONUS, "workload.arrivals", "gamma", "workload.arrivals: kind gamma needs rate"),
        (CRONUS, "workload.only", "HHHH", "workload.only is 'HHHH', must be 'HPLD', 'HPHD', 'LPH"),
        (CRONUS, "simulate.linear", {}, "simulate.linear: step_s or token_s must be greater"),
        (CRONUS, "simulate.flops", 0.5, "simulate.flops has no effect with linear"),
        (
            CRONUS,
            "simulate.groups.weak.step_s",
            1,
            "simulate.groups.weak.step_s has no effect with",
        ),
        (
            CRONUS,
            "simulate.groups.weak",
            {"step_s": 1.0},
            "simulate.groups.weak.step_s has no effect",
        ),
        (CRONUS, "simulate.groups.weak.node", "a", "simulate.groups.weak.node is 'a', needs sim"),
        (CRONUS, "simulate.groups.weak.node", ["a"], "simulate.groups.weak.node: a group stands o"),
        (CRONUS, "model", ["a"], "model is ['a'], must be a string"),
        (CRONUS, "watchdog_s", float("nan"), "watchdog_s is nan, must be a finite number"),
        (CRONUS, "engine.page_size", "x" * 999, f"engine.page_size is '{'x' * 56}..., must be an"),
        (
            CRONUS,
            "engine.two\nlines",
            1,
            r"engine.'two\nlines': unknown option, known: chunks_in_f",
        ),
        (HARDWARE, "nodes", {}, "nodes is {}, must have at least 1 item"),
        (HARDWARE, "nodes.x.gpu", "A11", "nodes.x.gpu: no GPU 'A11': did you mean 'A10'?"),
        (HARDWARE, "nodes.x", {"gpu": "A10", "nic_gb_s": 1}, "nodes.x.gpus is missing"),
    ],
)
def test_what_is_wrong_is_said_behind_the_path(
    tmp_path: Path, data: dict[str, Any], path: str, value: object, starts: str
) -> None:
    assert complaint(changed(data, path, value), tmp_path).startswith(starts)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["system=cronus", "system.x=1"], "system.x: unknown option, known: "),
        (
            ["workload.arrivals=poisson", "workload.arrivals.rat=1"],
            "workload.arrivals.rat: unknown",
        ),
        (["workload.synthetic=arxiv_4k", "workload.synthetic.x=1"], "workload.synthetic.x: unknow"),
        (["model.x=1"], "--set 'model.x=1': model is 'm', has no options"),
        (["engine.seed.x=1", "engine.seed.x=1"], "engine.seed is {'x': 1}, must be an integer"),
        (["links.gb_s=1"], "--set 'links.gb_s=1': links is [{"),
        (["links[0].gb_s=1"], "--set 'links[0].gb_s=1': a list is set as a whole: links=[...]"),
        (["engine.x"], "--set 'engine.x': must look like engine.max_num_seqs=16"),
        (["engine..x=1"], "--set 'engine..x=1': must look like engine.max_num_seqs=16"),
        (["=1"], "--set '=1': must look like"),
        (["engine={seed: 1, seed: 2}"], "--set 'engine={seed: 1, seed: 2}': 'seed' stands 2 tim"),
        (["model={"], "--set 'model={': while parsing a flow"),
        ([f"model={'[' * 999}"], f"--set 'model={'[' * 50}...: nested too deeply"),
        (
            ["model=2024-13-45"],
            "--set 'model=2024-13-45': not a YAML value: month must be in 1..12",
        ),
    ],
)
def test_settings(tmp_path: Path, settings: list[str], message: str) -> None:
    (tmp_path / "right.yaml").write_text(yaml.safe_dump(CRONUS))
    with pytest.raises(JaxinferError) as caught:
        load_run_file(tmp_path / "right.yaml", settings)
    (line,) = str(caught.value).splitlines()
    assert line.removeprefix(f"{tmp_path}/right.yaml: ").startswith(message)


def test_a_setting_goes_where_the_short_form_has_only_a_name(tmp_path: Path) -> None:
    (tmp_path / "f.yaml").write_text(yaml.safe_dump(CRONUS | {"system": "cronus"}))
    settings = [
        "system.candidates=7",
        "workload.synthetic=arxiv_4k",
        "workload.synthetic.count=3",
        "workload.arrivals=interval",
        "workload.arrivals.seconds=2.5",
    ]
    config = load_run_file(tmp_path / "f.yaml", settings)
    assert config.system == {"name": "cronus", "candidates": 7}
    assert config.workload.synthetic is not None
    assert (config.workload.synthetic.lengths, config.workload.synthetic.count) == ("arxiv_4k", 3)
    assert [item.arrival for item in config.requests()] == [0.0, 2.5, 5.0]


def test_a_setting_changes_no_alias_of_what_it_sets(tmp_path: Path) -> None:
    text = "groups: {a: &g {devices: 1}, b: *g}\ninstances: {a: {group: a}, b: {group: b}}\n"
    (tmp_path / "f.yaml").write_text(f"{text}system: {{name: cronus, partial: a, chunked: b}}")
    config = load_run_file(tmp_path / "f.yaml", ["groups.a.devices=4", "groups.a.kind=A10"])
    assert config.groups == {"a": GroupConfig(devices=4, kind="A10"), "b": GroupConfig()}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"logit_bias": {"5": 101}}, "logit_bias.5 is 101, must be less than or equal to 100"),
        (
            {"stop_token_ids": [1, -1]},
            "stop_token_ids[1] is -1, must be greater than or equal to 0",
        ),
        ({"min_tokens": 20}, "min_tokens is 20, must be at most max_tokens, 16"),
    ],
)
def test_options_made_in_python_complain_alike(given: dict[str, Any], message: str) -> None:
    for make in (SamplingParams.model_validate, lambda given: SamplingParams(**given)):
        with pytest.raises(OptionError) as caught:
            make(given)
        assert str(caught.value).startswith(message)


def test_parts_made_in_python_are_taken_as_they_are() -> None:
    group = GroupConfig(devices=2, tensor_parallel_size=1)
    stages = (StageConfig(group="g", layers=1), StageConfig(group="g", layers=2))
    config = RunFile(groups={"g": group}, instances={"i": InstanceConfig(stages=stages)})
    assert config.groups["g"] is group
    assert config.instances["i"].stages == stages


def test_errors_within_errors() -> None:
    assert str(within("a", JaxinferError("must be"))) == "a: must be"
    assert str(within("a", within("b[0]", JaxinferError("must be")))) == "a.b[0]: must be"

    class Inner(Options):
        size: int | None = None

        def model_post_init(self, context: object, /) -> None:
            if self.size == 1:
                raise OptionError("size is 1, must not be")
            if self.size == 2:
                raise JaxinferError("of two, none is left")

    class Outer(Options):
        inner: dict[str, tuple[Inner, ...] | None]

    for size, message in (
        (1, "inner.x[0].size is 1, must not be"),
        (2, "inner.x[0]: of two, none i"),
    ):
        with pytest.raises(JaxinferError) as caught:
            Outer(inner={"x": ({"size": size},)})  # type: ignore[dict-item]
        assert str(caught.value).startswith(message)
    with pytest.raises(JaxinferError, match=r"^must be a mapping, not 3$"):
        Outer.model_validate(3)
    with pytest.raises(JaxinferError, match=r"^of two, none is left$"):
        Inner(size=2)
