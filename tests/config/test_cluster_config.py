"""Groups, instances and links that fit together, and what follows from them."""

from typing import Any

import pytest

from jaxinfer import JaxinferError
from jaxinfer.config.cluster import (
    ClusterConfig,
    InstanceConfig,
    LinkConfig,
    StageConfig,
    instance_options,
    one_engine,
)
from jaxinfer.config.engine import EngineOptions
from jaxinfer.config.groups import Emulate, GroupConfig, RayDemands
from jaxinfer.config.processes import is_divided, part_of, processes_of, started_together


def cluster(
    devices: int = 1, links: tuple[LinkConfig, ...] = (), **instances: dict[str, Any]
) -> ClusterConfig:
    """Return a cluster of two groups: ``a`` with ``devices`` devices, and ``b`` with three."""
    return ClusterConfig(
        groups={
            "a": GroupConfig(devices=devices, tensor_parallel_size=1, platform="cpu"),
            "b": GroupConfig(devices=3, emulate=Emulate(slowdown=2.5)),
        },
        instances={name: InstanceConfig(**given) for name, given in instances.items()},
        links=links,
    )


def link(one: str, other: str, gb_s: float = 2.0, latency_s: float = 0.5) -> LinkConfig:
    return LinkConfig(between=(one, other), gb_s=gb_s, latency_s=latency_s)


def test_each_stage_takes_devices_of_its_own() -> None:
    stages = (StageConfig(group="a"), StageConfig(group="a"), StageConfig(group="b"))
    both: dict[str, Any] = {"x": {"stages": stages}, "y": {"group": "a"}}
    assert cluster(3, **both).instances["x"].places == stages
    assert cluster(4, **both).instances["y"].places == (StageConfig(group="a"),)
    with pytest.raises(JaxinferError, match=r"^groups\.a\.devices is 2, its instances need 3$"):
        cluster(2, **both)
    with pytest.raises(JaxinferError, match=r"^groups\.b\.devices is 3, its instances need 6$"):
        cluster(1, x={"group": "a"}, y={"group": "b"}, z={"group": "b"})
    with pytest.raises(JaxinferError, match=r"^groups\.b: no instance stands on it$"):
        cluster(1, x={"group": "a"})


def test_one_link_between_two_groups() -> None:
    on: dict[str, Any] = {"x": {"group": "a"}, "y": {"group": "b"}}
    made = cluster(links=(link("b", "a"),), **on)
    assert made.link("a", "b") is made.link("b", "a") is made.links[0]
    assert made.link("a", "a") is None
    assert cluster(**on).link("a", "b") is None
    with pytest.raises(JaxinferError, match=r"^links: 2 between a and b$"):
        cluster(links=(link("a", "b"), link("b", "a")), **on)
    with pytest.raises(JaxinferError, match=r"^links\[1\]\.between: no group 'c': known: a, b$"):
        cluster(links=(link("a", "b"), link("a", "c")), **on)


def test_a_link_s_time() -> None:
    assert link("a", "b").seconds(3 * 10**9) == 0.5 + 1.5


def test_what_is_emulated_is_said() -> None:
    made = cluster(links=(link("a", "b"),), x={"group": "a"}, y={"group": "b"})
    assert made.emulated == ["group b 2.5 times slower", "link a - b of 2 GB/s, 0.5 s"]
    assert [group.slowdown for group in made.groups.values()] == [1.0, 2.5]


def test_weights_are_the_same_in_all_instances() -> None:
    dummy, real = {"load_format": "dummy", "group": "a"}, {"group": "b"}
    assert cluster(x=dummy, y=real | {"load_format": "dummy"}).load_format == "dummy"
    assert cluster(x=dummy | {"load_format": "auto"}, y=real).load_format == "auto"
    with pytest.raises(JaxinferError, match=r"^load_format is auto and dummy, must be the same"):
        cluster(x=dummy, y=real)


def test_groups() -> None:
    assert GroupConfig(devices=4).stage_devices == 4
    assert GroupConfig(devices=4, tensor_parallel_size=2).stage_devices == 2
    assert GroupConfig(devices=4, tensor_parallel_size=4).stage_devices == 4
    assert GroupConfig(emulate=Emulate(slowdown=1)).slowdown == 1
    with pytest.raises(JaxinferError, match=r"^tensor_parallel_size is 5, the group has 4 devices"):
        GroupConfig(devices=4, tensor_parallel_size=5)
    with pytest.raises(JaxinferError, match=r"^slowdown is 0\.9, must be greater than or equal"):
        Emulate(slowdown=0.9)


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"group": "a", "stages": (StageConfig(group="a"),)},
        {"group": ""},
    ],
)
def test_an_instance_stands_somewhere(given: dict[str, Any]) -> None:
    with pytest.raises(JaxinferError, match=r"^needs either group or stages$"):
        InstanceConfig(**given)


@pytest.mark.parametrize(
    "stages",
    [
        [{"layers": 2}, {}],
        [{"share": 2.0}, {}],
        [{"share": 2.0}, {"layers": 2}],
        [{"share": 2.0, "layers": 2}, {"share": 2.0, "layers": 2}],
    ],
)
def test_layers_of_all_stages_or_shares(stages: list[dict[str, Any]]) -> None:
    with pytest.raises(JaxinferError, match=r"^stages: give layers for all of them, or shares, or"):
        InstanceConfig(stages=tuple(StageConfig(group="a", **stage) for stage in stages))


def test_decodes_are_launched_ahead_on_one_stage_alone() -> None:
    two = (StageConfig(group="a"), StageConfig(group="b"))
    assert InstanceConfig(group="a", launch_ahead=True).launch_ahead
    assert InstanceConfig(stages=two[:1], launch_ahead=True).launch_ahead
    assert InstanceConfig(stages=two, launch_ahead=False).stages == two
    with pytest.raises(JaxinferError, match=r"^launch_ahead is True, must be false with several"):
        InstanceConfig(stages=two, launch_ahead=True)
    options = EngineOptions(max_num_seqs=7, max_num_batched_tokens=70)
    found = [
        (o.launch_ahead, o.max_in_flight, o.max_num_seqs, o.max_num_batched_tokens)
        for o in (
            instance_options(options, 1),
            instance_options(options, 3),
            instance_options(options.model_copy(update={"launch_ahead": False}), 1),
        )
    ]
    assert found == [(True, 2, 7, 70), (False, 3, 7, 70), (False, 1, 7, 70)]


@pytest.mark.parametrize("chunks", [1, "all"])
def test_chunks_in_flight_are_as_asked_for(chunks: Any) -> None:
    options = EngineOptions(chunks_in_flight=chunks)
    assert {instance_options(options, stages).chunks_in_flight for stages in (1, 3)} == {chunks}


def test_an_engine_alone_is_a_cluster_of_its_devices() -> None:
    made = one_engine(EngineOptions(tensor_parallel_size=4, seed=3, page_size=16))
    assert made.groups == {"engine": GroupConfig(devices=4)}
    assert made.instances == {"engine": InstanceConfig(group="engine", seed=3, page_size=16)}
    assert made.links == ()


@pytest.mark.parametrize(
    "given", [{"process": "own"}, {"host": "[::1]:9"}, {"ray": RayDemands(resources={"A10": 1})}]
)
def test_a_process_has_its_part_alone(given: dict[str, Any]) -> None:
    """The starter knows where, and with what; the process does not."""
    made = ClusterConfig(
        groups={"a": GroupConfig(), "b": GroupConfig(environment={"X": "1"}, **given)},
        instances={"x": InstanceConfig(group="a"), "y": InstanceConfig(group="b")},
        links=(link("a", "b"),),
    )
    assert [processes_of(made, name)[0] for name in "xy"] == [None, "b"]
    for process, group, instance in ((None, "a", "x"), ("b", "b", "y")):
        part = part_of(made, process)
        assert part.groups == {group: GroupConfig()}
        assert list(part.instances) == [instance]
        assert part.links == ()


def test_what_may_be_started_again_has_a_process_of_its_own() -> None:
    """The process itself is told nothing of it."""
    with pytest.raises(
        JaxinferError, match=r"^restart is 1, must be 0 without process: own, host or ray: "
    ):
        GroupConfig(restart=1)
    with pytest.raises(JaxinferError, match=r"restart.* -1"):
        GroupConfig(process="own", restart=-1)
    made = ClusterConfig(
        groups={"g": GroupConfig(process="own", restart=2)},
        instances={"x": InstanceConfig(group="g")},
    )
    assert made.groups["g"].restart == 2
    assert part_of(made, "g").groups["g"] == GroupConfig()


def divided(
    *groups: str,
    restart: int = 0,
    here: str = "",
    lends: Any = (),
    again: Any = (),
    **options: Any,
) -> ClusterConfig:
    """Return a pipeline over groups that have a process each, but those ``here``.

    Args:
        lends: attention groups of all stages; ``again``: those that are started again.
    """
    stages = tuple(
        StageConfig(group=name, layers=n, attention=lends) for n, name in enumerate(groups, 1)
    )
    return ClusterConfig(
        groups={
            name: GroupConfig(
                devices=2 if name in lends else 4,
                tensor_parallel_size=None if name in lends else 1,
                process=None if name in here else "own",
                restart=restart if name == groups[-1] else int(name in again),
            )
            for name in (*groups, *lends)
        },
        instances={"x": InstanceConfig(stages=stages, **options)},
    )


def test_each_process_has_its_stages_of_a_pipeline() -> None:
    made = divided("a", "a", "b", page_size=32)
    assert processes_of(made, "x") == ("a", "a", "b")
    assert is_divided(made, "x")
    for process, layers in (("a", [1, 2]), ("b", [3])):
        part = part_of(made, process)
        assert [stage.layers for stage in part.instances["x"].stages] == layers
        assert list(part.groups) == [process]
        assert not part.groups[process].is_apart
        assert part.instances["x"].page_size == 32
    assert part_of(made, None).instances == {}
    assert (part_of(made, "a").load_format, part_of(made, None).load_format) == ("auto", "dummy")
    assert not is_divided(divided("a", "a"), "x")
    assert not is_divided(divided("a", "b", here="ab"), "x")


@pytest.mark.parametrize(
    ("groups", "options", "message"),
    [
        ("ab", {"here": "b"}, r"^instances\.x\.stages: group a has .* own, must b have, too: "),
        ("aba", {}, r"^instances\.x\.stages: those on one group must follow one another"),
        (
            "aba",
            {"lends": ["c"], "enable_prefix_caching": False},
            r"^instances\.x\.stages: those on one group must follow one another",
        ),
        ("ab", {"restart": 2}, r"^groups\.a\.restart is 0, must be 2 as that of b: instances\.x"),
        (
            "ab",
            {"again": ["c"], "lends": ["c"], "enable_prefix_caching": False},
            r"^groups\.a\.restart is 0, must be 1 as that of c: instances\.x stands on both, which",
        ),
    ],
)
def test_pipelines_that_no_processes_can_have(
    groups: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(JaxinferError, match=message):
        divided(*groups, **options)


def test_who_shares_a_pipeline_is_started_again_together() -> None:
    """Also by another instance's: c is a's by way of b; d is alone, and e is never."""
    times = {"a": 1, "b": 1, "c": 1, "d": 2, "e": 0}
    one = {"x": "ab", "y": "cb", "z": "d", "v": "e", "w": "d"}
    made = ClusterConfig(
        groups={
            name: GroupConfig(devices=2, tensor_parallel_size=1, process="own", restart=count)
            for name, count in times.items()
        },
        instances={
            name: InstanceConfig(stages=tuple(StageConfig(group=g, layers=1) for g in groups))
            for name, groups in one.items()
        },
    )
    assert sorted(map(sorted, started_together(made))) == [["a", "b", "c"], ["d"]]


@pytest.mark.parametrize(
    ("groups", "restart", "again", "together"),
    [
        ("a", 2, "", ["acd"]),
        ("a", 2, "d", ["acd"]),
        ("a", 0, "d", ["d"]),
        ("ab", 1, "acd", ["abcd"]),
        ("ab", 0, "", []),
    ],
)
def test_attention_groups_are_started_again_with_their_stages(
    groups: str, restart: int, again: str, together: list[str]
) -> None:
    made = divided(
        *groups, lends=["c", "d"], restart=restart, again=again, enable_prefix_caching=False
    )
    assert started_together(made) == [[*each] for each in together]


def test_attention_groups_stand_in_one_process_with_their_stage() -> None:
    attention: Any = ["b"]
    stage = StageConfig(group="a", attention=attention)
    with pytest.raises(JaxinferError, match=r"^instances\.x\.stages: group b has a process of its"):
        ClusterConfig(
            groups={"a": GroupConfig(), "b": GroupConfig(process="own")},
            instances={"x": InstanceConfig(stages=(stage,), enable_prefix_caching=False)},
        )


def sharing(**changes: Any) -> ClusterConfig:
    """A cluster of three groups: ``b`` and ``c`` share the devices of ``a``, which has two."""
    groups: dict[str, Any] = {
        "a": {"devices": 2, "tensor_parallel_size": 1},
        "b": {"shares": "a", "devices": 2},
        "c": {"shares": "a"},
    }
    for key, value in changes.items():
        groups[key] = groups.get(key, {}) | value
    instances = {"w": {"group": "a"}, "x": {"group": "a"}, "y": {"group": "b"}, "z": {"group": "c"}}
    return ClusterConfig.model_validate({"groups": groups, "instances": instances})


def test_groups_that_share_devices_need_none_of_their_own() -> None:
    """Each one's instances have room on what it uses, however many others use it."""
    made = sharing(c={"emulate": {"slowdown": 3}})
    assert made.emulated == ["group b on a's devices", "group c 3 times slower on a's devices"]
    assert [made.home(name) for name in "abc"] == ["a", "a", "a"]
    assert [processes_of(made, name)[0] for name in "wyz"] == [None, None, None]
    with pytest.raises(JaxinferError, match=r"^groups\.a\.devices is 1, its instances need 2$"):
        sharing(a={"devices": 1}, b={"devices": 1})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"b": {"shares": "d"}}, r"^groups\.b\.shares: no group 'd': known: a, b, c$"),
        ({"b": {"shares": "b"}}, r"^groups\.b\.shares is b, which has no devices of its own: name"),
        ({"c": {"shares": "b"}}, r"^groups\.c\.shares is b, which has no devices of its own: name"),
        ({"b": {"devices": 3}}, r"^groups\.b\.devices is 3, a has 2$"),
        ({"b": {"platform": "gpu"}}, r"^groups\.b\.platform: leave it out, the devices are those"),
        ({"b": {"kind": "H100"}}, r"^groups\.b\.kind: leave it out, the devices are those of a$"),
        ({"b": {"process": "own"}}, r"^groups\.b\.shares is a: groups that share devices are in "),
        ({"a": {"process": "own"}}, r"^groups\.b\.shares is a, which has a process of its own: "),
    ],
)
def test_groups_that_cannot_share(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(JaxinferError, match=message):
        sharing(**changes)
