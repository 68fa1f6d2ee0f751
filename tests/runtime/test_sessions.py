"""Sessions for real, on the tiny model: turns, tokens, and what hand-offs send of them."""

from pathlib import Path
from typing import Any

import pytest

from jaxinfer import LLM, RequestOutput, SamplingParams
from jaxinfer.config.run_file import as_run_file
from jaxinfer.lab.measure import measure
from jaxinfer.lab.validate.same_decisions import check_decisions
from jaxinfer.report.metrics import RunMetrics
from jaxinfer.report.records import read_run
from jaxinfer.workload.bench_request import real_tokens

TURNS = 8
WORKLOAD = {
    "synthetic": {
        "input_len": 5,
        "output_len": 4,
        "count": 2 * TURNS,
        "prefixes": {"tokens": 40},
        "sessions": {"turns": TURNS},
    }
}
ENGINE = {"page_size": 4, "num_pages": 120, "max_model_len": 128, "kernels": "plain"}


def load(folder: Path, **sections: Any) -> LLM:
    config = {"model": str(folder), "engine": ENGINE, "ledger": True} | sections
    return LLM.from_config(as_run_file(config), progress=False)


def run(llm: LLM, out: Path) -> tuple[dict[str, tuple[int, ...]], RunMetrics]:
    found: dict[str, tuple[int, ...]] = {}

    def note(output: RequestOutput) -> None:
        found[output.request_id] = tuple(output.outputs[0].token_ids)

    work = as_run_file({"workload": WORKLOAD}).requests()
    metrics = measure(llm, work, "workload", str(out), progress=False, on_output=note)
    return found, metrics


@pytest.fixture(scope="module")
def expected(tiny_folder: Path) -> dict[str, tuple[int, ...]]:
    """The answers to prompts put together by hand, one at a time, with nothing cached."""
    llm = load(tiny_folder, engine=ENGINE | {"enable_prefix_caching": False}, ledger=False)
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    prompts: list[list[int]] = []
    answers: list[tuple[int, ...]] = []
    for index, item in enumerate(as_run_file({"workload": WORKLOAD}).requests()):
        prompt = real_tokens(item, llm.vocab_size, index)
        if item.follows is not None:
            history = [*prompts[item.follows], *answers[item.follows]]
            prompt = [*history, *prompt[len(history) :]]
        (output,) = llm.generate([{"prompt_token_ids": prompt}], params, progress=False)
        prompts.append(prompt)
        answers.append(tuple(output.outputs[0].token_ids))
    assert prompts[0][:40] == prompts[TURNS][:40]
    assert prompts[0][40:] != prompts[TURNS][40:45]
    return {str(index): answer for index, answer in enumerate(answers)}


def test_answers_and_bytes_of_deltas(
    tiny_folder: Path, tmp_path: Path, expected: dict[str, tuple[int, ...]]
) -> None:
    groups = {"p": {"platform": "cpu"}, "d": {"platform": "cpu"}}
    llm = load(
        tiny_folder,
        groups=groups,
        instances={"prefill": {"group": "p"}, "decode": {"group": "d", "page_size": 8}},
        system={"name": "disaggregated"},
        verify_transfers=True,
    )
    answers, _ = run(llm, tmp_path)
    assert answers == expected
    record = read_run(tmp_path / "1")
    sent = {t.request: t.num_tokens for t in record.transfers}
    lengths = {r.id: r.prompt_len for r in record.requests}
    assert sent.keys() == lengths.keys()
    for index in range(2 * TURNS):
        turn = index % TURNS
        prompt_len = 45 + turn * 9
        assert lengths[str(index)] == prompt_len
        # Both sessions come at once, so that their first turns find nothing. Decode has full
        # pages of eight of the turn before, whose last token has no entry.
        there = (prompt_len - 5 - 1) // 8 * 8 if turn else 0
        assert sent[str(index)] == prompt_len - there
        if turn >= 4:
            assert sent[str(index)] * 5 <= prompt_len
    assert check_decisions(tmp_path / "1").difference is None


def test_turns_of_a_session_stay_together(
    tiny_folder: Path, tmp_path: Path, expected: dict[str, tuple[int, ...]]
) -> None:
    llm = load(
        tiny_folder,
        groups={name: {"platform": "cpu"} for name in "pd"},
        instances={name: {"group": name} for name in "pd"},
        system={"name": "session_affinity"},
    )
    answers, metrics = run(llm, tmp_path)
    assert answers == expected
    assert {step.instance for step in read_run(tmp_path / "1").steps} == {"p", "d"}
    # Of each session: all full pages of the turn before, whose last token has no entry.
    spared = sum((45 + turn * 9 - 5 - 1) // 4 * 4 for turn in range(1, TURNS))
    assert metrics.cached_tokens == 2 * spared
    assert check_decisions(tmp_path / "1").difference is None
