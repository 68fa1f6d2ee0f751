"""Prompts for the tiny model."""

from typing import Any

from jaxinfer import LLM, SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)


PROMPTS = ["Hello", "A longer prompt than the other one, by far.", "x" * 150, "Ünïcode ✓"]


def tokens(llm: LLM, prompts: Any, params: Any) -> list[list[int]]:
    outputs = llm.generate(prompts, params, progress=False)
    return [o.outputs[0].token_ids for o in outputs]
