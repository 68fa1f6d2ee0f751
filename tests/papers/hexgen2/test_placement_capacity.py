"""Capacity of a group: against the simulator's own cluster, closed forms, and brute force."""

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from placement_cases import A100, CLASSES, ENGINE, H100, L40, modelled, requests, site_of
from properties import examples

from jaxinfer.config.resolve import resolve
from jaxinfer.config.run_file import as_run_file
from jaxinfer.config.site import model_site
from jaxinfer.hardware.catalogue import Catalogue
from jaxinfer.lab.plan.layers import even_times, least_sum
from jaxinfer.papers.hexgen2.capacity import ROLES, Carried, GroupRole, PlannedStage, signature_of
from jaxinfer.papers.hexgen2.full_steps import LengthStats
from jaxinfer.papers.hexgen2.stages import shapes
from jaxinfer.simulate.cluster import model_cluster
from jaxinfer.workload.lengths import BenchRequest


def compositions(total: int, parts: int) -> list[tuple[int, ...]]:
    return [c for c in product(range(1, total + 1), repeat=parts) if sum(c) == total]


SECONDS = st.floats(0.01, 10)


@examples(150)
@given(st.data())
def test_layers_against_all_compositions(data: st.DataObject) -> None:
    parts = data.draw(st.integers(1, 4))
    total = data.draw(st.integers(parts, 12 if parts < 4 else 9))
    fixed, each = (data.draw(st.lists(SECONDS, min_size=parts, max_size=parts)) for _ in "fe")
    most = data.draw(st.lists(st.integers(0, total), min_size=parts, max_size=parts))
    fitting = [
        c for c in compositions(total, parts) if all(a <= b for a, b in zip(c, most, strict=True))
    ]
    even, least = even_times(total, fixed, each, most), least_sum(total, each, most)
    if not fitting:
        assert even is least is None
        return

    def times(layers: Any) -> list[float]:
        return [f + e * n for f, e, n in zip(fixed, each, layers, strict=True)]

    assert even is not None
    assert least is not None
    assert tuple(even) in fitting
    assert tuple(least) in fitting
    assert max(times(even)) == pytest.approx(min(max(times(c)) for c in fitting))
    assert sum(times(least)) == pytest.approx(min(sum(times(c)) for c in fitting))


def test_lengths() -> None:
    work = [BenchRequest(None, 100, 11, 0.0), BenchRequest(None, 300, 1, 0.0)]
    lengths = LengthStats.of(work)
    assert (lengths.prompt, lengths.prompt_seen, lengths.decodes) == (200, 250, 5)
    assert (lengths.longest_prompt, lengths.longest) == (300, 301)
    assert lengths.context == pytest.approx(100 + 5.5)
    step, ends = lengths.prefill_step(1000)
    assert (step.tokens, step.chunks, step.sampled, ends) == (1000, [(0, 250)] * 4, 5, 5)
    # Of a prompt in several chunks, one in its midst.
    step, ends = lengths.prefill_step(50)
    assert (step.tokens, step.chunks, ends) == (50, [(100, 50)], 0.25)
    assert lengths.decode_step(8).single_context == round(8 * 105.5)


def test_kv_of_llama_2_70b() -> None:
    assert Catalogue().model("llama-2-70b").kv_bytes(80, 2) == 327_680


def test_one_stage_in_closed_form() -> None:
    """Decode: 20 ms and the weights and KV that are read; prefill: its FLOPs, at 60 % of the peak.

    With two all-reduces of a layer in each direction (ring), of hidden states.
    """
    site = site_of({"a": (H100, 4)})
    capacity, _, _ = modelled(site, "llama-2-70b", "HPHD")
    model, (prompt, output) = capacity.model, CLASSES["HPHD"]
    bandwidth, flops = 4 * 3.35e12 * 0.7, 4 * 989e12 * 0.6
    weights = 2 * (80 * model.layer_parameters + 32_000 * 8192)
    context = prompt + output / 2
    decode = 0.02 + (weights + 32 * context * 327_680) / bandwidth
    reduced = 80 * 2 * 2 * (3 / 4) * 8192 * 2 / 450e9
    rate = 32 / (decode + 32 * reduced) / (output - 1)
    assert capacity.carried(((0, 4),), "decode").rate == pytest.approx(rate, rel=0.01)
    assert capacity.carried(((0, 4),), "decode").stages == (PlannedStage(0, 4, 80),)
    computed = 4096 * 80 * (2 * model.layer_parameters + 4 * 8192 * prompt / 2)
    one = capacity._rate(((0, 4),), ((0, 4),), [(0, 4, True, True)], [80], "prefill")
    assert one == pytest.approx(
        4096 / prompt / (0.02 + computed / flops + 4096 * reduced), rel=0.02
    )


def test_stages_of_groups() -> None:
    kinds = (0, 1)
    assert set(shapes(((0, 3),), kinds, (1, 2))) == {((0, 2), (0, 1)), ((0, 1),) * 3}
    assert set(shapes(((0, 4),), kinds, (1, 4))) == {((0, 4),), ((0, 1),) * 4}
    # Both orders of two kinds; the widest first of one kind, over nodes too.
    assert set(shapes(((0, 1), (1, 2)), kinds, (1, 2))) == {
        ((0, 1), (1, 2)),
        ((1, 2), (0, 1)),
        ((0, 1), (1, 1), (1, 1)),
        ((1, 1), (1, 1), (0, 1)),
    }
    assert set(shapes(((0, 1), (0, 2)), kinds, (1, 2))) == {
        ((1, 2), (0, 1)),
        ((0, 1), (1, 1), (1, 1)),
    }
    # Three GPUs without a degree of one are no stages.
    assert not list(shapes(((0, 3),), kinds, (2,)))


GROUPS = [
    ((0, 2), (1, 2)),
    ((0, 1), (1, 1)),
    ((1, 4),),
    ((2, 8),),
    ((1, 2), (2, 2)),
    ((0, 2), (2, 3)),
    ((0, 1), (1, 2), (2, 2)),
]


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_seconds_and_pages_are_the_simulators(group: Any, role: Any, tmp_path: Path) -> None:
    """The rate, computed anew from the modelled instance of a run file with these stages."""
    site = site_of({"h": (H100, 2), "a": (A100, 4), "l": (L40, 8)}, 1.25)
    capacity, _, _ = modelled(site, "llama-2-70b", "HPHD")
    carried = capacity.carried(signature_of(site, group), role)
    assert carried.rate > 0
    nodes = dict(enumerate("hal"))
    engine = {k: v for k, v in ENGINE.items() if k != "group"}
    more = {"max_num_batched_tokens": 4096} if role == "prefill" else {"max_num_seqs": 32}
    stages = [{"group": f"g{i}", "layers": stage.layers} for i, stage in enumerate(carried.stages)]
    hardware = {f"g{i}": {"node": nodes[group[s.place][0]]} for i, s in enumerate(carried.stages)}
    data = {
        "model": "llama-2-70b",
        "groups": {f"g{i}": {"devices": s.tp} for i, s in enumerate(carried.stages)},
        "instances": {"i": {"stages": stages, **engine, **more}},
        "simulate": {"reserve_gb": 1.0, "step_s": 0.02, "groups": hardware},
    }
    rate = _rate_of(data, tmp_path / "hardware.yaml", site, capacity.lengths, role)
    assert carried.rate == pytest.approx(rate, rel=1e-9)


def _rate_of(data: dict[str, Any], path: Path, site: Any, lengths: LengthStats, role: str) -> float:
    path.write_text(yaml.safe_dump(site.hardware.model_dump(mode="json", exclude_none=True)))
    data["simulate"]["hardware"] = str(path)
    instance = model_cluster(model_site(resolve(as_run_file(data)))).instances["i"]
    count = len(instance.layers)
    entries = (min(instance.num_pages) - 1) * 16
    batch = min(32, entries / (lengths.context + 8))
    if role == "prefill":
        step, ends = lengths.prefill_step(min(4096, entries // count))
    else:
        step, ends = lengths.decode_step(-int(-batch // count)), 0
    seconds = list(instance.cost.stages(step))
    # Of as many steps as there are stages.
    period = max(count * max(seconds), sum(seconds) + sum(instance.cost.hops(step)))
    return count * ends / period if role == "prefill" else batch / period / lengths.decodes


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("step_s", [0.0, 0.02])
@pytest.mark.parametrize("kinds", [(H100, L40), (A100, L40), (H100, A100)])
def test_layers_of_unlike_stages_against_all_splits(
    kinds: tuple[str, str], step_s: float, role: GroupRole
) -> None:
    """OPT-30B's 48 layers on two GPUs, either way round: none of the 47 splits carries 1 % more."""
    site = site_of({name: (kind, 1) for name, kind in zip("ab", kinds, strict=True)})
    capacity, _, _ = modelled(site, "opt-30b", "LPLD", step_s=step_s)
    signature = signature_of(site, ((0, 1), (1, 1)))
    for shape in (((0, 1), (1, 1)), ((1, 1), (0, 1))):
        ends = capacity._ends(signature, shape)
        able = [
            [layers, 48 - layers]
            for layers in range(1, 48)
            if all(
                capacity._most_layers(role, end, capacity.lengths.longest) >= count
                for end, count in zip(ends, (layers, 48 - layers), strict=True)
            )
        ]
        best = max(capacity._rate(signature, shape, ends, layers, role) for layers in able)
        assert 0.99 * best <= capacity.carried_by(signature, shape, role).rate <= best


def test_what_does_not_fit_carries_nothing() -> None:
    capacity, _, _ = modelled(site_of({"h": (H100, 1), "l": (L40, 3)}), "llama-2-70b")
    for signature in (((0, 1),), ((1, 3),)):
        for role in ("prefill", "decode"):
            assert capacity.carried(signature, role) == Carried()  # type: ignore[arg-type]


def test_a_pool_that_the_longest_request_does_not_fit_carries_nothing() -> None:
    site = site_of({"h": (H100, 2)})
    capacity, _, _ = modelled(site, "llama-2-70b")
    assert capacity.carried(((0, 2),), "decode").rate > 0
    long = LengthStats.of([*requests(1210, 387), BenchRequest(None, 100_000, 9, 0.0)])
    capacity.lengths = long
    capacity._found.clear()
    capacity._limits.clear()
    assert capacity.carried(((0, 2),), "decode") == Carried()
