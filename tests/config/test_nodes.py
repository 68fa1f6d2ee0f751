"""Clusters made of nodes: the files' figures, shared network cards, what is refused."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import yaml
from modelled_world import modelled_world

from jaxinfer import JaxinferError
from jaxinfer.config.costs import SimulateOptions
from jaxinfer.config.groups import GroupConfig
from jaxinfer.config.nodes import Hardware, NodeOptions, place_groups, read_hardware
from jaxinfer.config.resolve import resolve
from jaxinfer.config.run_file import RunFile, as_run_file, load_run_file
from jaxinfer.config.site import model_site
from jaxinfer.hardware.catalogue import Catalogue, find_gpu
from jaxinfer.report.records import read_run
from jaxinfer.serving.batch import Transfer
from jaxinfer.serving.request_state import RequestState
from jaxinfer.serving.world import TransferDone
from jaxinfer.simulate.cluster import model_cluster
from jaxinfer.simulate.costs.linear import LinearCosts
from jaxinfer.simulate.costs.model import Pipeline
from jaxinfer.simulate.run import simulate
from jaxinfer.workload.lengths import BenchRequest

CONFIGS = Path(__file__).parents[2] / "configs"
CRONUS = CONFIGS / "cronus"
CLUSTERS = CONFIGS / "clusters"
SYSTEMS = sorted(path.stem for path in CRONUS.glob("*.yaml"))
# 1000 tokens of Llama 3 8B.
KV_BYTES = 1000 * 131072


def hardware(name: str) -> Hardware:
    return read_hardware(str(CLUSTERS / f"{name}.yaml"))


def test_a_nodes_link_joins_all_of_its_gpus() -> None:
    node = NodeOptions(gpu="H100-SXM", gpus=16, nic_gb_s=50)
    assert find_gpu("H100-SXM").domain == 8
    assert node.as_gpu(Catalogue()).domain is None


def price(name: str) -> float:
    return sum(node.usd_per_hour or 0.0 for node in hardware(name).nodes.values())


def on_nodes(file: str, nodes: dict[str, str], **sections: Any) -> RunFile:
    """An instance of the same name on each group."""
    share = {"weight": 1, "max_waiting": 1}
    whole = {"name": "data_parallel", "shares": dict.fromkeys(nodes, share)}
    return as_run_file(
        {
            "model": "llama-3-8b",
            "system": whole if "instances" not in sections else "single",
            "engine": {"launch_ahead": False, "enable_prefix_caching": False},
            "groups": {group: {} for group in nodes},
            "instances": {group: {"group": group} for group in nodes},
            "simulate": {
                "hardware": str(CLUSTERS / f"{file}.yaml"),
                "groups": {group: {"node": node} for group, node in nodes.items()},
            },
        }
        | sections
    )


@pytest.mark.parametrize("file", sorted(CLUSTERS.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_file_can_be_read(file: Path) -> None:
    found = read_hardware(str(file))
    assert found.source
    assert found.nodes
    for node in found.nodes.values():
        assert find_gpu(node.gpu).watts * node.gpus >= node.total_watts(Catalogue())
        assert node.gpus <= 8


# As in the caption of HexGen-2's Figure 4, but for setting 1, whose L40 and A6000 are as Table 2
# uses them: H100, A100, L40, A6000 and dollars per hour.
@pytest.mark.parametrize(
    ("setting", "counts", "budget"),
    [
        ("homogeneous", (8, 0, 0, 0), 29.52),
        ("heterogeneous_1", (2, 6, 8, 4), 28.8),
        ("heterogeneous_2", (3, 3, 6, 6), 26.9),
        ("heterogeneous_3", (0, 6, 12, 6), 27.1),
        ("heterogeneous_4", (3, 9, 0, 0), 26.3),
        ("heterogeneous_5", (0, 4, 6, 10), 20.5),
    ],
)
def test_hexgen2_has_its_counts_and_budgets(
    setting: str, counts: tuple[int, ...], budget: float
) -> None:
    found: Counter[str] = Counter()
    for node in hardware(f"hexgen2_{setting}").nodes.values():
        found[node.gpu] += node.gpus
    assert tuple(found[gpu] for gpu in ("H100-SXM", "A100-80G-SXM", "L40", "RTX-A6000")) == counts
    assert price(f"hexgen2_{setting}") == pytest.approx(budget, rel=2e-3)


def test_hexgen2_has_one_price_for_each_kind() -> None:
    """The price of a GPU is the same on all nodes, to the rounding of a node's price."""
    per_gpu: dict[str, list[float]] = {}
    for file in CLUSTERS.glob("hexgen2_*.yaml"):
        for node in read_hardware(str(file)).nodes.values():
            per_gpu.setdefault(node.gpu, []).append((node.usd_per_hour or 0.0) / node.gpus)
    for prices in per_gpu.values():
        assert max(prices) - min(prices) < 1e-4


def test_splitwise_has_its_prices_and_caps() -> None:
    pairs = {"aa": 35.2, "hh": 76.0, "ha": 55.6, "hhcap": 76.0}
    assert {pair: price(f"splitwise_{pair}") for pair in pairs} == pytest.approx(pairs)
    capped = hardware("splitwise_hhcap").nodes
    watts = {name: node.total_watts(Catalogue()) for name, node in capped.items()}
    assert watts["token"] == pytest.approx(0.7 * watts["prompt"])
    # Of machines, DGX-A100 : DGX-H100 : capped, as in Table V.
    a100 = hardware("splitwise_aa").nodes["prompt"].total_watts(Catalogue())
    assert watts["prompt"] / a100 == 1.75
    assert watts["token"] / a100 == pytest.approx(1.23, abs=0.01)
    assert capped["token"].flops_scale == pytest.approx(1 / 1.3, abs=5e-4)


def test_a_cap_slows_prompts_and_leaves_decodes() -> None:
    """Splitwise's table: 1.3 times, and as before."""
    times = {}
    for node in ("prompt", "token"):
        config = on_nodes("splitwise_hhcap", {"g": node})

        def note(request: RequestState, delivered: Sequence[float], node: str = node) -> None:
            times[node] = delivered

        simulate(config, [BenchRequest(None, 8000, 50, 0.0)], on_request=note)
    assert times["token"][0] / times["prompt"][0] == pytest.approx(1.3, rel=0.01)
    decodes = {node: t[-1] - t[0] for node, t in times.items()}
    assert decodes["token"] == pytest.approx(decodes["prompt"], rel=0.01)


NIC = KV_BYTES / 3.125e9 + 1e-5


# Groups p and q are on DistServe's node 1, r and t on node 2, s on node 3.
@pytest.mark.parametrize(
    ("moves", "seconds"),
    [
        (["pr"], [NIC]),
        (["pr", "ps"], [2 * NIC - 1e-5] * 2),
        (["pr", "qs"], [2 * NIC - 1e-5] * 2),
        (["pr", "sr"], [2 * NIC - 1e-5] * 2),
        (["pr", "st"], [2 * NIC - 1e-5] * 2),
        (["pr", "rp"], [NIC, NIC]),
        (["pr", "sq"], [NIC, NIC]),
        (["pq"], [KV_BYTES / 300e9]),
        (["pq", "pr"], [KV_BYTES / 300e9, NIC]),
    ],
    ids=lambda value: "-".join(value) if isinstance(value[0], str) else "",
)
def test_transfers_share_the_cards_of_their_nodes(moves: list[str], seconds: list[float]) -> None:
    """A card has one rate out and one in, whichever groups of its node use it."""
    nodes = {"p": "node1", "q": "node1", "r": "node2", "t": "node2", "s": "node3"}
    pairs = [(move[0], move[1]) for move in moves]
    cluster = model_cluster(model_site(replace(resolve(on_nodes("distserve", nodes)), pairs=pairs)))
    world = modelled_world({}, {}, {}, cluster.lanes, cluster.capacities, [])
    for source, dest in pairs:
        request, hold = RequestState(source + dest, 1000, 1, 0.0, ()), cast(Any, None)
        world.start_transfer(Transfer(request, 0, source, dest, hold, hold, 0, 1000, 0.0))
    ends = {}
    while events := world.due_events():
        for event in events:
            assert isinstance(event, TransferDone)
            ends[event.transfer.request.id] = event.end
    assert [ends[move] for move in moves] == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("source", "dest", "links"),
    [(1, 1, 1), (2, 4, 2), (4, 2, 2), (4, 4, 4)],
)
def test_kv_within_a_node_takes_all_links_of_the_smaller_group(
    source: int, dest: int, links: int
) -> None:
    """300 GB/s each; to another node, the card's rate whatever the groups' sizes."""
    nodes = {"p": "node1", "q": "node1", "r": "node2"}
    groups = {"p": {"devices": source}, "q": {"devices": dest}, "r": {"devices": dest}}
    cluster = model_cluster(
        model_site(
            replace(
                resolve(on_nodes("distserve", nodes, groups=groups)), pairs=[("p", "q"), ("p", "r")]
            )
        )
    )
    assert cluster.capacities == {
        ("p", "q"): links * 300e9,
        ("nic", "node1", "out"): 3.125e9,
        ("nic", "node2", "in"): 3.125e9,
    }


@pytest.mark.parametrize("hardware", [True, False])
def test_kv_within_a_group_takes_the_links_of_a_stage(hardware: bool) -> None:
    """Two instances of two devices each on a group of four, with a hardware file and without."""
    group = {"devices": 4, "tensor_parallel_size": 2}
    sections = {
        "groups": {"g": group},
        "instances": {name: {"group": "g"} for name in "ab"},
        "system": {"name": "disaggregated", "prefill": "a", "decode": "b"},
    }
    config = on_nodes("distserve", {"g": "node1"}, **sections)
    if not hardware:
        config = config.model_copy(
            update={
                "simulate": SimulateOptions(),
                "groups": {"g": GroupConfig(kind="A100-80G-SXM", **group)},
            }
        )
    assert model_cluster(model_site(resolve(config))).capacities == {("g", "g"): 600e9}


def test_between_cards_the_slower_one_decides() -> None:
    stages = {"x": {"stages": [{"group": group} for group in "hab"]}}
    groups = {"h": {"devices": 2}, "a": {"devices": 4}, "b": {"devices": 4}}
    nodes = {"h": "prompt", "a": "token", "b": "token"}
    config = on_nodes("splitwise_ha", nodes, instances=stages, groups=groups)
    instance = model_cluster(model_site(replace(resolve(config), pairs=()))).instances["x"]
    cost = instance.cost
    assert isinstance(cost, Pipeline)
    assert cost.byte_s == (1 / 200e9, 1 / 300e9)
    assert cost.latency_s == (1e-5, 0.0)


def test_all_reduces_go_over_the_node(tmp_path: Path) -> None:
    """A link that a node gives carries all-reduces, as does the link of a GPU that has one."""
    text = (CLUSTERS / "distserve.yaml").read_text()
    slow = tmp_path / "slow.yaml"
    slow.write_text(text.replace("gpus: 8,", "gpus: 8, link_gb_s: 3.0,"))
    seconds = []
    for file in (CLUSTERS / "distserve.yaml", slow):
        config = on_nodes("distserve", {"g": "node1"}, groups={"g": {"devices": 2}})
        costs = config.simulate.model_copy(update={"hardware": str(file)})
        found = simulate(
            config.model_copy(update={"simulate": costs}), [BenchRequest(None, 2000, 1, 0.0)]
        )
        seconds.append(found.wall_s)
    # Two of 2000 x 4096 16-bit numbers in each of 32 layers, as rings of two.
    moved = 32 * 2 * 2000 * 4096 * 2
    assert seconds[1] - seconds[0] == pytest.approx(moved / 3e9 - moved / 300e9)


@pytest.mark.parametrize("system", SYSTEMS)
def test_nodes_and_the_links_they_stand_for_give_the_same_bits(system: str, tmp_path: Path) -> None:
    work = [BenchRequest(None, 50 + 97 * n, 20 + 7 * n, 0.05 * n) for n in range(30)]
    nodes = [
        "links=[]",
        "groups={high: {}, low: {kind: A10}}",
        f"simulate.hardware={CLUSTERS / 'cronus_a100_a10.yaml'}",
        "simulate.groups={high: {node: a100}, low: {node: a10}}",
    ]
    for name, changes in (("links", []), ("nodes", nodes)):
        simulate(load_run_file(CRONUS / f"{system}.yaml", changes), work, tmp_path / name)
    for file in ("steps.jsonl", "requests.jsonl", "transfers.jsonl"):
        both = [tmp_path / name / "1" / file for name in ("links", "nodes")]
        assert both[0].exists() == both[1].exists()
        if both[0].exists():
            assert both[0].read_bytes() == both[1].read_bytes()
    links, hardware = (read_run(tmp_path / name / "1").run for name in ("links", "nodes"))
    assert links["emulated"] == hardware["emulated"]
    assert links["instances"] == hardware["instances"]
    assert not {"hardware"} & (set(links) | set(links["simulate"]))


@pytest.mark.parametrize(
    ("file", "nodes", "usd", "watts"),
    [
        ("hexgen2_heterogeneous_1", {"p": "h100", "d": "a100"}, 17.52, 3800.0),
        ("splitwise_hhcap", {"p": "prompt", "d": "token"}, 76.0, 9520.0),
        ("cronus_a100_a10", {"p": "a100", "d": "a10"}, None, 550.0),
        ("distserve", {"p": "node1", "d": "node1"}, None, 3200.0),
    ],
)
def test_a_run_says_what_its_nodes_cost(
    file: str, nodes: dict[str, str], usd: float | None, watts: float, tmp_path: Path
) -> None:
    system = {"name": "disaggregated", "prefill": "p", "decode": "d"}
    config = on_nodes(file, nodes, system=system)
    simulate(config, [BenchRequest(None, 100, 5, 0.0)], tmp_path)
    placement = place_groups(config.cluster(), config.simulate)
    assert placement
    found = read_run(tmp_path / "1").run["hardware"]
    assert found == placement.describe()
    assert found["file"] == str(CLUSTERS / f"{file}.yaml")
    assert found["source"] == hardware(file).source
    assert set(found["nodes"]) == set(nodes.values())
    assert all(set(n) == {"gpu", "gpus", "usd_per_hour", "watts"} for n in found["nodes"].values())
    assert found["usd_per_hour"] == (usd and pytest.approx(usd))
    assert found["watts"] == watts


def test_a_run_costs_nothing_that_is_known_where_one_node_has_no_price(tmp_path: Path) -> None:
    nodes = {
        "dear": {"gpu": "A10", "gpus": 1, "nic_gb_s": 1.0, "usd_per_hour": 2.5},
        "cheap": {"gpu": "A10", "gpus": 1, "nic_gb_s": 1.0, "usd_per_hour": 0.0},
        "lent": {"gpu": "A10", "gpus": 1, "nic_gb_s": 1.0},
    }
    file = tmp_path / "file.yaml"
    file.write_text(yaml.safe_dump({"source": "none", "latency_s": 0.0, "nodes": nodes}))
    for used, usd in ((["dear", "cheap"], 2.5), (["dear", "lent"], None), (["cheap"], 0.0)):
        config = on_nodes("distserve", {node: node for node in used})
        costs = config.simulate.model_copy(update={"hardware": str(file)})
        placement = place_groups(config.cluster(), costs)
        assert placement
        assert placement.usd_per_hour == usd


NODES = "simulate.groups={high: {node: a100}, low: {node: a10}}"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ([], "links: follow from the nodes of FILE; leave out links or hardware"),
        (
            ["links=[]", "simulate.groups.low.node=a100"],
            "groups.low.kind is A10, node a100 of FILE has A100-80G-SXM; leave out kind",
        ),
        (
            ["links=[]", "groups={high: {}, low: {}}", "simulate.groups.low.node=a100"],
            "simulate.groups: node a100 of FILE has 1 GPUs, its groups need 2 (high 1, low 1)",
        ),
        (
            ["links=[]", "groups.high.devices=4"],
            "groups.high.devices is 4, node a100 of FILE has 1 GPUs; a group stands on one node: "
            "use several groups as stages",
        ),
        (
            ["links=[]", "simulate.groups.low.node=[a10, a100]"],
            "simulate.groups.low.node: a group stands on one node, not ['a10', 'a100']: use",
        ),
        (
            ["links=[]", "simulate.groups={high: {node: a100}}"],
            "simulate.groups.low.node is missing, one of FILE: a10, a100",
        ),
        (
            ["links=[]", "simulate.groups.low.node=a12"],
            "simulate.groups.low.node is 'a12', not in FILE: did you mean 'a10'?",
        ),
        (
            ["simulate.hardware=null"],
            "simulate.groups.high.node is 'a100', needs simulate.hardware",
        ),
        (["simulate.hardware=none.yaml"], "simulate.hardware: none.yaml: No such file"),
        (["links=[]", "groups.low.platform=cpu"], "groups.low: a modelled group is a GPU"),
    ],
)
def test_groups_that_do_not_fit_their_nodes_are_refused(changes: list[str], message: str) -> None:
    file = str(CLUSTERS / "cronus_a100_a10.yaml")
    with pytest.raises(JaxinferError) as error:
        simulate(
            load_run_file(CRONUS / "cronus.yaml", [f"simulate.hardware={file}", NODES, *changes]),
            [BenchRequest(None, 100, 5, 0.0)],
        )
    assert message.replace("FILE", file) in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("kind", [{"tables": "somewhere"}, {"linear": LinearCosts(step_s=1.0)}])
def test_tables_and_linear_costs_do_not_know_of_a_cap(kind: dict[str, Any]) -> None:
    config = on_nodes("splitwise_hhcap", {"g": "token"})
    costs = config.simulate.model_copy(update=kind)
    with pytest.raises(JaxinferError, match="has flops_scale 0"):
        place_groups(config.cluster(), costs)


OWN = {
    "bf16_tflops": 1,
    "memory_gb": 1,
    "memory_gb_s": 1,
    "link": "none",
    "link_gb_s": 1,
    "watts": 1,
}


@pytest.mark.parametrize(
    ("node", "rest", "message"),
    [
        ({"gpu": "A100"}, {}, "nodes.x.gpu: no GPU 'A100': known: A100-80G-SXM, A100-80G-PCIe"),
        ({"gpu": "h100"}, {}, "nodes.x.gpu: no GPU 'h100': known: H100-SXM, H100-PCIe"),
        ({"gpu": "A110"}, {}, "nodes.x.gpu: no GPU 'A110': did you mean 'A10'?"),
        ({"gpus": 0}, {}, "nodes.x.gpus is 0, must be greater than or equal to 1"),
        ({"nic_gb_s": 0}, {}, "nodes.x.nic_gb_s is 0, must be greater than 0"),
        ({"flops_scale": 1.5}, {}, "nodes.x.flops_scale is 1.5, must be less than or equal to 1"),
        ({"nic": 1}, {}, "nodes.x.nic: unknown option, "),
        ({}, {"latency_s": -1}, "latency_s is -1, must be greater than or equal to 0"),
        ({}, {"nodes": []}, "nodes is [], must be a mapping"),
        ({}, {"nodes": {}}, "nodes is {}, must have at least 1 item"),
        ({}, {"sources": ""}, "sources: unknown option, did you mean 'source'?"),
        ({}, {"gpus": {"A10": OWN}}, "gpus.A10: configs/gpus.yaml has that name; give it another"),
        ({}, {"gpus": {"card": OWN | {"watts": 0}}}, "gpus.card.watts is 0, must be greater tha"),
        ({}, {"gpus": []}, "gpus is [], must be a mapping"),
        ({}, {"models": {"qwen2-7b": {}}}, "models.qwen2-7b.hidden_size is missing"),
    ],
)
def test_a_wrong_file_is_named_with_what_is_wrong(
    node: dict[str, object], rest: dict[str, object], message: str, tmp_path: Path
) -> None:
    right: dict[str, object] = {"gpu": "A10", "gpus": 1, "nic_gb_s": 1.0}
    file = tmp_path / "file.yaml"
    data = {"source": "none", "latency_s": 0.0, "nodes": {"x": right | node}} | rest
    file.write_text(yaml.safe_dump(data))
    with pytest.raises(JaxinferError) as error:
        read_hardware(str(file))
    assert str(error.value).startswith(f"simulate.hardware: {file}: {message}")
    file.write_text("source: none\nlatency_s: 0.0\n")
    with pytest.raises(JaxinferError, match=f"{file}: nodes is missing"):
        read_hardware(str(file))
    file.write_text("nodes: [")
    with pytest.raises(JaxinferError, match=f"{file}: while parsing"):
        read_hardware(str(file))
