"""Systems by name, and what is said of wrong ones: one line each."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from serving_checks import Run, make_kv, make_requests, new_instance

from jaxinfer import JaxinferError
from jaxinfer.papers.cronus.system import Cronus
from jaxinfer.systems.data_parallel import DataParallel
from jaxinfer.systems.disaggregated import Disaggregated
from jaxinfer.systems.least_loaded import LeastLoaded
from jaxinfer.systems.registry import SYSTEMS, make_system
from jaxinfer.systems.single import PipelineParallel, Single

SHARE = {"weight": 1, "max_waiting": 1}
PAIR = ["ppi", "cpi"]
OWN = """
from jaxinfer.serving.system import Assignment, System
from jaxinfer.serving.views import Leg
from jaxinfer.options.validation import Options

class MyOptions(Options):
    name_of_first: str = "x"

class MySystem(System):
    Options = MyOptions

    def route(self, waiting, cluster):
        return [Assignment(r.id, (Leg(self.options.name_of_first),)) for r in waiting]

class NoRoute(System):
    pass

class OddOptions(MySystem):
    Options = 3

class NoTicks(MySystem):
    tick_interval = 0

class NoRoutes(MySystem):
    def routes(self, instances):
        return None

class OddTicks(MySystem):
    tick_interval = "1"

class OddPairs(MySystem):
    def routes(self, instances):
        return [("ppi", "cpi"), ("ppi", "cpj")]

class NumbersAsPairs(MySystem):
    def routes(self, instances):
        return [1, 2]

class NotMade(MySystem):
    def __init__(self, options):
        self.first = {}["first"]

class Leaves(MySystem):
    def __init__(self, options):
        raise SystemExit(3)

class NotChecked(MySystem):
    def check(self, instances):
        return 1 / 0

class NoSystem:
    pass

number = 3
"""


# Those that have all they need without options, and their classes.
COMPLETE = {
    "least_loaded": "LeastLoaded",
    "prefix_aware": "PrefixAware",
    "session_affinity": "SessionAffinity",
    "hetis": "Hetis",
    "takeover": "Takeover",
}


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module with a user's own system."""
    (tmp_path / "own_system_of_a_user.py").write_text(OWN)
    (tmp_path / "broken_system_of_a_user.py").write_text("import module_that_is_not_there\n")
    monkeypatch.syspath_prepend(tmp_path)
    return "own_system_of_a_user"


@pytest.mark.parametrize(
    ("config", "instances", "kind"),
    [
        ({"name": "single"}, ["engine"], Single),
        ({"name": "pipeline_parallel"}, ["x"], PipelineParallel),
        ({"name": "cronus"}, PAIR, Cronus),
        ({"name": "cronus", "partial": "cpi", "chunked": "ppi", "cut_tokens": 0}, PAIR, Cronus),
        ({"name": "cronus", "cut_share": 0.5, "hand_off": "per_chunk"}, [*PAIR, "third"], Cronus),
        ({"name": "disaggregated"}, ["prefill", "decode"], Disaggregated),
        ({"name": "disaggregated", "prefill": ["a", "b"], "decode": "c"}, "abc", Disaggregated),
        ({"name": "least_loaded"}, ["engine"], LeastLoaded),
        ({"name": "least_loaded", "choose": "power_of_two", "seed": 3}, "abc", LeastLoaded),
        ({"name": "least_loaded", "choose": "round_robin"}, "abc", LeastLoaded),
        ({"name": "data_parallel", "shares": {"a": SHARE, "b": SHARE}}, "ab", DataParallel),
        ({"name": "jaxinfer.systems.single:Single"}, ["engine"], Single),
    ],
)
def test_systems(config: dict[str, Any], instances: Sequence[str], kind: type) -> None:
    before = dict(config)
    assert type(make_system(config, instances)) is kind
    assert config == before


def test_all_that_come_with_jaxinfer_are_found() -> None:
    for name, target in SYSTEMS.items():
        if name in COMPLETE:
            assert type(make_system({"name": name}, ["x", "y"])).__name__ == COMPLETE[name]
        else:
            wrong = f"system {name}: |system.(shares|partial|prefill|prompt|units|flows|ttft_s)"
            with pytest.raises(JaxinferError, match=wrong):
                make_system({"name": name}, ["x", "y"])
        file = "single" if name == "pipeline_parallel" else name
        places = f"jaxinfer.systems.{file}:", f"jaxinfer.papers.{name}.system:"
        assert target.startswith(places)


def test_names() -> None:
    assert list(SYSTEMS) == [
        "single", "cronus", "data_parallel", "takeover", "least_loaded", "prefix_aware",
        "session_affinity", "disaggregated", "distserve", "splitwise", "tetriinfer", "hexgen2",
        "hetis", "aladdin", "pipeline_parallel"]  # fmt: skip


def test_a_users_own(own: str) -> None:
    system = make_system({"name": f"{own}:MySystem", "name_of_first": "a"}, ["a"])
    outcome = Run(system, [new_instance("a", make_kv(9, 4))], make_requests([(3, 3)])).verify()
    assert outcome.route_of("r0") == [("a", 5)]


def error_of(config: dict[str, Any], instances: Sequence[str] = PAIR) -> str:
    with pytest.raises(JaxinferError) as caught:
        make_system(config, instances)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("config", "instances", "message"),
    [
        (
            {"name": "disaggregated", "prefill": "e", "decode": "d"},
            ["e0", "e1", "d"],
            "system.prefill is 'e', but there are e0 to e1: give a list, [e] for all of them",
        ),
        (
            {"name": "disaggregated", "prefill": "d", "decode": ["d", "e"]},
            ["d", *(f"e{number}" for number in range(12))],
            "system.decode[1] is 'e', but there are e0 to e11: give a list, [e] for all of them",
        ),
        (
            {"name": "cronus", "partial": "p", "chunked": "c"},
            ["p0", "p1", "c"],
            "system.partial is 'p', but there are p0 to p1: give the name of one",
        ),
        ({"name": "cronus", "partial": "p", "chunked": "c"}, ["p0", "c"], "did you mean 'p0'?"),
        (
            {"name": "splitwise", "prompt": ["prompts"], "token": ["token"]},
            [*(f"prompt{number}" for number in range(10)), "token"],
            "system.prompt is 'prompts': did you mean prompt0 to prompt9?",
        ),
    ],
)
def test_a_name_with_replicas(config: dict[str, Any], instances: list[str], message: str) -> None:
    assert message in error_of(config, instances)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "system.name is missing, must be one of single, cronus, "),
        ({"name": 3}, "system.name is 3, must be one of single, cronus, "),
        ({"name": "cronos"}, "system 'cronos': did you mean 'cronus'?; or my_module:MySystem"),
        (
            {"name": "xyz"},
            "system 'xyz': known: aladdin, cronus, data_parallel, disaggregated, ",
        ),
        ({"name": "Cronus"}, "did you mean 'cronus'?"),
        ({"name": "not_there_at_all:MySystem"}, "No module named 'not_there_at_all'"),
        ({"name": "cronus", "cut_shar": 1}, "system.cut_shar: unknown option, did you mean 'cut_s"),
        (
            {"name": "cronus", "cut": 1},
            "system.cut: unknown option, known: by_cache, candidates, chunked",
        ),
        ({"name": "cronus", "cut_share": 2.5}, "system.cut_share is 2.5, must be less than or e"),
        ({"name": "cronus", "cut_share": -0.5}, "system.cut_share is -0.5, must be greater than"),
        ({"name": "cronus", "cut_share": "half"}, "system.cut_share is 'half', must be"),
        ({"name": "cronus", "cut_share": True}, "system.cut_share is True, must be"),
        ({"name": "cronus", "cut_tokens": -1}, "system.cut_tokens is -1, must be greater than or"),
        ({"name": "cronus", "cut_tokens": 1.0}, "system.cut_tokens is 1.0, must be"),
        ({"name": "cronus", "cut_share": 0, "cut_tokens": 0}, "both cut_share and cut_tokens: giv"),
        ({"name": "cronus", "hand_off": "late"}, "hand_off is 'late', must be 'on_demand', 'at_e"),
        ({"name": "cronus", "max_in_partial": 0}, "max_in_partial is 0, must be greater than"),
        ({"name": "cronus", "candidates": 0}, "candidates is 0, must be greater than"),
        ({"name": "cronus", "partial": "ppj"}, "partial is 'ppj': did you mean 'ppi'?"),
        ({"name": "cronus", "chunked": "xyz"}, "chunked is 'xyz': known: cpi, ppi"),
        ({"name": "cronus", "chunked": "ppi"}, "partial and chunked are both 'ppi'"),
        ({"name": "disaggregated"}, "system.prefill is 'prefill': known: cpi, ppi"),
        ({"name": "disaggregated", "prefill": "ppi"}, "decode is 'decode': known: cpi, ppi"),
        ({"name": "disaggregated", "prefill": "ppi", "decode": "ppi"}, "are both 'ppi'"),
        ({"name": "disaggregated", "prefill": ["ppi", "x"]}, "system.prefill[1] is 'x': known: cp"),
        ({"name": "disaggregated", "prefill": []}, "system.prefill is [], must have at least 1"),
        ({"name": "disaggregated", "prefill": 3}, "system.prefill is 3, must be a list"),
        (
            {"name": "disaggregated", "prefill": ["ppi", "cpi"], "decode": ["cpi"]},
            "system disaggregated: prefill and decode are both 'cpi'",
        ),
        (
            {"name": "disaggregated", "prefill": ["ppi", "ppi"], "decode": "cpi"},
            "system disaggregated: prefill has 'ppi' twice",
        ),
        ({"name": "least_loaded", "choose": "jsq"}, "system.choose is 'jsq', must be 'join_short"),
        (
            {"name": "least_loaded", "choose": "round_robin", "load": "tokens"},
            "system.load: round_robin goes by none",
        ),
        ({"name": "least_loaded", "seed": 0}, "system.seed: join_shortest_queue draws nothing"),
        ({"name": "disaggregated", "cut": 1}, "system.cut: unknown option, known: decode"),
        (
            {"name": "data_parallel"},
            "system.shares is missing, must be {NAME: {weight: ..., max_waiting: ...}}",
        ),
        ({"name": "data_parallel", "shares": {"ppi": SHARE}}, "instance 'cpi' has none"),
        ({"name": "data_parallel", "shares": {"ppi": SHARE, "cpj": SHARE}}, "mean 'cpi'?"),
        ({"name": "data_parallel", "shares": {"ppi": {"weight": 1}}}, "ppi.max_waiting is missing"),
        ({"name": "data_parallel", "shares": {"ppi": SHARE | {"weight": 0}}}, "weight is 0, must"),
        ({"name": "data_parallel", "shares": {"ppi": SHARE | {"max_waiting": 0}}}, "_waiting is 0"),
        ({"name": "data_parallel", "shares": {"ppi": SHARE | {"most": 1}}}, "ppi.most: unknown"),
        ({"name": "data_parallel", "shares": 3}, "system.shares is 3, must be a mapping"),
        (
            {"name": "single"},
            "system single: needs exactly one instance, but the run file has ppi, cpi",
        ),
        (
            {"name": "pipeline_parallel"},
            "system pipeline_parallel: needs exactly one instance, but",
        ),
        ({"name": "single", "cut": 1}, "system.cut: unknown option, known: none"),
    ],
)
def test_errors(config: dict[str, Any], message: str) -> None:
    assert message in error_of(config)


def test_errors_of_a_users_own(own: str) -> None:
    assert "NoSystem is no jaxinfer.serving.system.System" in error_of({"name": f"{own}:NoSystem"})
    assert "OddOptions.Options is 3, must be a subclass" in error_of({"name": f"{own}:OddOptions"})
    assert "tick_interval is 0, must be seconds above" in error_of({"name": f"{own}:NoTicks"})
    assert "routes returns None, must be pairs" in error_of({"name": f"{own}:NoRoutes"})
    assert "NoRoute has no method route(waiting, cluster)" in error_of({"name": f"{own}:NoRoute"})
    assert "tick_interval is '1', must be seconds above" in error_of({"name": f"{own}:OddTicks"})
    wanted = "must be two of the instances: ppi, cpi"
    odd = error_of({"name": f"{own}:OddPairs"})
    assert f"routes returns ('ppi', 'cpj') among its pairs, {wanted}" in odd
    assert f"routes returns 1 among its pairs, {wanted}" in error_of(
        {"name": f"{own}:NumbersAsPairs"}
    )
    made = error_of({"name": f"{own}:NotMade"})
    assert made.startswith(f"system {own}:NotMade: making it raises KeyError: 'first' (")
    line = OWN[: OWN.index('{}["first"]')].count("\n") + 1
    assert made.endswith(f"own_system_of_a_user.py, line {line})")
    left = error_of({"name": f"{own}:Leaves"})
    assert left.startswith(f"system {own}:Leaves: making it raises SystemExit: 3 (")
    assert "raises ZeroDivisionError: division by" in error_of({"name": f"{own}:NotChecked"})
    assert "number is no jaxinfer.serving.system.System" in error_of({"name": f"{own}:number"})
    assert "has no attribute 'MySystm'" in error_of({"name": f"{own}:MySystm"})
    assert "module_that_is_not_there" in error_of({"name": "broken_system_of_a_user:MySystem"})
    wrong = {"name": f"{own}:MySystem", "name_of_frist": "a"}
    assert "did you mean 'name_of_first'?" in error_of(wrong)


def test_what_a_users_module_raises_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "divides_by_zero_of_a_user.py").write_text("half = 2\nhalf / 0\n")
    monkeypatch.syspath_prepend(tmp_path)
    name = "divides_by_zero_of_a_user:MySystem"
    message = error_of({"name": name})
    assert message.startswith(f"system '{name}': importing divides_by_zero_of_a_user raises ZeroD")
    assert message.endswith("divides_by_zero_of_a_user.py, line 2)")


@pytest.mark.parametrize("name", [":MySystem", ".relative:MySystem"])
def test_names_without_a_module(name: str) -> None:
    with pytest.raises(JaxinferError, match="system "):
        make_system({"name": name}, PAIR)


def test_a_prefill_instance_takes_one_request_at_least() -> None:
    config = {"name": "disaggregated", "prefill": "ppi", "decode": "cpi", "max_in_prefill": 0}
    with pytest.raises(JaxinferError, match="max_in_prefill is 0, must be"):
        make_system(config, PAIR)
