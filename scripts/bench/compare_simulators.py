"""CPU time and memory of a simulation here and by NVIDIA's aisimulate, on one trace.

    python -m scripts.bench.compare_simulators TRACE.jsonl --aisimulate ENV/bin/aisimulate

The trace has Mooncake's form, prompts by named blocks of 512 tokens. Eight replicas take requests
in turns, with prefix caching, pages of 64 tokens, and steps of fixed lengths: 60 ms with prompts,
8 ms with decodes alone. aisimulate has an environment of its own (``pip install
--only-binary :all: aisimulate``); without one, only this simulator is measured. Vidur is left out:
it has no prefix cache.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import click
import yaml

REPLICAS, PAGE, PAGES, TOKENS, SEATS = 8, 64, 12_000, 8192, 256
PREFILL_MS, DECODE_MS = 60.0, 8.0
# Longer than any request of the trace.
LONGEST = 262_144
CODE = """
import json, sys
from jaxinfer.config.run_file import load_run_file
from jaxinfer.simulate.run import simulate
config = load_run_file(sys.argv[1])
found = simulate(config, config.requests())
print(json.dumps({"requests": found.requests, "steps": found.steps, "cached": found.cached_tokens}))
"""


def run_file(trace: Path) -> dict[str, Any]:
    """Return the run file of this simulator."""
    names = [f"i{number}" for number in range(REPLICAS)]
    engine = {
        "page_size": PAGE,
        "num_pages": PAGES,
        "max_num_seqs": SEATS,
        "max_num_batched_tokens": TOKENS,
        "max_model_len": LONGEST,
        "enable_prefix_caching": True,
        "launch_ahead": False,
    }
    decode = {"step_s": DECODE_MS / 1000, "context_s": 0.0, "sequence_s": 0.0}
    prefill = {"step_s": PREFILL_MS / 1000, "token_s": 0.0, "pair_s": 0.0}
    return {
        "model": "llama-3-8b",
        "engine": engine,
        "groups": {name: {"kind": "H200"} for name in names},
        "instances": {name: {"group": name} for name in names},
        "system": {
            "name": "data_parallel",
            "shares": {name: {"weight": 1, "max_waiting": 10**6} for name in names},
        },
        "simulate": {"phases": {"prefill": prefill, "decode": [decode]}},
        "workload": {"trace": str(trace), "arrivals": "trace"},
    }


def peer_file(trace: Path) -> dict[str, Any]:
    """Return the same for aisimulate."""
    worker = {
        "parallelism": {"replicas": REPLICAS},
        "scheduler": {"max_batched_tokens": TOKENS, "max_sequences": SEATS},
        "kv_cache": {"block_size": PAGE, "capacity": {"type": "fixed", "blocks": PAGES}},
        "timing": {"type": "fixed", "prefill_ms": PREFILL_MS, "decode_ms": DECODE_MS},
    }
    return {
        "traffic": {
            "source": {"type": "trace", "paths": [str(trace)], "format": "mooncake"},
            "load": {"type": "trace_timestamps"},
        },
        # Its imports take minutes on a busy machine, and so does its end.
        "execution": {
            "resources": {
                "initialization_timeout_seconds": 900.0,
                "shutdown_timeout_seconds": 900.0,
            }
        },
        "engine": {
            "mode": "aggregated",
            "model": "meta-llama/Meta-Llama-3.1-8B",
            "hardware": "h200_sxm",
            "backend": "vllm",
            "workers": {"aggregated": worker},
        },
    }


def measure(command: list[str]) -> tuple[float, float, str]:
    """Run a command; return its CPU seconds, its peak memory in MiB, and what it prints."""
    with tempfile.TemporaryFile("w+", encoding="utf-8") as out:
        child = subprocess.Popen(command, stdout=out)
        _, status, usage = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
        out.seek(0)
        text = out.read()
    if child.returncode:
        raise click.ClickException(f"{command[0]} ends with {child.returncode}: {text[-500:]}")
    return usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024, text


@click.command()
@click.argument("trace", type=click.Path(path_type=Path, exists=True))
@click.option("--aisimulate", help="Its program, in an environment of its own.")
@click.option("--limit", type=click.IntRange(1), help="Use only this many requests.")
def main(trace: Path, aisimulate: str | None, limit: int | None) -> None:
    """Print seconds, requests and steps per second, and memory of each."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        lines = trace.read_text(encoding="utf-8").splitlines()[:limit]
        cut = folder / "trace.jsonl"
        cut.write_text("\n".join(lines) + "\n", encoding="utf-8")
        (folder / "ours.yaml").write_text(yaml.safe_dump(run_file(cut)), encoding="utf-8")
        (folder / "peer.yaml").write_text(yaml.safe_dump(peer_file(cut)), encoding="utf-8")
        seconds, mib, text = measure([sys.executable, "-c", CODE, str(folder / "ours.yaml")])
        found = json.loads(text)
        click.echo(
            f"jaxinfer: {seconds:.1f} s, {len(lines) / seconds:.0f} requests/s, "
            f"{found['steps'] / seconds:.0f} steps/s, {mib:.0f} MiB; {found}"
        )
        if aisimulate:
            command = [aisimulate, "predict", "--config", str(folder / "peer.yaml")]
            seconds, mib, text = measure([*command, "--output-dir", str(folder / "out")])
            click.echo(text.strip())
            click.echo(
                f"aisimulate: {seconds:.1f} s, {len(lines) / seconds:.0f} requests/s, {mib:.0f} MiB"
            )


if __name__ == "__main__":
    main()
