"""Time a peer engine on a workload, in that engine's own environment.

    ENV/bin/python scripts/bench/peer.py {hf,vllm,llamacpp} FOLDER DTYPE WORKLOAD.jsonl OUT.json

Sampling is greedy, EOS is ignored, and there are two threads. ``hf`` is transformers' generate in
static batches of 16, sorted by length. ``vllm`` is its CPU build with 64 sequences; with
``--pages``, it has a prefix cache of that many pages of 32 tokens. ``llamacpp`` has 16 slots that
are refilled as requests end. FOLDER holds the model for transformers, and ``demo.gguf``. The time
excludes loading.
"""

import argparse
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

THREADS = 2
HF_BATCH = 16
MAX_LEN = 2048
LLAMA_SLOTS = 16
LLAMA_TOKENS = 512
PAGE = 32


def run_hf(model_folder: str, dtype: str, work: list[dict[str, Any]]) -> float:
    """Return the seconds for all requests; padding is on the left, as transformers requires."""
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
                input_ids=ids,
                attention_mask=mask,
                do_sample=False,
                pad_token_id=0,
                max_new_tokens=new_tokens,
                min_new_tokens=new_tokens,
            )

    generate(work[:2], 4)
    start = time.perf_counter()
    for first in range(0, len(work), HF_BATCH):
        batch = work[first : first + HF_BATCH]
        generate(batch, max(item["max_tokens"] for item in batch))
    return time.perf_counter() - start


def run_vllm(
    model_folder: str, dtype: str, work: list[dict[str, Any]], pages: int | None = None
) -> float:
    """Return the seconds for all requests."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = "2"
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "0-1"
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=model_folder,
        dtype=dtype,
        max_num_seqs=64,
        max_model_len=min(MAX_LEN, (pages - 1) * PAGE) if pages else MAX_LEN,
        enable_prefix_caching=pages is not None,
        seed=0,
        **({"num_gpu_blocks_override": pages, "block_size": PAGE} if pages else {}),
    )
    params = [
        SamplingParams(temperature=0, max_tokens=item["max_tokens"], ignore_eos=True)
        for item in work
    ]
    prompts = [{"prompt_token_ids": item["prompt_token_ids"]} for item in work]
    llm.generate(prompts[:2], params[:2], use_tqdm=False)
    start = time.perf_counter()
    llm.generate(prompts, params, use_tqdm=False)
    return time.perf_counter() - start


def run_llamacpp(model_folder: str, dtype: str, work: list[dict[str, Any]]) -> float:
    """Return the seconds for all requests; a step has decodes, then prompts, up to 512 tokens."""
    import llama_cpp as lib

    lib.llama_backend_init()
    path = Path(model_folder) / f"{dtype}.gguf"
    if not path.exists():
        how = lib.llama_model_quantize_default_params()
        how.ftype = {
            "float32": lib.LLAMA_FTYPE_ALL_F32,
            "bfloat16": lib.LLAMA_FTYPE_MOSTLY_BF16,
        }[dtype]
        how.allow_requantize = True
        original = str(Path(model_folder) / "demo.gguf").encode()
        assert lib.llama_model_quantize(original, str(path).encode(), how) == 0
    model = lib.llama_model_load_from_file(str(path).encode(), lib.llama_model_default_params())
    options = lib.llama_context_default_params()
    options.n_ctx, options.n_seq_max = LLAMA_SLOTS * 1152, LLAMA_SLOTS
    options.n_batch = options.n_ubatch = LLAMA_TOKENS
    options.n_threads = options.n_threads_batch = THREADS
    context = lib.llama_init_from_model(model, options)
    vocab = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(model))
    batch = lib.llama_batch_init(LLAMA_TOKENS, 0, 1)
    start = time.perf_counter()
    waiting, slots = list(reversed(work)), list(range(LLAMA_SLOTS))
    # For each slot: the request's tokens so far, the number of computed ones, and the final number.
    running: dict[int, tuple[list[int], int, int]] = {}
    while waiting or running:
        while waiting and slots:
            item = waiting.pop()
            tokens = list(item["prompt_token_ids"])
            running[slots.pop()] = (tokens, 0, len(tokens) + item["max_tokens"])
        count, last = 0, {}
        for slot in sorted(running, key=lambda slot: len(running[slot][0]) - running[slot][1]):
            tokens, done, end = running[slot]
            until = min(len(tokens), done + LLAMA_TOKENS - count)
            for position in range(done, until):
                batch.token[count], batch.pos[count] = tokens[position], position
                batch.n_seq_id[count], batch.seq_id[count][0] = 1, slot
                batch.logits[count] = position == len(tokens) - 1
                if batch.logits[count]:
                    last[slot] = count
                count += 1
            running[slot] = (tokens, until, end)
        batch.n_tokens = count
        assert lib.llama_decode(context, batch) == 0
        for slot, row in last.items():
            tokens, _, end = running[slot]
            logits = np.ctypeslib.as_array(lib.llama_get_logits_ith(context, row), shape=(vocab,))
            tokens.append(int(logits.argmax()))
            if len(tokens) == end:
                lib.llama_memory_seq_rm(lib.llama_get_memory(context), slot, -1, -1)
                slots.append(slot)
                del running[slot]
    return time.perf_counter() - start


def main() -> None:
    """Run one engine, and write ``wall_s``."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("engine", choices=RUNS)
    for name in ("model", "dtype", "workload", "out"):
        parser.add_argument(name)
    parser.add_argument("--pages", type=int, help="Pages of vLLM's prefix cache.")
    given = parser.parse_args()
    lines = Path(given.workload).read_text().splitlines()
    work = [json.loads(line) for line in lines if line.strip()]
    more = {"pages": given.pages} if given.pages else {}
    wall = RUNS[given.engine](given.model, given.dtype, work, **more)
    Path(given.out).write_text(json.dumps({"engine": given.engine, "wall_s": wall}) + "\n")


RUNS: dict[str, Callable[..., float]] = {"hf": run_hf, "vllm": run_vllm, "llamacpp": run_llamacpp}

if __name__ == "__main__":
    main()
