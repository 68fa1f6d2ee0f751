"""Modelled instances of run files: pools and shares by hand, and which stages share layers."""

from dataclasses import replace
from typing import Any, Literal

import pytest

from jaxinfer import JaxinferError
from jaxinfer.config.nodes import NetworkPath
from jaxinfer.config.resolve import resolve
from jaxinfer.config.run_file import as_run_file
from jaxinfer.config.site import model_groups, model_site
from jaxinfer.serving.batch import Work
from jaxinfer.serving.paging import Paging
from jaxinfer.simulate.cluster import ModelledCluster, fit_instance, lanes_between, model_cluster
from jaxinfer.simulate.costs.fit import fit_costs

# 8 x 2 x 12 + 3 x 8 x 16 = 576 parameters in a layer, 800 in each table of the vocabulary; 96 bytes
# of KV per token.
MODEL = {
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
}
CARD = {
    "bf16_tflops": 1.0,
    "memory_gb_s": 1.0,
    "link": "none",
    "link_gb_s": 2.0,
    "watts": 1.0,
}


def modelled(
    groups: dict[str, int],
    *stages: tuple[str, int | None],
    simulate: dict[str, Any] | None = None,
    memory_gb: float = 1.01e-4,
    **options: Any,
) -> ModelledCluster:
    """Return an instance ``x`` of these stages, on groups with these numbers of devices."""
    places = [{"group": group, "layers": layers} for group, layers in stages]
    one = {"page_size": 1, "max_num_seqs": 3, "max_num_batched_tokens": 8, "launch_ahead": False}
    return model_cluster(
        model_site(
            resolve(
                as_run_file(
                    {
                        "model": "small",
                        "models": {"small": MODEL},
                        "gpus": {"card": CARD | {"memory_gb": memory_gb}},
                        "groups": {
                            name: {"kind": "card", "devices": n} for name, n in groups.items()
                        },
                        "instances": {"x": one | {"stages": places} | options},
                        "links": [
                            {"between": [a, b], "gb_s": 1.0}
                            for a, b in zip(list(groups), list(groups)[1:], strict=False)
                        ],
                        "simulate": simulate or {},
                    }
                )
            )
        )
    )


@pytest.mark.parametrize(("devices", "pages"), [(1, 818), (2, 1742)])
def test_a_pool_has_what_weights_and_activations_leave(devices: int, pages: int) -> None:
    """A pool has 0.9 of each card, less weights, a full step's activations and float32 logits."""
    weights = (6 * 576 + 2 * 800) * 2 / devices
    activations = 8 * (2 * 8 + 3 * 16) * 2 + 4 * 3 * 100
    assert int((0.9 * 101e3 - weights - activations) / (96 / devices)) == pages
    assert modelled({"g": devices}, ("g", 6)).instances["x"].num_pages == [pages]
    kept = modelled({"g": devices}, ("g", 6), simulate={"reserve_gb": 1e-5}).instances["x"]
    assert kept.num_pages == [int((0.9 * 101e3 - weights - 1e4) / (96 / devices))]


def test_the_first_stage_has_the_embedding_and_the_last_one_the_head() -> None:
    left = 0.9 * 101e3 - (8 * (2 * 8 + 3 * 16) * 2 + 4 * 3 * 100)
    pages = [int((left - (n * 576 + 800) * 2) / (16 * n)) for n in (4, 2)]
    assert modelled({"g": 1, "h": 1}, ("g", 4), ("h", 2)).instances["x"].num_pages == pages
    middle = modelled({"g": 1, "h": 1, "i": 1}, ("g", 2), ("h", 3), ("i", 1)).instances["x"]
    assert middle.num_pages[1] == int((left - 3 * 576 * 2) / (16 * 3))


def test_layers_go_by_the_flops_of_all_of_a_group_s_devices() -> None:
    assert modelled({"g": 2, "h": 1}, ("g", None), ("h", None)).instances["x"].layers == [4, 2]


def test_each_segment_of_a_stage_has_a_layer() -> None:
    groups, stages = {"g": 1, "h": 1}, (("g", 4), ("h", 2))
    assert modelled(groups, *stages, segments=2).instances["x"].segments == 2
    with pytest.raises(JaxinferError, match=r"^instances\.x\.segments is 3, a stage has 2 layers$"):
        modelled(groups, *stages, segments=3)


def test_hidden_states_go_from_stage_to_stage() -> None:
    """Eight numbers of two bytes for each of five tokens, at 10^9 bytes per second."""
    costs = {"linear": {"step_s": 1.0}, "hop_s": 0.25}
    cost = modelled({"g": 1, "h": 1}, ("g", 4), ("h", 2), simulate=costs).instances["x"].cost
    work = Work(5, 0, 1, 1, 0, [(0, 5)])
    assert cost.stages(work) == [1.25, 1.0]
    assert cost.hops(work) == pytest.approx([5 * 8 * 2 / 1e9])


@pytest.mark.parametrize(
    ("memory_gb", "options", "longest"),
    [(1e-3, {}, 4096), (1e-3, {"max_model_len": 300}, 300), (1.01e-4, {}, 817)],
)
def test_steps_are_fitted_up_to_the_longest_request(
    memory_gb: float, options: dict[str, Any], longest: int
) -> None:
    """Fits go up to the longest request, which the pool has to hold beside its padding page."""
    cluster = modelled({"g": 1}, ("g", 6), memory_gb=memory_gb, **options)
    cost, pool = cluster.instances["x"].cost, cluster.instances["x"].num_pages[0] - 1
    for relative in (False, True):
        assert fit_instance(cluster.instances["x"], relative) == fit_costs(
            cost, 8, 3, longest, pool, relative
        )
        assert fit_instance(cluster.instances["x"], relative) != fit_costs(
            cost, 8, 3, longest // 2, pool, relative
        )


def test_linear_costs_go_by_a_stages_layers() -> None:
    costs = {"linear": {"step_s": 1.0, "token_s": 0.75}}
    instance = modelled({"g": 1, "h": 1}, ("g", 4), ("h", 2), simulate=costs).instances["x"]
    work = Work(8, 0, 1, 1, 0, [(0, 8)])
    assert instance.cost.stages(work) == pytest.approx([1 + 4.0, 1 + 2.0])


def test_lanes_are_where_stages_have_layers_in_common() -> None:
    """Four and two layers there, three, one and two here; entries go in the smaller dtype."""
    one = modelled({"g": 1}, ("g", 6)).instances["x"]
    source = replace(one, layers=(4, 2), groups=("g", "h"), token_bytes=16)
    dest = replace(one, layers=(3, 1, 2), groups=("i", "j", "k"), token_bytes=8)

    ends = [(a, b) for a in "gh" for b in "ijk"]
    paths = {(a, b): NetworkPath({a + b: 1.0}, 0.5) for a, b in ends}
    for both in ((source, dest), (replace(source, token_bytes=8), replace(dest, token_bytes=16))):
        lanes = lanes_between(*both, paths)
        assert [(lane.stage, lane.path, lane.token_bytes) for lane in lanes] == [
            (0, ("gi",), 24),
            (0, ("gj",), 8),
            (1, ("hk",), 16),
        ]
        assert {lane.latency_s for lane in lanes} == {0.5}


@pytest.mark.parametrize("asked", [False, True])
@pytest.mark.parametrize("has_tokens", [False, True])
@pytest.mark.parametrize("cache", ["computed", "launched"])
def test_a_prefix_cache_needs_tokens_and_to_be_asked_for(
    asked: bool, has_tokens: bool, cache: Literal["computed", "launched"]
) -> None:
    """Decodes are grouped, unless the cache takes in pages as steps are launched."""
    one = modelled({"g": 1}, ("g", 6)).instances["x"]
    changes = {"enable_prefix_caching": asked, "paging": Paging(cache=cache)}
    config = one.config.model_copy(update=changes)
    instance = replace(one, config=config).new_instance("x", None, True, has_tokens, len)
    caches = asked and has_tokens
    assert (instance.kv.cache is not None) == caches
    grouped = instance.taking_part.ready_group() is not None
    assert grouped == (not (caches and cache == "launched"))


def test_a_cpu_is_not_modelled() -> None:
    groups = {"g": {"kind": "A10", "platform": "cpu"}}
    file = as_run_file({"groups": groups, "instances": {"x": {"group": "g"}}})
    with pytest.raises(JaxinferError, match=r"^groups\.g: a modelled group is a GPU: platform cpu"):
        model_groups(resolve(file))


def test_a_link_has_its_rate_whatever_it_connects() -> None:
    """Four devices here and two there: what is between them is one link."""
    file = as_run_file(
        {
            "model": "llama-3-8b",
            "groups": {n: {"kind": "A10", "devices": d} for n, d in (("g", 4), ("h", 2))},
            "instances": {"x": {"group": "g"}, "y": {"group": "h"}},
            "links": [{"between": ["g", "h"], "gb_s": 5.0, "latency_s": 0.25}],
            "system": {"name": "disaggregated", "prefill": "y", "decode": "x"},
        }
    )
    assert model_site(resolve(file)).paths == {("h", "g"): NetworkPath({("h", "g"): 5e9}, 0.25)}
