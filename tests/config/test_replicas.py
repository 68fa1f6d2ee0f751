"""Replicas: names, who stands where, links between all, what is refused."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from jaxinfer import JaxinferError
from jaxinfer.config.nodes import place_groups, read_hardware
from jaxinfer.config.resolve import resolve
from jaxinfer.config.run_file import RunFile, as_run_file, load_run_file
from jaxinfer.config.site import model_site
from jaxinfer.simulate.cluster import model_cluster
from jaxinfer.simulate.run import simulate
from jaxinfer.workload.lengths import BenchRequest

ENGINE = {"launch_ahead": False, "enable_prefix_caching": False}


def run_file(**sections: Any) -> RunFile:
    return as_run_file({"model": "llama-3-8b", "engine": ENGINE, **sections})


def test_by_hand_and_by_replicas_is_the_same() -> None:
    """Three pairs of a prefill and a decode instance, the decode of two unlike stages."""
    both = {"kind": "A10", "devices": 3, "tensor_parallel_size": 1}
    stages = [{"group": "d", "layers": 20}, {"group": "e", "layers": 12}]
    short = run_file(
        groups={
            "p": {"kind": "A10", "replicas": 3},
            "d": {"kind": "A30", "replicas": 3},
            "e": both,
        },
        instances={
            "x": {"group": "p", "replicas": 3, "max_num_seqs": 7},
            "y": {"stages": stages, "replicas": 3},
        },
        links=[
            {"between": ["p", "d"], "gb_s": 5},
            {"between": ["d", "e"], "gb_s": 7},
            {"between": ["p", "p"], "gb_s": 9, "latency_s": 0.5},
        ],
        simulate={"groups": {"p": {"flops": 0.5}, "e": {"flops": 0.4}}},
    )
    numbers = range(3)
    long = run_file(
        groups={f"p{i}": {"kind": "A10"} for i in numbers}
        | {f"d{i}": {"kind": "A30"} for i in numbers}
        | {"e": both},
        instances={f"x{i}": {"group": f"p{i}", "max_num_seqs": 7} for i in numbers}
        | {
            f"y{i}": {"stages": [{"group": f"d{i}", "layers": 20}, {"group": "e", "layers": 12}]}
            for i in numbers
        },
        links=[{"between": [f"p{i}", f"d{j}"], "gb_s": 5} for i in numbers for j in numbers]
        + [{"between": [f"d{i}", "e"], "gb_s": 7} for i in numbers]
        + [
            {"between": [f"p{i}", f"p{j}"], "gb_s": 9, "latency_s": 0.5}
            for i in numbers
            for j in range(i + 1, 3)
        ],
        simulate={"groups": {f"p{i}": {"flops": 0.5} for i in numbers} | {"e": {"flops": 0.4}}},
    )
    assert short == long
    assert short.cluster() == long.cluster()


def test_names_may_be_numbers() -> None:
    """Names may be numbers, as YAML reads them."""

    def named(group: Any, other: Any, instance: Any, link: Any) -> RunFile:
        card = {"kind": "A10"}
        return run_file(
            groups={group: card | {"replicas": 2}, other: card},
            instances={instance: {"group": group, "replicas": 2}, other: {"group": str(other)}},
            links=[{"between": [link, link], "gb_s": 1.0}],
        )

    numbers, digits = named(1, 7, 2, 1), named("1", "7", "2", "1")
    assert numbers.cluster() == digits.cluster()
    assert list(numbers.cluster().instances) == ["20", "21", "7"]
    assert [link.between for link in numbers.cluster().links] == [("10", "11")]
    assert [each.group for each in numbers.instances.values()] == ["10", "11", "7"]


@given(st.integers(1, 12))
def test_names_count_up_from_0(count: int) -> None:
    """A replica has its number, too."""
    config = run_file(
        groups={"g": {"kind": "A10", "devices": count, "tensor_parallel_size": 1}},
        instances={"i": {"group": "g", "replicas": count}},
    )
    assert list(config.cluster().instances) == [f"i{number}" for number in range(count)]
    assert {instance.group for instance in config.instances.values()} == {"g"}


def test_lists_of_a_system_may_name_all_replicas() -> None:
    instances = {"i": {"group": "g", "replicas": 2}, "j": {"group": "g"}}
    groups = {"g": {"kind": "A10", "devices": 3, "tensor_parallel_size": 1}}
    system = {
        "name": "some",
        "one": "i",
        "prefill": ["i", "j"],
        "i": 3,
        "units": [{"i": ["i"]}, ["j", ["i"]], 7],
    }
    config = run_file(groups=groups, instances=instances, system=system)
    assert config.system == {
        "name": "some",
        "one": "i",
        "prefill": ["i0", "i1", "j"],
        "i": 3,
        "units": [{"i": ["i0", "i1"]}, ["j", ["i0", "i1"]], 7],
    }
    assert run_file(groups=groups, instances=instances, system="single").system == {
        "name": "single"
    }


def test_keys_of_a_system_s_mappings_stand_for_all_replicas() -> None:
    """Keys that name instances or groups stand for all replicas; options so called do not."""
    card = {"kind": "A10"}
    config = run_file(
        groups={"g": card | {"replicas": 2}, "h": card, "theta": card | {"replicas": 2}, 7: card},
        instances={
            "theta": {"group": "g", "replicas": 2},
            "h": {"group": "h"},
            "k": {"group": "theta", "replicas": 2},
            7: {"group": "7"},
        },
        system={
            "name": "some",
            "theta": 0.5,
            "flows": {"theta": {"k": 2.0, "h": 1.0}, "h": {"k": {"g": "k"}}},
            "units": [{"theta": {"theta": 1}}],
            "prices": {7: 3, "k": [1]},
        },
    )
    both = {"k0": 2.0, "k1": 2.0, "h": 1.0}
    of_k = {"g0": "k", "g1": "k"}
    assert config.system == {
        "name": "some",
        "theta": 0.5,
        "flows": {"theta0": both, "theta1": both, "h": {"k0": of_k, "k1": of_k}},
        "units": [{"theta": {"theta0": 1, "theta1": 1}}],
        "prices": {7: 3, "k0": [1], "k1": [1]},
    }
    flows = config.system["flows"]
    assert flows["theta0"] is not flows["theta1"]


def test_a_group_gives_way_to_an_instance_of_its_name() -> None:
    """Group x has replicas, and instance x none."""
    config = run_file(
        groups={"x": {"kind": "A10", "replicas": 2}, "g": {"kind": "A10"}},
        instances={"y": {"group": "x", "replicas": 2}, "x": {"group": "g"}},
        system={"name": "some", "listed": ["x", "y"], "prices": {"x": 1, "y": 2}},
    )
    assert config.system == {
        "name": "some",
        "listed": ["x", "y0", "y1"],
        "prices": {"x": 1, "y0": 2, "y1": 2},
    }


def test_a_replica_may_not_be_there_twice() -> None:
    instances = {"i": {"group": "g", "replicas": 2}}
    groups = {"g": {"kind": "A10", "replicas": 2}}
    for prices in ({"i": 1, "i1": 2}, {"i1": 2, "i": 1}):
        with pytest.raises(JaxinferError) as error:
            run_file(groups=groups, instances=instances, system={"name": "s", "p": {"x": prices}})
        last = list(prices)[-1]
        assert str(error.value) == f"system.p.x.{last}: there are two i1, by replicas"


def hardware(folder: Path, **more: Any) -> str:
    nodes = {
        "small": {"gpu": "A10", "gpus": 2, "nic_gb_s": 1.0, "usd_per_hour": 2.0, "replicas": 3},
        "large": {"gpu": "A100-80G-SXM", "gpus": 8, "nic_gb_s": 4.0, "usd_per_hour": 9.0},
    }
    file = folder / "file.yaml"
    data = {"source": "none", "latency_s": 0.001, "nodes": nodes} | more
    file.write_text(yaml.safe_dump(data))
    return str(file)


def on_nodes(file: str, node: str = "small*", **more: Any) -> RunFile:
    """Three instances on small nodes, and three on the large one."""
    return run_file(
        groups={"s": {"replicas": 3, "devices": 2}, "l": {"replicas": 3, "devices": 2}},
        instances={"a": {"group": "s", "replicas": 3}, "b": {"group": "l", "replicas": 3}},
        simulate={"hardware": file, "groups": {"s": {"node": node}, "l": {"node": "large"}}},
        **more,
    )


def test_groups_on_the_nodes_of_their_number(tmp_path: Path) -> None:
    file = hardware(tmp_path)
    config = on_nodes(file)
    placement = place_groups(config.cluster(), config.simulate)
    assert placement
    assert placement.node_of == {
        "s0": "small0",
        "s1": "small1",
        "s2": "small2",
        "l0": "large",
        "l1": "large",
        "l2": "large",
    }
    assert placement.usd_per_hour == 3 * 2 + 9
    wrong = on_nodes(file, "small")
    with pytest.raises(JaxinferError) as error:
        place_groups(wrong.cluster(), wrong.simulate)
    assert str(error.value) == (
        f"simulate.groups.s0.node is 'small', not in {file}: its replicas are small0, ...; of a "
        "group with replicas, small* has its number"
    )


def test_a_group_without_replicas_has_no_number(tmp_path: Path) -> None:
    config = run_file(
        groups={"g": {}, "s": {"replicas": 2}},
        instances={"i": {"group": "g"}, "j": {"group": "s", "replicas": 2}},
        simulate={
            "hardware": hardware(tmp_path),
            "groups": {"g": {"node": "small*"}, "s": {"node": "small*"}},
        },
    )
    with pytest.raises(JaxinferError, match=r"simulate\.groups\.g\.node is 'small\*', not in"):
        place_groups(config.cluster(), config.simulate)


def test_links_take_the_place_of_cards(tmp_path: Path) -> None:
    """Nodes that have a link use it, either way, with the file's latency or their own."""
    links = [
        {"between": ["small0", "large"], "gb_s": 3.0},
        {"between": ["small1", "small0"], "gb_s": 50, "latency_s": 0.0},
    ]
    shares = {f"{name}{i}": {"weight": 1, "max_waiting": 1} for name in "ab" for i in range(3)}
    system = {"name": "data_parallel", "shares": shares}
    config = on_nodes(hardware(tmp_path, links=links), system=system)
    placement = place_groups(config.cluster(), config.simulate)
    assert placement
    for source, dest, found, latency in (
        ("s0", "l1", {("link", "small0", "large"): 3e9}, 0.001),
        ("l1", "s0", {("link", "large", "small0"): 3e9}, 0.001),
        ("s0", "s1", {("link", "small0", "small1"): 50e9}, 0.0),
        ("s1", "l0", {("nic", "small1", "out"): 1e9, ("nic", "large", "in"): 4e9}, 0.001),
        ("l0", "l1", {("l0", "l1"): 300e9}, 0.0),
    ):
        route = placement.path(source, dest)
        assert (route.links, route.latency_s) == (found, latency)
    lanes = model_cluster(
        model_site(replace(resolve(config), pairs=[("a0", "b1"), ("a0", "b2")]))
    ).lanes
    # Two pairs of groups, one link between their nodes.
    assert lanes["a0", "b1"][0].path == lanes["a0", "b2"][0].path == (("link", "small0", "large"),)


def test_a_cluster_of_replicas_serves(tmp_path: Path) -> None:
    shares = {f"a{i}": {"weight": 1, "max_waiting": 99} for i in range(3)} | {
        f"b{i}": {"weight": 4, "max_waiting": 99} for i in range(3)
    }
    config = on_nodes(hardware(tmp_path), system={"name": "data_parallel", "shares": shares})
    metrics = simulate(config, [BenchRequest(None, 100, 10, 0.0)] * 30)
    assert metrics.requests == 30


def test_a_setting_may_say_how_many(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(
        "groups: {g: {kind: A10, replicas: 2}}\ninstances: {i: {group: g, replicas: 2}}\n"
        "system: {name: data_parallel, shares: {i: {weight: 1, max_waiting: 9}}}\n"
    )
    assert list(load_run_file(file).instances) == ["i0", "i1"]
    found = load_run_file(file, ["groups.g.replicas=3", "instances.i.replicas=3"])
    assert list(found.instances) == ["i0", "i1", "i2"]
    assert found.system["shares"] == {f"i{n}": {"weight": 1, "max_waiting": 9} for n in range(3)}


G = {"kind": "A10"}


@pytest.mark.parametrize(
    ("groups", "instances", "message"),
    [
        *(
            ({"g": G | {"replicas": n}}, {}, f"groups.g.replicas is {n}, must be an integer from 1")
            for n in (0, 10**7)
        ),
        ({"g": G | {"replicas": True}}, {}, "groups.g.replicas is True, must be an integer"),
        ({"g": G | {"replicas": "3"}}, {}, "groups.g.replicas is '3', must be an integer"),
        ({"g": G}, {"i": {"group": "g", "replicas": 1.5}}, "instances.i.replicas is 1.5, must"),
        ({"g": G | {"replicas": 2}, "g1": G}, {}, "groups.g1: there are two g1, by replicas"),
        ({"g1": G, "g": G | {"replicas": 2}}, {}, "groups.g: there are two g1, by replicas"),
        (
            {"g": G | {"replicas": 2}},
            {"i": {"group": "g", "replicas": 3}},
            "instances.i.replicas is 3, its group g has 2: give both as many",
        ),
        (
            {"g": G | {"replicas": 3}},
            {"i": {"group": "g", "replicas": 2}},
            "instances.i.replicas is 2, its group g has 3: give both as many",
        ),
        (
            {"g": G | {"replicas": 2}},
            {"i": {"stages": [{"group": "g"}], "replicas": 3}},
            "instances.i.replicas is 3, its group g has 2: give both as many",
        ),
        ({"g": G | {"replicas": 2}}, {"i": {"group": "g"}}, "no group 'g': did you mean 'g"),
        ({7: G, "7": G}, {}, "groups.7: there are two 7, by replicas"),
        ({"g": G}, {"i": {"stages": ["g"], "replicas": 2}}, "instances.i0.stages[0]"),
        ({"g": G}, {"i": {"group": "g", "replicas": 2}}, "groups.g.devices is 1, its instances n"),
        ({"g": G | {"replica": 2}}, {"i": {"group": "g"}}, "groups.g.replica: unknown option"),
    ],
)
def test_what_cannot_be_is_refused(
    groups: dict[str, Any], instances: dict[str, Any], message: str
) -> None:
    with pytest.raises(JaxinferError) as error:
        run_file(groups=groups, instances=instances).cluster()
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("between", [["g"], ["g", "h", "k"], "gh", 3, None])
def test_a_link_of_replicas_is_between_two(between: object) -> None:
    with pytest.raises(JaxinferError, match=r"^links\[0\]\.between"):
        run_file(
            groups={name: G | {"replicas": 2} for name in "gh"} | {"k": G},
            instances={
                "x": {"group": "g", "replicas": 2},
                "y": {"group": "h", "replicas": 2},
                "z": {"group": "k"},
            },
            links=[{"between": between, "gb_s": 1}],
        ).cluster()


@pytest.mark.parametrize(
    ("links", "message"),
    [
        ([{"between": ["small", "large"], "gb_s": 1}], "links[0].between: no node 'small': did"),
        (
            [{"between": ["large", "large"], "gb_s": 1}],
            "links[0].between: large twice; within a node it is the node's link_gb_s",
        ),
        (
            [{"between": b, "gb_s": 1} for b in (["large", "small1"], ["small1", "large"])],
            "links[1].between: large and small1 have a link already",
        ),
        ([{"between": ["large", "small1"]}], "links[0].gb_s is missing"),
        ([{"between": ["large"], "gb_s": 1}], "links[0].between"),
        ([{"between": ["large", "small1"], "gb_s": 0}], "links[0].gb_s is 0, must be greater"),
    ],
)
def test_links_that_cannot_be_are_refused(
    links: list[dict[str, Any]], message: str, tmp_path: Path
) -> None:
    file = hardware(tmp_path, links=links)
    with pytest.raises(JaxinferError) as error:
        read_hardware(file)
    assert str(error.value).startswith(f"simulate.hardware: {file}: {message}")


def test_replicas_of_nodes_that_cannot_be_are_refused(tmp_path: Path) -> None:
    node = {"gpu": "A10", "gpus": 2, "nic_gb_s": 1.0, "replicas": -1}
    file = hardware(tmp_path, nodes={"n": node})
    with pytest.raises(JaxinferError, match=r"nodes\.n\.replicas is -1, must be an integer from"):
        read_hardware(file)


def test_replicas_share_the_devices_of_as_many() -> None:
    groups = {"g": {"kind": "A10", "replicas": 2}, "h": {"shares": "g", "replicas": 2}}
    made = as_run_file({"groups": groups})
    assert [made.groups[name].shares for name in ("h0", "h1")] == ["g0", "g1"]
    one = as_run_file({"groups": {"g": {"kind": "A10"}, "h": {"shares": "g", "replicas": 2}}})
    assert [one.groups[name].shares for name in ("h0", "h1")] == ["g", "g"]
    groups["h"]["replicas"] = 3
    with pytest.raises(
        JaxinferError, match=r"^groups\.h\.replicas is 3, its group g has 2: give bo"
    ):
        as_run_file({"groups": groups})
