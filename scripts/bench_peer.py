"""One measured run of a peer engine on a workload, in that engine's own environment.

    ENV/bin/python scripts/bench_peer.py {hf,vllm,llamacpp} MODEL DTYPE WORKLOAD.jsonl OUT.json

Greedy, EOS ignored, two threads. ``hf``: transformers' generate in static batches of 16, sorted
by length. ``vllm``: its CPU build with 64 sequences. ``llamacpp``: 16 slots; MODEL is a GGUF file,
whose types are taken as they are. The time excludes loading.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

THREADS = 2
HF_BATCH = 16
MAX_LEN = 2048


def run_hf(model_folder: str, dtype: str, work: list[dict[str, Any]]) -> float:
    """Seconds for all requests; padding to the left, as transformers asks for."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(THREADS)
    model = AutoModelForCausalLM.from_pretrained(
        model_folder, dtype=getattr(torch, dtype), attn_implementation="sdpa"
    ).eval()
    work = sorted(work, key=lambda item: len(item["prompt_token_ids"]))

    def generate(items: list[dict[str, Any]], new_tokens: int) -> None:
        longest = max(len(item["prompt_token_ids"]) for item in items)
        ids = torch.zeros((len(items), longest), dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, item in enumerate(items):
            prompt = torch.tensor(item["prompt_token_ids"])
            ids[row, longest - len(prompt) :] = prompt
            mask[row, longest - len(prompt) :] = 1
        with torch.inference_mode():
            model.generate(
                input_ids=ids, attention_mask=mask, do_sample=False, pad_token_id=0,
                max_new_tokens=new_tokens, min_new_tokens=new_tokens,
            )  # fmt: skip

    generate(work[:2], 4)
    start = time.perf_counter()
    for first in range(0, len(work), HF_BATCH):
        batch = work[first : first + HF_BATCH]
        generate(batch, max(item["max_tokens"] for item in batch))
    return time.perf_counter() - start


def run_vllm(model_folder: str, dtype: str, work: list[dict[str, Any]]) -> float:
    """Seconds for all requests."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = "2"
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "0-1"
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=model_folder, dtype=dtype, max_num_seqs=64, max_model_len=MAX_LEN,
        enable_prefix_caching=False, seed=0,
    )  # fmt: skip
    params = [
        SamplingParams(temperature=0, max_tokens=item["max_tokens"], ignore_eos=True)
        for item in work
    ]
    prompts = [{"prompt_token_ids": item["prompt_token_ids"]} for item in work]
    llm.generate(prompts[:2], params[:2], use_tqdm=False)
    start = time.perf_counter()
    llm.generate(prompts, params, use_tqdm=False)
    return time.perf_counter() - start


def main(engine: str, model: str, dtype: str, workload: str, out: str) -> None:
    """Run one engine and write ``wall_s``."""
    lines = Path(workload).read_text().splitlines()
    work = [json.loads(line) for line in lines if line.strip()]
    wall = {"hf": run_hf, "vllm": run_vllm}[engine](model, dtype, work)
    Path(out).write_text(json.dumps({"engine": engine, "wall_s": wall}) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
