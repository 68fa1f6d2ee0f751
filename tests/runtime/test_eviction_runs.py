"""Evictions for real, on the tiny model: by next use, with the same tokens and decisions."""

from pathlib import Path

import pytest

from jaxinfer import LLM, SamplingParams
from jaxinfer.config.run_file import as_run_file
from jaxinfer.errors import JaxinferError
from jaxinfer.lab.validate.same_decisions import check_decisions
from jaxinfer.report.frames import load_run
from jaxinfer.text.prompts import TokensPrompt
from scripts.validate.next_use import belady

# Five documents of four pages, asked about in turns. A pool of 14 holds three, one of them with
# its question.
DOCUMENTS = [[40 * n + i for i in range(16)] for n in range(5)]
PROMPTS = [[*DOCUMENTS[n % 5], 255, n] for n in range(15)]
ENGINE = {
    "page_size": 4, "num_pages": 15, "max_num_seqs": 1, "max_model_len": 40, "kernels": "plain",
    "watermark": 0.0,
}  # fmt: skip


@pytest.mark.parametrize("order", ["lru", "next_use"])
def test_a_batch_whose_later_uses_are_known(tiny_folder: Path, tmp_path: Path, order: str) -> None:
    """If documents take turns, the least recently used one is needed next."""
    config = {
        "model": str(tiny_folder),
        "engine": ENGINE | {"eviction": {"order": order}},
        "ledger": True,
    }
    llm = LLM.from_config(as_run_file(config), progress=False)
    asked: list[TokensPrompt] = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    outputs = llm.generate(iter(asked), params, progress=False, run_dir=tmp_path)
    found = int(load_run(tmp_path / "1").requests["cached_tokens"].sum())
    bound = 4 * belady([[4 * (n % 5) + page for page in range(4)] for n in range(15)], 13)
    assert found == 0 if order == "lru" else 0.8 * bound <= found <= bound
    assert check_decisions(tmp_path / "1").difference is None
    alone = [llm.generate([each], params, progress=False, run_dir=tmp_path) for each in asked]
    assert [o.outputs[0].token_ids for o in outputs] == [o.outputs[0].token_ids for (o,) in alone]


def test_known_prompts_that_the_ledger_lacks(tiny_folder: Path, tmp_path: Path) -> None:
    """``check`` refuses runs that ended before all requests arrived: it lacks their next uses."""
    engine = ENGINE | {"eviction": {"order": "next_use"}}
    config = {"model": str(tiny_folder), "engine": engine, "ledger": True}
    llm = LLM.from_config(as_run_file(config), progress=False)
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    requests = [
        request
        for number, prompt in enumerate(PROMPTS[:3])
        for request in llm.make_requests(str(number), prompt, params)
    ]
    requests[-1].arrival = 1000.0

    def stop(done: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        llm.run(requests, lambda output: None, progress=False, run_dir=tmp_path, on_step=stop)
    with pytest.raises(JaxinferError, match=r"1 requests had not arrived .* next_use"):
        check_decisions(tmp_path / "1")
