"""jaxinfer beside its peers on one workload, in turns: medians and ratios.

    python scripts/bench_side_by_side.py WORKLOAD.jsonl OUT.json --rounds 3 \
        --peer hf=HF_ENV/bin/python --peer vllm=VLLM_ENV/bin/python

Everything in float32 on CPU, greedy, EOS ignored. Each round runs every engine once, in a process
of its own, one after the other, so that a machine whose speed drifts slows them alike. A peer's
environment needs that peer; where it wants environment variables too (vLLM's CPU build asks for
LD_PRELOAD and OMP_NUM_THREADS), give a script that sets them and starts its Python.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

SCRIPTS = Path(__file__).parent
ENGINE = {
    "dtype": "float32", "max_num_seqs": 64, "max_model_len": 2048, "max_num_batched_tokens": 2048,
    "strict_shapes": "true",
}  # fmt: skip


def run_ours(workload: str, out: Path, settings: list[str]) -> None:
    """One ``jaxinfer bench``."""
    options = [f"engine.{name}={value}" for name, value in ENGINE.items()] + settings
    command = [sys.executable, "-m", "jaxinfer", "bench", "--model", "smollm2-135m-instruct"]
    command += ["--workload", workload, "--json", str(out), "--force"]
    for option in options:
        command += ["--set", option]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def run_peer(name: str, python: str, model: Path, workload: str, out: Path) -> None:
    """One run of a peer in its own environment."""
    command = [python, str(SCRIPTS / "bench_peer.py"), name, str(model), workload, str(out)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def main() -> None:
    """Measure, print a table, write the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("workload")
    parser.add_argument("out", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=PYTHON")
    parser.add_argument("--set", action="append", default=[], metavar="A.B=C", dest="settings")
    options = parser.parse_args()
    peers = dict(peer.split("=", 1) for peer in options.peer)
    walls: dict[str, list[float]] = {name: [] for name in ["jaxinfer", *peers]}
    with tempfile.TemporaryDirectory() as scratch:
        model = Path(scratch) / "demo-model"
        export = [sys.executable, str(SCRIPTS / "export_demo_model.py"), str(model)]
        subprocess.run(export, check=True)
        for number in range(options.rounds):
            for name in walls:
                out = Path(scratch) / "figures.json"
                if name == "jaxinfer":
                    run_ours(options.workload, out, options.settings)
                    (figures,) = json.loads(out.read_text())
                else:
                    run_peer(name, peers[name], model, options.workload, out)
                    figures = json.loads(out.read_text())
                walls[name].append(figures["wall_s"])
                print(f"round {number + 1} {name}: {figures['wall_s']:.1f} s", flush=True)
    ours = statistics.median(walls["jaxinfer"])
    print(f"\n{'engine':10} {'median s':>9} {'range s':>15} {'ours is faster by':>18}")
    for name, seconds in walls.items():
        median = statistics.median(seconds)
        spread = f"{min(seconds):.1f} to {max(seconds):.1f}"
        print(f"{name:10} {median:9.1f} {spread:>15} {median / ours:17.2f}x")
    options.out.write_text(json.dumps({"workload": options.workload, "wall_s": walls}) + "\n")


if __name__ == "__main__":
    main()
