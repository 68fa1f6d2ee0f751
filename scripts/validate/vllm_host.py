"""Measure the host's work in vLLM with a null model, in vLLM's own environment.

    ENV/bin/python -m scripts.validate.vllm_host requests OUT.csv
    ENV/bin/python -m scripts.validate.vllm_host steps OUT.csv

``requests`` starts vLLM's server with a model of one layer and sends it prompts of 550 tokens. Per
request and per token of an answer, it writes the seconds of CPU of the server's process (HTTP,
tokenizing, detokenizing, events; not the engine's process), and those of a client in Python.
``steps`` runs the engine in this process, and writes for several numbers of sequences the seconds
of CPU of a step of decodes: the scheduler's, and the model runner's without the model, the head and
the sampler's kernels.

Seconds of CPU, unlike those of a clock, do not count what else the machine does. Prompts and
tokenizer (8,000 byte pairs) come from this repository's pages.
"""

import argparse
import asyncio
import json
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from scripts.tables import Row, show_table, write_csv

PAGES = Path(__file__).parents[2] / "docs"
PROMPT, PROMPTS = 550, 100
# Tokens of an answer, and streams at a time.
LOADS = ((1, 1), (65, 1), (65, 32))
SEQUENCES = (1, 8, 32, 64, 128, 256)
STEPS = 60
MODEL = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 8000,
    "hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64, "torch_dtype": "float32",
    "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip


def main() -> None:
    """Measure, and write a row for each load."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("requests", "steps"))
    parser.add_argument("out", type=Path, help="CSV file")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = {"requests": of_requests, "steps": of_steps}[asked.what](folder)
    write_csv(asked.out, rows)
    show_table(rows)


def of_requests(folder: str) -> list[Row]:
    """Return milliseconds of CPU per request and microseconds per token, by load."""
    prompts = make_model(folder)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", folder]
    command += ["--load-format", "dummy", "--enforce-eager", "--port", str(port)]
    command += ["--max-num-seqs", "128", "--max-model-len", "4096", "--disable-uvicorn-access-log"]
    environment = os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}
    with subprocess.Popen(command, env=environment) as server:
        try:
            _wait_for(f"http://127.0.0.1:{port}/health", server)
            found = asyncio.run(_send_all(f"http://127.0.0.1:{port}", folder, prompts, server.pid))
        finally:
            server.terminate()
    (one, one_client), (many, many_client), (wide, wide_client) = found
    tokens = LOADS[1][0] - 1

    def of_token(several: float, single: float) -> float:
        return round(1e6 * (several - single) / tokens, 1)

    return [
        {
            "process": name,
            "ms per request": round(1e3 * single, 2),
            "us per token, 1 stream": of_token(several, single),
            f"us per token, {LOADS[2][1]} streams": of_token(beside, single),
        }
        for name, single, several, beside in (
            ("server", one, many, wide),
            ("client", one_client, many_client, wide_client),
        )
    ]


async def _send_all(
    url: str, model: str, prompts: Sequence[str], server: int
) -> list[tuple[float, float]]:
    """Return seconds of CPU per request, of the server and of this process, for each load."""
    import aiohttp

    found = []
    async with aiohttp.ClientSession() as session:

        async def send(prompt: str, tokens: int) -> None:
            body = {"model": model, "prompt": prompt, "max_tokens": tokens, "stream": True}
            data = json.dumps(body | {"ignore_eos": True, "temperature": 0})
            headers = {"Content-Type": "application/json"}
            async with session.post(f"{url}/v1/completions", data=data, headers=headers) as answer:
                answer.raise_for_status()
                async for part in answer.content:
                    if part.startswith(b"data: {"):
                        json.loads(part[6:])

        for prompt in prompts:  # The prefix cache then has all of them.
            await send(prompt, 2)
        for tokens, streams in LOADS:
            waiting = list(prompts)

            async def stream(waiting: list[str] = waiting, tokens: int = tokens) -> None:
                while waiting:
                    await send(waiting.pop(), tokens)

            before, own = cpu_seconds(server), time.process_time()
            await asyncio.gather(*(stream() for _ in range(streams)))
            spent = cpu_seconds(server) - before, time.process_time() - own
            found.append((spent[0] / len(prompts), spent[1] / len(prompts)))
    return found


def of_steps(folder: str) -> list[Row]:
    """Return microseconds of CPU of a step of decodes, by number of sequences."""
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1"}
    os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1"}
    make_model(folder)
    from vllm import LLM, SamplingParams

    llm = LLM(
        folder, load_format="dummy", enforce_eager=True, max_num_seqs=max(SEQUENCES),
        max_model_len=4096, enable_prefix_caching=False, async_scheduling=False,
        distributed_executor_backend="uni",
    )  # fmt: skip
    core = llm.llm_engine.engine_core.engine_core
    runner = core.model_executor.driver_worker.worker.model_runner
    spent: dict[str, float] = {}
    _note(spent, core.scheduler, "schedule", "schedule")
    _note(spent, core.scheduler, "update_from_output", "update")
    for name in ("execute_model", "sample_tokens"):
        _note(spent, runner, name, "runner")
    _note(spent, runner, "_model_forward", "kernels")
    _note(spent, runner, "_sample", "kernels")
    _note(spent, runner.model, "compute_logits", "kernels")
    _note(spent, core, "step_fn" if hasattr(core, "step_fn") else "step", "step")
    rows = []
    for count in SEQUENCES:
        params = SamplingParams(max_tokens=STEPS + 20, ignore_eos=True, temperature=0)
        for _ in range(count):
            llm.llm_engine.add_request(
                f"{count}-{random.random()}", {"prompt_token_ids": [5] * 16}, params
            )
        for _ in range(10):
            llm.llm_engine.step()
        spent.update(dict.fromkeys(spent, 0.0))
        for _ in range(STEPS):
            llm.llm_engine.step()
        micros = {name: 1e6 * each / STEPS for name, each in spent.items()}
        while llm.llm_engine.has_unfinished_requests():
            llm.llm_engine.step()
        row: Row = {"sequences": count, "scheduler": micros["schedule"] + micros["update"]}
        row["runner"] = micros["runner"] - micros["kernels"]
        row["engine's step"] = micros["step"] - micros["kernels"]
        rows.append({name: round(each) for name, each in row.items()})
    return rows


def _note(spent: dict[str, float], of: Any, name: str, what: str) -> None:
    """Have a method add its seconds of this thread's CPU to ``spent``."""
    method: Callable[..., Any] = getattr(of, name)
    spent.setdefault(what, 0.0)

    def noted(*args: Any, **more: Any) -> Any:
        before = time.thread_time()
        try:
            return method(*args, **more)
        finally:
            spent[what] += time.thread_time() - before

    setattr(of, name, noted)


def make_model(folder: str) -> list[str]:
    """Write a model without weights and its tokenizer, and return prompts."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    texts = [path.read_text(encoding="utf-8") for path in sorted(PAGES.glob("*.md"))]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=MODEL["vocab_size"], special_tokens=["<s>", "</s>"], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.save(f"{folder}/tokenizer.json")
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    for name, content in (("config", MODEL), ("tokenizer_config", about)):
        Path(folder, f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    tokens = tokenizer.encode("\n".join(texts)).ids
    starts = random.Random(0).sample(range(len(tokens) - PROMPT), PROMPTS)
    return [tokenizer.decode(tokens[start : start + PROMPT]) for start in starts]


def cpu_seconds(pid: int) -> float:
    """Return the seconds of CPU that a process has taken, without its children."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rsplit(") ", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _wait_for(url: str, server: subprocess.Popen[bytes]) -> None:
    while server.poll() is None:
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except OSError:
            time.sleep(1)
    raise SystemExit(f"vLLM's server ended with {server.returncode}")


if __name__ == "__main__":
    main()
