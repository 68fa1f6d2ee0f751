"""Write golden continuations of Gemma 3 270M (base), by Hugging Face transformers.

    python -m scripts.golden.gemma GGUF tests/data/gemma3_golden.json

GGUF is the demo model's file, joined from the parts in its packages. The program needs its own
environment with torch, transformers and gguf. The prompts are text, and one is longer than the
model's window. The logits are in float32.
"""

import json
from pathlib import Path
from typing import Any

import click

PROMPTS = [
    "The capital of France is",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return",
    "Die Hauptstadt von Österreich heißt",
    "One, two, three, four, five, six,",
    " ".join(f"Line {i} says that {i} times {i} is {i * i}." for i in range(45)) + " Line 45 says",
]
NUM_OUTPUT = 24


@click.command()
@click.argument("path", metavar="GGUF", type=click.Path(path_type=Path))
@click.argument("out", type=click.Path(path_type=Path))
def main(path: Path, out: Path) -> None:
    """Write greedy tokens, each with the two best logits."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    model = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    with torch.no_grad():
        cases = [case(model, tokenizer, prompt) for prompt in PROMPTS]
    out.write_text(json.dumps({"cases": cases}) + "\n")


def case(model: Any, tokenizer: Any, prompt: str) -> dict[str, object]:
    """Return a prompt's continuation."""
    import torch

    ids = tokenizer(prompt)["input_ids"]
    known, steps = torch.tensor([ids]), []
    for _ in range(NUM_OUTPUT):
        top = model(known).logits[0, -1].topk(2)
        steps.append({"ids": top.indices.tolist(), "logits": top.values.tolist()})
        known = torch.cat([known, top.indices[None, :1]], 1)
    output = known[0, len(ids) :].tolist()
    print(len(ids), ids[:6], repr(tokenizer.decode(output)))
    return {"prompt": prompt, "prompt_ids": ids, "output_ids": output, "steps": steps}


if __name__ == "__main__":
    main()
