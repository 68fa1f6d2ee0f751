"""Lists of unlike sides that lose one, or run out of pages: the tokens are one instance's."""

import json
from pathlib import Path
from typing import Any

import pytest
from failure_cases import INSTANCE, PARAMS, PROMPTS, break_device, break_gathers, tokens

from jaxinfer import LLM
from jaxinfer.config.run_file import as_run_file
from jaxinfer.report.records import read_run

DISAGGREGATED = {
    "name": "disaggregated",
    "prefill": ["p", "q"],
    "decode": ["d", "e"],
    "hand_off": "at_end",
}
HEXGEN2 = {
    "name": "hexgen2",
    "flows": {"p": {"d": 3.0, "e": 1.0}, "q": {"e": 2.0}},
    "hand_off": "at_end",
}


@pytest.fixture(scope="module")
def expected(tiny: LLM) -> list[list[int]]:
    """Tokens of one instance."""
    return tokens(tiny.generate(PROMPTS, PARAMS, progress=False))


def load(folder: Path, system: dict[str, Any] = DISAGGREGATED, **decode: Any) -> LLM:
    """Prompts on p and q, decodes on d and e; no two of them are alike."""
    stages = {"stages": [{"group": "e", "layers": 1}] * 2}
    instances = {
        "p": {"group": "p", "page_size": 8},
        "q": {"group": "q", "page_size": 12},
        "d": {"group": "d", "page_size": 16} | decode,
        "e": stages | {"page_size": 20} | decode,
    }
    run_file = {
        "model": str(folder),
        "groups": {
            "p": {},
            "q": {"devices": 2},
            "d": {},
            "e": {"devices": 2, "tensor_parallel_size": 1},
        },
        "instances": {name: INSTANCE | each for name, each in instances.items()},
        "system": system,
        "verify_transfers": True,
    }
    return LLM.from_config(as_run_file(run_file), progress=False)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("lost", "failure", "after"), [("d", break_device, 2), ("p", break_gathers, 1)]
)
def test_one_of_them_is_lost(
    tiny_folder: Path,
    tmp_path: Path,
    expected: list[list[int]],
    lost: str,
    failure: Any,
    after: int,
) -> None:
    llm = load(tiny_folder)
    failure(llm, lost, after)
    outputs = llm.generate(PROMPTS, PARAMS, progress=False, run_dir=tmp_path)
    assert tokens(outputs) == expected
    run = json.loads((tmp_path / "1" / "run.json").read_text())
    assert list(run["lost"]) == [lost]
    assert "injected" in run["lost"][lost]


@pytest.mark.slow
def test_full_pools_of_those_that_decode(
    tiny_folder: Path,
    tmp_path: Path,
    expected: list[list[int]],
) -> None:
    """Room for one request each: KV waits where the prompts are, and all come to their ends."""
    longest = max(len(prompt["prompt_token_ids"]) for prompt in PROMPTS) + PARAMS.max_tokens
    llm = load(tiny_folder, num_pages=1 + -(-longest // 16))
    outputs = llm.generate(PROMPTS, PARAMS, progress=False, run_dir=tmp_path)
    assert tokens(outputs) == expected
    run = read_run(tmp_path / "1")
    moved = [transfer for transfer in run.transfers if transfer.dest in "de"]
    assert {transfer.source for transfer in moved} == {"p", "q"}
    assert len(moved) >= len(PROMPTS)
    decoded = sum(s.decode_tokens for s in run.steps if s.instance in "de")
    assert decoded >= len(PROMPTS) * (PARAMS.max_tokens - 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("lost", "failure", "after"),
    [
        ("d", break_device, 2),
        pytest.param("e", break_device, 2, marks=pytest.mark.long),
        ("p", break_gathers, 1),
    ],
)
def test_hexgen2_loses_one(
    tiny_folder: Path,
    tmp_path: Path,
    expected: list[list[int]],
    lost: str,
    failure: Any,
    after: int,
) -> None:
    """The lost one's pairs are gone; a request that had no other has one now."""
    llm = load(tiny_folder, HEXGEN2)
    failure(llm, lost, after)
    outputs = llm.generate(PROMPTS, PARAMS, progress=False, run_dir=tmp_path)
    assert tokens(outputs) == expected
    run = read_run(tmp_path / "1")
    assert list(run.run["lost"]) == [lost]
    others = {"d": {"e"}, "e": {"d"}, "p": {"d", "e"}}[lost]
    assert sum(s.decode_tokens for s in run.steps if s.instance in others) > 0
    assert run.steps[-1].instance != lost


@pytest.mark.slow
def test_hexgen2_loses_all_that_prefill(
    tiny_folder: Path, tmp_path: Path, expected: list[list[int]]
) -> None:
    """The decode instances serve whole requests once all prefill instances are lost."""
    llm = load(tiny_folder, HEXGEN2)
    break_device(llm, "p", 1)
    break_device(llm, "q", 1)
    outputs = llm.generate(PROMPTS, PARAMS, progress=False, run_dir=tmp_path)
    assert tokens(outputs) == expected
    run = read_run(tmp_path / "1")
    assert set(run.run["lost"]) == {"p", "q"}
    assert sum(s.prefill_tokens for s in run.steps if s.instance in "de") > 0
