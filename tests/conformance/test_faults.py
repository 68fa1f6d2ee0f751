"""Hand-offs with one step wrong are caught and rightly named; those without pass."""

import random
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from jaxinfer.conformance import GoldenModel, Layout, check, move
from jaxinfer.conformance.faults import Fault, all_faults
from jaxinfer.conformance.formats import FORMATS
from jaxinfer.conformance.mover import Mover
from jaxinfer.conformance.scenario import LENGTHS, MODEL, PAIRS, WIDE, WINDOWED, scenario

FAULTS = all_faults()
# One for each name, and with each as different layouts as there are.
SAMPLE = list(
    {fault.name: fault for fault in random.Random(0).sample(FAULTS, len(FAULTS))}.values()
)


def test_the_grammar_has_enough_faults() -> None:
    assert len(FAULTS) >= 200
    assert len({str(fault) for fault in FAULTS}) == len(FAULTS)
    names = Counter(fault.name for fault in FAULTS)
    assert names.keys() >= {
        "head order", "stale page", "page offset off by one", "missing last token",
        "scale of another page", "dtype reinterpreted", "slab swapped", "layer shifted",
        "past the length", "late write after free",
    }  # fmt: skip


@pytest.mark.parametrize("fault", SAMPLE, ids=lambda fault: fault.name)
def test_a_fault_of_each_name(fault: Fault) -> None:
    assert fault.findings()[0].name == fault.name


@pytest.mark.slow
def test_all_faults() -> None:
    wrong = []
    for fault in FAULTS:
        found = fault.findings()
        if not found or found[0].name != fault.name:
            wrong.append(f"{fault.name}, {fault}: {[str(each) for each in found]}")
    assert wrong == []


def alarms(source: Layout, dest: Layout, model: GoldenModel) -> list[str]:
    case = scenario(source, dest, model)
    return [str(finding) for finding in case.run(Mover(case.source, case.dest))]


def test_no_alarm_where_all_is_well() -> None:
    for pair in PAIRS:
        assert alarms(*pair) == [], pair


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(300))
def test_no_alarm_between_any_two_layouts(seed: int) -> None:
    rng = random.Random(seed)

    def layout(model: GoldenModel) -> Layout:
        order = rng.choice(["HND", "NHD"])
        return Layout(
            tp=rng.choice([1, 2, model.heads, 2 * model.heads]),
            stages=rng.choice([(), (1, 3), (2, 2), (1, 1, 2)]),
            page_size=rng.choice([8, 16, 24, 64]),
            kv_dtype=rng.choice(list(FORMATS)),
            keys=rng.choice([order, "HDN"]),  # type: ignore[arg-type]
            values=order,  # type: ignore[arg-type]
        )

    model = rng.choice([MODEL, WINDOWED, WIDE])
    assert alarms(layout(model), layout(model), model) == []


def test_the_mover_against_plain_indexing() -> None:
    """Float32 sides have every entry golden, by its place in the pool's memory."""
    case = scenario(*PAIRS[1])
    for request in LENGTHS:
        move(case.source, case.dest, request)
    for shard, pair in case.dest.pools.items():
        for request, length in LENGTHS.items():
            golden = MODEL.entries(request, shard.layer, np.arange(length), np.arange(4))
            for token in (0, 23, 24, length - 1):
                page, offset = case.dest.tables[request][token // 24], token % 24
                for part in (0, 1):
                    found = pair[part].pages[page, offset]
                    np.testing.assert_array_equal(found, golden[part, token])


def test_a_last_page_may_be_filled_where_that_is_agreed() -> None:
    (fault,) = (f for f in FAULTS if f.name == "past the length" and f.source == f.dest)
    case = scenario(fault.source, fault.dest, fault.model)
    mover = Mover(case.source, case.dest)
    for request in LENGTHS:
        mover.move(request)
    assert fault.after
    fault.after(mover)
    given = case.source, case.dest, list(LENGTHS)
    assert check(*given, before=case.before, whole_pages=True) == []
    assert [f.name for f in check(*given, before=case.before)] == ["past the length"]


def test_findings_say_where() -> None:
    (fault,) = (f for f in FAULTS if f.mistake == "heads reversed" and f.source == f.dest)
    first, second = fault.findings()
    assert str(first) == (
        "head order: request 1, layer 0, keys, token 0, head 0 holds that of layer 0, keys, "
        "token 0, head 3 (2400 blocks)"
    )
    assert second.request == 2
    assert first.blocks == 4 * 2 * 4 * LENGTHS[1]


def test_layouts_that_cannot_be() -> None:
    with pytest.raises(ValueError, match="kv_dtype is int4, must be one of float32"):
        Layout(kv_dtype="int4")
    with pytest.raises(ValueError, match=r"stages are \(1, 2\), the model has 4 layers"):
        scenario(Layout(stages=(1, 2)), Layout(), MODEL)
    with pytest.raises(ValueError, match="tp is 6, the model has 4 KV heads"):
        scenario(replace(Layout(), tp=6), Layout(), MODEL)
