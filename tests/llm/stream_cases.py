"""Requests that come one by one, and runs that are left."""

from typing import Any

from jaxinfer import LLM, SamplingParams

# 2 x max_num_seqs + 16, by hand.
READ_AHEAD = 24


def greedy(max_tokens: int, **options: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, **options)


def by_break(llm: LLM, prompts: list[str], params: list[SamplingParams]) -> None:
    for _ in llm.generate_iter(prompts, params, progress=False):
        break
