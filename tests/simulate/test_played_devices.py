"""Modelled groups that play slower GPUs, alone or on one: times, links and memory by hand."""

from typing import Any

import pytest

from jaxinfer import JaxinferError
from jaxinfer.config.resolve import resolve
from jaxinfer.config.run_file import RunFile, as_run_file
from jaxinfer.config.site import model_site
from jaxinfer.config.site_values import total_watts
from jaxinfer.serving.batch import Work
from jaxinfer.simulate.cluster import ModelledCluster, model_cluster
from jaxinfer.simulate.run import describe_run, simulate
from jaxinfer.workload.lengths import BenchRequest

# 8 x 2 x 12 + 3 x 8 x 16 = 576 parameters in each of six layers, 800 in each table of the
# vocabulary; keys and values of two heads of two numbers; of two bytes each.
MODEL = {
    "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 6, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 100,
}  # fmt: skip
CARD = {
    "bf16_tflops": 1.0, "memory_gb_s": 8.0, "link": "none", "link_gb_s": 2.0, "watts": 1.0,
    "memory_gb": 1e-4,
}  # fmt: skip
WEIGHTS = 2 * (6 * 576 + 2 * 800)
PAGE = 6 * 2 * 2 * 2 * 2
ONE: dict[str, Any] = {
    "page_size": 1, "max_num_seqs": 3, "max_num_batched_tokens": 8, "num_pages": 9,
    "launch_ahead": False,
}  # fmt: skip


def file(groups: dict[str, dict[str, Any]], system: Any, **sections: Any) -> RunFile:
    """An instance on each group, by the group's name in capitals."""
    card = {n: ({} if "shares" in g else {"kind": "card"}) | g for n, g in groups.items()}
    return as_run_file(
        {
            "model": "small",
            "models": {"small": MODEL},
            "gpus": {"card": CARD},
            "groups": card,
            "instances": {name.upper(): {"group": name} | ONE for name in groups},
            "simulate": {"reserve_gb": 0},
            "system": system,
        }
        | sections
    )


PAIR: dict[str, dict[str, Any]] = {
    "g": {"emulate": {"slowdown": 2}},
    "h": {"shares": "g", "emulate": {"slowdown": 4}},
}
HAND_OFF = {"name": "disaggregated", "prefill": "G", "decode": "H"}


def cluster(groups: dict[str, dict[str, Any]], **sections: Any) -> ModelledCluster:
    return model_cluster(model_site(resolve(file(groups, HAND_OFF, **sections))))


def test_each_group_s_steps_take_as_many_times_longer_as_it_says() -> None:
    """Beside those of a group at the card's own speed."""
    played = cluster(PAIR).instances
    (own,) = model_cluster(model_site(resolve(file({"k": {}}, "single")))).instances.values()
    for work in (Work(2, 2, 2, 2, 40, []), Work(6, 0, 1, 1, 0, [(0, 6)])):
        (seconds,) = own.cost.stages(work)
        assert seconds > 0
        assert list(played["G"].cost.stages(work)) == [2 * seconds]
        assert list(played["H"].cost.stages(work)) == [4 * seconds]


def test_a_run_of_one_played_card_takes_as_many_times_longer() -> None:
    work = [BenchRequest(None, 5, 3, 0.0) for _ in range(4)]
    times = [
        simulate(file({"g": group}, "single"), work).wall_s
        for group in ({}, {"emulate": {"slowdown": 3}})
    ]
    assert times[1] == pytest.approx(3 * times[0], rel=1e-9)


def test_kv_within_one_card_is_read_twice_and_written_twice() -> None:
    """Unless a link between the two is played, too."""
    site = model_site(resolve(file(PAIR, HAND_OFF)))
    (path,) = site.paths.values()
    assert (path.rate, path.latency_s) == (8e9 / 4, 0.0)
    link = {"between": ["g", "h"], "gb_s": 0.5, "latency_s": 0.25}
    site = model_site(resolve(file(PAIR, HAND_OFF, links=[link])))
    (path,) = site.paths.values()
    assert (path.rate, path.latency_s) == (0.5e9, 0.25)


def test_a_card_that_is_shared_is_one() -> None:
    site = model_site(resolve(file(PAIR, HAND_OFF)))
    assert total_watts(None, site.groups.values()) == 1.0
    told = describe_run(model_cluster(site), [])["emulated"]
    assert told == ["simulated on g (card, 2 times slower), h (card, 4 times slower)"]
    assert model_cluster(site).efficiency.peak_flops == 1e12


def test_what_stands_on_one_card_fits_together() -> None:
    """Weights count for each; a page more than there is room for is refused."""
    room = CARD["memory_gb"] * 1e9 - 2 * WEIGHTS
    most = int(room // PAGE)

    def pools(g: int, h: int) -> ModelledCluster:
        instances = {
            "G": {"group": "g"} | ONE | {"num_pages": g},
            "H": {"group": "h"} | ONE | {"num_pages": h},
        }
        return cluster(PAIR, instances=instances)

    assert pools(most - 9, 9).instances["H"].num_pages == [9]
    with pytest.raises(
        JaxinferError, match=r"^groups\.g: instances take 0\.0 GB of a device's 0\.0"
    ):
        pools(most - 8, 9)


def test_pages_of_a_card_s_instances_by_default() -> None:
    """Each has 0.45 of the memory for weights and KV, or the share that it is given."""
    own = {name: value for name, value in ONE.items() if name != "num_pages"}
    pages = [
        cluster(PAIR, instances={n: {"group": n.lower()} | own | more for n in "GH"})
        .instances["H"]
        .num_pages
        for more in ({}, {"memory_fraction": 0.25})
    ]
    memory = CARD["memory_gb"] * 1e9
    assert pages == [[int((share * memory - WEIGHTS) // PAGE)] for share in (0.45, 0.25)]


def test_groups_that_would_take_turns_are_not_modelled() -> None:
    for name in "gh":
        groups = {n: g | ({"emulate": None} if n == name else {}) for n, g in PAIR.items()}
        with pytest.raises(
            JaxinferError, match=rf"^groups\.{name}\.emulate is missing: groups that"
        ):
            cluster(groups)


@pytest.mark.parametrize("more", [{"shares": "g"}, {"emulate": {"slowdown": 2}, "kind": "card"}])
def test_attention_that_is_played_is_not_modelled(more: dict[str, Any]) -> None:
    stages = [{"group": "g", "attention": [{"group": "h", "num_pages": 9}]}]
    instances = {"X": {"stages": stages, "enable_prefix_caching": False} | ONE}
    played = file({"g": {}, "h": more}, "hetis", instances=instances)
    with pytest.raises(
        JaxinferError, match=r"^groups\.h: instances\.X has attention groups, which"
    ):
        model_site(resolve(played))
