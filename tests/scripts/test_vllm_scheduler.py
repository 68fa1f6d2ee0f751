"""Our decisions beside those that vLLM 0.32's own scheduler took on six workloads.

The file was recorded by `python -m scripts.validate.vllm_scheduler --record`, with vLLM's Python.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from scripts.validate.vllm_scheduler.__main__ import check, first_difference
from scripts.validate.vllm_scheduler.options import WITHOUT, without
from scripts.validate.vllm_scheduler.workloads import DRAWN, MUTANTS, workload

RECORDED = Path(__file__).parents[1] / "data" / "vllm_scheduler.json"


def recorded(name: str) -> dict[str, Any]:
    return next(
        each for each in json.loads(RECORDED.read_text()) if each["workload"]["name"] == name
    )


def test_all_decisions_are_vllms() -> None:
    found = check(RECORDED)
    assert len(found) == 6
    assert set(found.values()) == {None}


def test_the_recording_has_all_kinds_of_decisions() -> None:
    decisions = [d for each in json.loads(RECORDED.read_text()) for d in each["decisions"]]
    assert len(decisions) == 1200
    assert sum(len(victims) for _, _, _, victims, _ in decisions) >= 10
    assert sum(cached for _, _, admitted, _, _ in decisions for _, cached in admitted) >= 1000
    assert any(count > 1 for _, rows, _, _, _ in decisions for _, count in rows)


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        ("victim", "rows: "),
        ("watermark", "rows: "),
        ("block count", "batch 1, at 0.003724 s, free blocks: vLLM 77; ours 76"),
        ("budget", "['14.0', 112] and ['14.0', 111]"),
        ("order", "rows: "),
    ],
)
def test_a_changed_choice_is_told(kind: str, told: str) -> None:
    asked = recorded("watermark")["workload"]
    difference = check(RECORDED, MUTANTS[kind][1](asked))["watermark"]
    assert difference is not None
    assert told in difference


# By option: a recorded workload that it decides.
DECIDES = {
    "paging.take: step": "watermark",
    "paging.cache: launched": "early stops with prefixes",
    "paging.twins": "whole pages alike",
    "paging.free: at_once": "watermark",
    "late_tokens: kept": "watermark",
    "empty_waits": "short answers",
    "admit_after_preemption: false": "watermark",
    "max_in_flight: 2": "watermark",
}


@pytest.mark.parametrize("option", WITHOUT)
def test_without_one_of_the_options_decisions_differ(option: str) -> None:
    assert check(RECORDED, without(option))[DECIDES[option]] is not None


def test_workloads_are_drawn_as_they_were() -> None:
    was = recorded("watermark")["workload"]
    assert workload("watermark", 200, 1)["requests"][: len(was["requests"])] == was["requests"]
    assert len(DRAWN) >= 20


def test_the_first_difference_in_words() -> None:
    one = [0, [["a", 1]], [], [], 5]
    assert first_difference([one], [one]) == (1, None)
    assert first_difference([one, one], [one]) == (1, "batch 2: vLLM goes on, ours ends")
    assert first_difference([one], [[0, [["a", 1]], [], ["b"], 5]]) == (
        0,
        'batch 1, at 0.000000 s, victims: vLLM []; ours ["b"] (number 0: None and b)',
    )
