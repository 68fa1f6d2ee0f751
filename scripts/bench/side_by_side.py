"""Compare jaxinfer with its peers on one workload, in turns: medians and ratios.

    python -m scripts.bench.side_by_side WORKLOAD.jsonl OUT.json --rounds 3 \
        --peer hf=HF_ENV/bin/python --peer vllm=VLLM_ENV/bin/python

The engines run on a CPU, with greedy sampling, and ignore EOS. Each round runs every engine once,
one after the other, each in its own process. A machine whose speed drifts therefore slows all of
them equally. A peer must be installed in its environment. If it also needs environment variables
(vLLM's CPU build needs LD_PRELOAD and OMP_NUM_THREADS), give a script that sets them and starts its
Python. A name that begins with "jaxinfer" is this code in another environment (with another JAX).
Memory is the process's peak.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from jaxinfer.checkpoints.checkpoint import demo_files

SCRIPTS = Path(__file__).parents[1]
ENGINE = {
    "max_num_seqs": 64,
    "max_model_len": 2048,
    "max_num_batched_tokens": 2048,
    "strict_shapes": "true",
}


def ours(python: str, workload: str, dtype: str, out: Path, settings: list[str]) -> list[str]:
    """Return the command of one ``jaxinfer bench``."""
    command = [python, "-m", "jaxinfer", "bench", "--model", "smollm2-135m-instruct"]
    command += ["--workload", workload, "--output", str(out), "--force"]
    options = [f"engine.{name}={value}" for name, value in ENGINE.items()]
    for option in [f"engine.dtype={dtype}", *options, *settings]:
        command += ["--set", option]
    return command


def run(command: list[str]) -> float:
    """Run a command to its end; return the process's largest resident memory in MiB."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _, status, used = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"failed: {' '.join(command)}")
    return used.ru_maxrss / 1024


def export_model(folder: Path) -> None:
    """Write the demo model in each engine's format."""
    subprocess.run(
        [sys.executable, str(SCRIPTS / "golden" / "export_demo_model.py"), str(folder)], check=True
    )
    (folder / "demo.gguf").symlink_to(demo_files("smollm2-135m-instruct")[0])


def main() -> None:
    """Measure, print a table, and write the figures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("workload")
    parser.add_argument("out", type=Path)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=PYTHON")
    parser.add_argument("--set", action="append", default=[], metavar="A.B=C", dest="settings")
    options = parser.parse_args()
    pythons = {"jaxinfer": sys.executable} | dict(peer.split("=", 1) for peer in options.peer)
    walls: dict[str, list[float]] = {name: [] for name in pythons}
    peaks: dict[str, list[float]] = {name: [] for name in pythons}
    with tempfile.TemporaryDirectory() as scratch:
        model, out = Path(scratch) / "demo-model", Path(scratch) / "figures.json"
        export_model(model)
        for number in range(options.rounds):
            for name, python in pythons.items():
                if name.startswith("jaxinfer"):
                    command = ours(python, options.workload, options.dtype, out, options.settings)
                else:
                    # -P hides this folder's modules, because a peer imports a package called
                    # `kernels`.
                    command = [python, "-P", str(SCRIPTS / "bench" / "peer.py"), name, str(model)]
                    command += [options.dtype, options.workload, str(out)]
                peaks[name].append(run(command))
                figures = json.loads(out.read_text())
                wall = (figures[0] if isinstance(figures, list) else figures)["wall_s"]
                walls[name].append(wall)
                print(f"round {number + 1} {name}: {wall:.1f} s", flush=True)
                options.out.write_text(json.dumps({"wall_s": walls, "peak_mib": peaks}) + "\n")
    first = statistics.median(walls["jaxinfer"])
    print(f"\n{'engine':14} {'median s':>9} {'range s':>15} {'ours is faster by':>18} {'MiB':>6}")
    for name, seconds in walls.items():
        median = statistics.median(seconds)
        spread = f"{min(seconds):.1f} to {max(seconds):.1f}"
        ratio = f"{median / first:.2f}x"
        print(f"{name:14} {median:9.1f} {spread:>15} {ratio:>18} {max(peaks[name]):6.0f}")


if __name__ == "__main__":
    main()
