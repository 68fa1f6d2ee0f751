"""Clusters whose FFN is on a group of its own, and architectures with greedy requests."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
from cluster_cases import Request, load, roomy
from cluster_checks import Done, serve

from jaxinfer import SamplingParams

ARCHITECTURES = Path(__file__).parents[1] / "data" / "architectures"
VOCABULARY = 131
# Prompts and outputs, together at most 127 tokens: chunks beside decodes, and edges of pages.
LENGTHS = [(40, 20), (16, 30), (1, 24), (33, 12), (9, 40), (64, 8), (32, 1)]


def sections(ffn: int = 1, attention: int = 1, **options: Any) -> dict[str, Any]:
    """Sections of a run file."""
    return {
        "groups": {"p": {"devices": attention}, "f": {"devices": ffn}},
        "instances": {"x": {"stages": [{"group": "p", "ffn": "f"}]} | roomy(16) | options},
        "system": "single",
    }


def apart(ffn: int = 1, attention: int = 1, restart: int = 0, **options: Any) -> dict[str, Any]:
    """The same with each group in a process of its own."""
    found = sections(ffn, attention, **options)
    for group in found["groups"].values():
        group |= {"process": "own", "restart": restart}
    return found


def with_tokenizer(name: str, like: Path, folder: Path) -> Path:
    """An architecture's checkpoint with the tokenizer of ``like``, for prompts of token ids."""
    shutil.copytree(like, folder)
    for each in ("config.json", "model.safetensors"):
        shutil.copyfile(ARCHITECTURES / name / each, folder / each)
    return folder


def greedy_requests() -> list[Request]:
    rng = np.random.default_rng(11)
    return [
        Request(
            tuple(rng.integers(0, VOCABULARY, prompt).tolist()),
            SamplingParams(max_tokens=output, temperature=0, ignore_eos=True),
        )
        for prompt, output in LENGTHS
    ]


def tokens_alone(model: Path, folder: Path) -> list[Done]:
    """Greedy requests on one device, one after the other, each prompt in one piece."""
    alone = {"engine": {"max_num_seqs": 1, "max_num_batched_tokens": 128, "page_size": 64}}
    instance: dict[str, Any] = {"x": {"group": "p", "enable_prefix_caching": False}}
    llm = load(model, folder, groups={"p": {}}, instances=instance, system="single", **alone)
    return serve(llm, greedy_requests())


def parts_of_steps(folder: Path) -> list[tuple[int, int]]:
    """Return, for each step of a run, the numbers of its rows and of its micro-batches."""
    lines = (folder / "steps.jsonl").read_text(encoding="utf-8").splitlines()
    steps = [step for step in map(json.loads, lines) if "rows" in step]
    return [(step["rows"], len(step.get("halves", [0]))) for step in steps]
