"""A run file's modelled site has finished values, before anything is modelled."""

from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxinfer.config.layer_split import shared_layers
from jaxinfer.config.resolve import resolve
from jaxinfer.config.run_file import as_run_file, load_run_file
from jaxinfer.config.site import model_site
from jaxinfer.config.site_values import ModelledSite
from jaxinfer.simulate.cluster import model_cluster

CONFIGS = Path(__file__).parents[2] / "configs"
SIZES = st.lists(st.integers(1, 5), min_size=1, max_size=5)


def site_of(name: str) -> ModelledSite:
    return model_site(resolve(load_run_file(CONFIGS / f"{name}.yaml")))


@given(SIZES, SIZES)
def test_shared_layers_are_those_that_are_in_both_stages(here: list[int], there: list[int]) -> None:
    """Layers are counted one by one; one instance may have more of them than the other."""
    stage_of = [
        [n for n, count in enumerate(sizes) for _ in range(count)] for sizes in (here, there)
    ]
    both = list(zip(*stage_of, strict=False))
    expected = [(*pair, both.count(pair)) for pair in sorted(set(both))]
    assert shared_layers(tuple(here), tuple(there)) == expected


@pytest.mark.parametrize("name", ["cronus/cronus", "cronus/pipeline_parallel", "splitwise/aa"])
def test_a_cluster_is_modelled_without_its_run_file(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(CONFIGS.parent)
    site = site_of(name)
    without: Any = replace(site.resolved, run_file=None)
    found, expected = model_cluster(replace(site, resolved=without)), model_cluster(site)
    assert found.describe() == expected.describe()
    assert (found.lanes, found.capacities) == (expected.lanes, expected.capacities)


def test_a_stage_has_its_groups_gpu_layers_costs_and_the_way_to_the_next() -> None:
    """The A100 has 312 TFLOPs and the A10 125: of 32 layers 23 and 9."""
    data = {
        "model": "llama-3-8b",
        "groups": {"a": {"kind": "A100-80G-SXM"}, "b": {"kind": "A10"}},
        "links": [{"between": ["a", "b"], "gb_s": 2.0, "latency_s": 0.5}],
        "instances": {"x": {"stages": [{"group": "a"}, {"group": "b"}], "launch_ahead": False}},
        "simulate": {"flops": 0.5, "groups": {"b": {"flops": 0.25}}},
    }
    site = model_site(resolve(as_run_file(data)))
    first, second = stages = site.stages["x"]
    assert [(s.group.name, s.group.kind, s.part.layers, s.costs.flops) for s in stages] == [
        ("a", "A100-80G-SXM", round(32 * 312 / 437), 0.5),
        ("b", "A10", round(32 * 125 / 437), 0.25),
    ]
    assert first.hop
    assert (first.hop.links, first.hop.latency_s) == ({("a", "b"): 2e9}, 0.5)
    assert second.hop is None
    assert not site.paths


def test_paths_are_those_that_kv_takes() -> None:
    """Paths lead from the instance for prompts to the one for tokens, and never back."""
    site = site_of("cronus/disaggregated_high_low")
    pairs = [
        (source.group.name, dest.group.name)
        for here, there in site.resolved.pairs
        for source, dest in product(site.stages[here], site.stages[there])
    ]
    assert list(site.paths) == pairs
