"""Answers of the tiny model, greedy and drawn."""

from typing import Any

from jaxinfer import LLM, SamplingParams

TINY = {"page_size": 8, "num_pages": 65, "max_num_seqs": 4, "max_num_batched_tokens": 32}
PARAMS = [
    SamplingParams(temperature=t, top_p=p, seed=3, max_tokens=20, ignore_eos=True, logprobs=2)
    for t, p in ((0, 1.0), (1.0, 1.0), (0.8, 0.9))
]
PROMPTS = ["Hello", "x" * 70, "Another one"]


def outputs(llm: LLM) -> list[tuple[list[int], list[Any]]]:
    done = [o.outputs[0] for o in llm.generate(PROMPTS, PARAMS, progress=False)]
    return [(c.token_ids, [list(p) for p in c.logprobs or []]) for c in done]
