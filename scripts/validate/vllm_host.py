"""Measure what vLLM's server takes with a request, with a null model, in vLLM's own environment.

    ENV/bin/python -m scripts.validate.vllm_host OUT.csv

The program starts the server with a model of one layer and sends it prompts of 550 tokens. Per
request and per token of an answer, it writes the seconds of CPU of the server's process (HTTP,
tokenizing, detokenizing, events; not the engine's process), and those of a client in Python.
Seconds of CPU do not count what waits for other programs, but those slow them down: use an idle
machine. Prompts and tokenizer (8,000 byte pairs) come from this repository's pages.
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
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scripts.tables import Row, show_table, write_csv

PAGES = Path(__file__).parents[2] / "docs"
PROMPT, PROMPTS = 550, 100
# Tokens of an answer, and streams at a time.
LOADS = ((1, 1), (65, 1), (65, 32))
MODEL: dict[str, Any] = {
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
    parser.add_argument("out", type=Path, help="CSV file")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = of_requests(folder)
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
