"""Hand-offs with one step wrong are caught and rightly named; those without pass."""

import random
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from jaxinfer.lab.conformance import GoldenModel, KVLayout, Side, check, hand_over, move
from jaxinfer.lab.conformance.mover import Mover
from scripts.validate.faults.registry import Fault, all_faults
from scripts.validate.faults.scenario import FREED, LENGTHS, MODEL, PAIRS, scenario
from scripts.validate.proof import DRAWN_FAULTS, by_name, drawn

FAULTS = all_faults()
LATE = "late write after free"
# One for each name, and with each as different layouts as there are.
# A pair with few pages, whose scales are powers of two.
ODD = ("TP2 PP1/3 page24 float8_e4m3fn HND", "TP4 PP1/1/2 page24 int8 HDN+NHD")
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
        "past the length", "late write after free", "channel order", "scaled",
        "delta begins late", "stale base", "base evicted",
    }  # fmt: skip


@pytest.mark.parametrize("fault", SAMPLE, ids=lambda fault: fault.name)
def test_a_fault_of_each_name(fault: Fault) -> None:
    assert fault.findings()[0].name == fault.name


def test_pages_off_by_one_factor_are_scales_of_others_unless_all_are() -> None:
    """Two of a request's pages are off by 2 each here, as their scales happen to be."""
    pairs = [p for p in drawn(1, DRAWN_FAULTS) if str(p[0]) == ODD[0] and str(p[1]) == ODD[1]]
    faults = [fault for fault in all_faults(pairs) if fault.name == "scale of another page"]
    assert faults
    assert all(fault.findings()[0].name == fault.name for fault in faults)


@pytest.mark.slow
def test_all_faults() -> None:
    wrong = []
    for fault in FAULTS:
        found = fault.findings()
        if not found or found[0].name != fault.name:
            wrong.append(f"{fault.name}, {fault}: {[str(each) for each in found]}")
    assert wrong == []


def alarms(source: KVLayout, dest: KVLayout, model: GoldenModel) -> list[str]:
    case = scenario(source, dest, model)
    return [str(finding) for finding in case.run(Mover(case.source, case.dest))]


def test_no_alarm_where_all_is_well() -> None:
    for pair in PAIRS:
        assert alarms(*pair) == [], pair


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(300))
def test_no_alarm_between_any_two_layouts(seed: int) -> None:
    ((source, dest, model),) = drawn(seed, 1)
    assert alarms(source, dest, model) == []


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
    assert fault.mistake.after
    fault.mistake.after(mover)
    given = case.source, case.dest, list(LENGTHS)
    assert check(*given, before=case.before, whole_pages=True) == []
    assert [f.name for f in check(*given, before=case.before)] == ["past the length"]


def test_a_late_write_behind_the_length_is_one_wherever_pages_may_be_filled() -> None:
    """Half of the last page's rest is a freed request's, the other half the source's."""
    case = scenario(KVLayout(), KVLayout(), MODEL)
    for request in LENGTHS:
        move(case.source, case.dest, request)
    table, length = case.dest.tables[2], LENGTHS[2]
    for request, first in ((FREED, length), (case.source.former, length + 7)):
        for shard in case.dest.pools:
            entries = MODEL.entries(request, shard.layer, np.arange(first, 64), np.arange(4))
            case.dest.put(shard, table, first, entries)
    given: dict[str, Any] = {"before": case.before, "freed": [FREED]}
    for whole_pages, names in ((True, [LATE]), (False, [LATE, "past the length"])):
        found = check(case.source, case.dest, list(LENGTHS), whole_pages=whole_pages, **given)
        assert [each.name for each in found] == names


def test_findings_say_where() -> None:
    (fault,) = (f for f in FAULTS if f.mistake.words == "heads reversed" and f.source == f.dest)
    first, second = fault.findings()
    assert str(first) == (
        "head order: request 1, layer 0, keys, token 0, head 0 holds that of layer 0, keys, "
        "token 0, head 3 (2400 blocks)"
    )
    assert second.request == 2
    assert first.blocks == 4 * 2 * 4 * LENGTHS[1]


def test_layouts_that_cannot_be() -> None:
    with pytest.raises(ValueError, match="kv_dtype is int4, must be one of float32"):
        KVLayout(kv_dtype="int4")
    with pytest.raises(ValueError, match=r"stages are \(1, 2\), the model has 4 layers"):
        scenario(KVLayout(stages=(1, 2)), KVLayout(), MODEL)
    with pytest.raises(ValueError, match="tp is 6, the model has 4 KV heads"):
        scenario(replace(KVLayout(), tp=6), KVLayout(), MODEL)


def test_pools_that_are_not_as_the_layout_has_them() -> None:
    """numpy would round and repeat what it takes, and what is left out would look old."""
    plain, small = (Side(MODEL, KVLayout(kv_dtype=name), 2) for name in ("bfloat16", "int8"))
    first = min(plain.pools, key=str)
    keys, values = plain.pools[first]

    def refusal(side: Side, **changed: Any) -> str:
        pair = replace(side.pools[first][0], **changed), side.pools[first][1]
        with pytest.raises(
            ValueError, match=r"^LayerPages\(stage=0, rank=0, layer=0\): "
        ) as caught:
            side.load(side.pools | {first: pair})
        return str(caught.value).partition(": ")[2]

    assert refusal(plain, pages=keys.pages.astype(np.float32)) == (
        "the engine has pages float32[2, 4, 16, 16], no scales, "
        "the layout pages uint16[2, 4, 16, 16], no scales"
    )
    scales = "scales float32[2, 4]"
    assert refusal(plain, scale_PK=np.ones((2, 4), np.float32)).startswith(
        f"the engine has pages uint16[2, 4, 16, 16], {scales}, the"
    )
    assert refusal(small, scale_PK=None).endswith(
        f"no scales, the layout pages int8[2, 4, 16, 16], {scales}"
    )
    assert refusal(small, scale_PK=np.ones((1, 4), np.float32)).startswith(
        "the engine has pages int8[2, 4, 16, 16], scales float32[1, 4], the"
    )
    with pytest.raises(ValueError, match=r"layer=0\): the layout alone has it"):
        plain.load({shard: pair for shard, pair in plain.pools.items() if shard != first})
    plain.load({first: (keys, values)} | plain.pools)


def test_requests_that_pools_past_would_be_taken_for() -> None:
    with pytest.raises(ValueError, match="lengths has 13 requests, must have 1 to 12"):
        hand_over(MODEL, None, None, None, [1] * 13)  # type: ignore[arg-type]


def test_the_table_of_faults_has_all_names_of_both_groups() -> None:
    one = Counter({"zeros": 3, "rounded": 1}), Counter({"zeros": 2}), ["rounded: nothing found"]
    other = Counter({"changed": 4}), Counter({"changed": 4}), list[str]()
    assert [list(row.values()) for row in by_name({"shipped": one, "drawn": other})] == [
        ["changed", 0, 4, 0, 4],
        ["rounded", 1, 0, 0, 0],
        ["zeros", 3, 0, 2, 0],
    ]
