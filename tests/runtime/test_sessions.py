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

TURNS, PREFIX, INPUT, OUTPUT = 8, 160, 3, 4
FIRST, GROWTH = PREFIX + INPUT, INPUT + OUTPUT
WORKLOAD = {
    "synthetic": {
        "input_len": INPUT,
        "output_len": OUTPUT,
        "count": 2 * TURNS,
        "prefixes": {"tokens": PREFIX},
        "sessions": {"turns": TURNS},
    }
}
ENGINE = {"page_size": 4, "num_pages": 160, "max_model_len": 256, "kernels": "plain"}


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
    params = SamplingParams(temperature=0, max_tokens=OUTPUT, ignore_eos=True)
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
    assert prompts[0][:PREFIX] == prompts[TURNS][:PREFIX]
    assert prompts[0][PREFIX:] != prompts[TURNS][PREFIX:FIRST]
    return {str(index): answer for index, answer in enumerate(answers)}


@pytest.mark.parametrize("fetch", [False, True], ids=["there", "there and back"])
def test_answers_and_bytes_of_deltas(
    tiny_folder: Path, tmp_path: Path, expected: dict[str, tuple[int, ...]], fetch: bool
) -> None:
    """Bytes are those of the entries that were missing, by closed forms from pages of both ends."""
    groups = {"p": {"platform": "cpu"}, "d": {"platform": "cpu"}}
    llm = load(
        tiny_folder,
        groups=groups,
        instances={"prefill": {"group": "p"}, "decode": {"group": "d", "page_size": 8}},
        system={"name": "disaggregated", "fetch": fetch},
        verify_transfers=True,
    )
    answers, metrics = run(llm, tmp_path)
    assert answers == expected
    record = read_run(tmp_path / "1")
    lengths = {int(r.id): r.prompt_len for r in record.requests}
    (token_bytes,) = {t.num_bytes / t.num_tokens for t in record.transfers}
    assert token_bytes == 2 * 2 * 2 * 8 * 4  # Layers, keys and values, heads, channels, float32.
    sent = {way: dict.fromkeys(lengths, 0) for way in ("prefill", "decode")}
    for transfer in record.transfers:
        sent[transfer.source][int(transfer.request)] += transfer.num_tokens
    spared = 0
    for index, prompt_len in lengths.items():
        turn = index % TURNS
        assert prompt_len == FIRST + turn * GROWTH
        # Both sessions come at once, so that their first turns find nothing. Of the turn before,
        # the decode instance has full pages of eight, without its last token, which has no entry;
        # the prefill instance has full pages of four of its prompt.
        before = prompt_len - GROWTH if turn else 0
        there, here = (before + OUTPUT - 1) // 8 * 8 if turn else 0, before // 4 * 4
        assert sent["prefill"][index] == prompt_len - there
        back = max(there - here, 0) if fetch else 0
        assert sent["decode"][index] == back
        spared += here + back
        if turn >= 4:  # Whole hand-offs send the prompt.
            assert 10 * (prompt_len - there + back) <= prompt_len
    assert metrics.cached_tokens == spared
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
    ends = (FIRST + turn * GROWTH - INPUT - 1 for turn in range(1, TURNS))
    spared = sum(end // 4 * 4 for end in ends)
    assert metrics.cached_tokens == 2 * spared
    assert check_decisions(tmp_path / "1").difference is None


def test_a_tier_keeps_what_the_pool_evicts(
    tiny_folder: Path, tmp_path: Path, expected: dict[str, tuple[int, ...]]
) -> None:
    """A pool for one turn of 55 pages at most, so that two sessions in turns evict each other."""
    own = {"num_pages": 60, "max_num_seqs": 1, "eviction": {"tier": "t"}, "watermark": 0.0}
    llm = load(
        tiny_folder,
        groups={"g": {"platform": "cpu"}, "h": {"platform": "cpu"}},
        instances={
            "a": {"group": "g"} | own,
            "t": {"group": "h", "page_size": 8, "computes": False},
        },
        system={"name": "single"},
        verify_transfers=True,
    )
    answers, metrics = run(llm, tmp_path)
    assert answers == expected
    record = read_run(tmp_path / "1")
    assert {step.instance for step in record.steps} == {"a"}
    # A turn finds full pages of four of the turn before here, or full pages of eight in the tier,
    # if they have landed there; and the first turn of the second session what both begin with.
    ends = [FIRST + turn * GROWTH - INPUT - 1 for turn in range(1, TURNS)]
    most = 2 * sum(end // 4 * 4 for end in ends) + PREFIX
    assert 0.9 * most <= metrics.cached_tokens <= most
    assert any(t.source == "t" for t in record.transfers)
    # All that both have at their ends went there, what both begin with once.
    last = (FIRST + (TURNS - 1) * GROWTH + OUTPUT - 1) // 8 * 8
    there = sum(t.num_tokens for t in record.transfers if t.dest == "t")
    assert there >= 2 * last - PREFIX
    assert check_decisions(tmp_path / "1").difference is None
