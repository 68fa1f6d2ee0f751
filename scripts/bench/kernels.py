"""Compare attention kernels on a GPU in one run, as shares of the machine's rates.

    python -m scripts.bench.kernels --json figures.json
    python -m scripts.bench.kernels --json figures.json --rehearse   # on a CPU: small, interpreted

``attention_cases`` defines the cases. Decodes have equal lengths, or 50 to 8,192 tokens of context;
their figure is a share of the measured copy bandwidth (keys and values are read once). Chunked
prefill has 2,048 new tokens after 8,192; its figure is a share of the measured rate of matrix
products. The other implementations are the plain functions, JAX's own paged decode,
``jax.nn.dot_product_attention`` (cuDNN) on the same data in contiguous arrays, and, with --flex,
torch's flex_attention over pages of 128 tokens, which must be compiled.

Figures are medians of rounds in which the functions take turns. Each round has several calls, so
that launching costs nothing. Each result is compared with XLA's dense attention. Each case runs in
its own process. If Mosaic's kernel ends or hangs that process, another process runs the case
without it. ``--rounds 0`` runs each function once, for tools that watch it.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

# Torch needs memory, too.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import click
import jax
import jax.numpy as jnp

from jaxinfer.runtime.stage.machine_speed import copy_rate, product_rate
from scripts.bench.attention_cases import CASES, AttentionCase, AttentionRun, How

CALLS = 10
# Seconds for one case, including compilation; a case that hangs is stopped then.
CASE_S = 100
# Tolerance relative to the largest value, for products of bfloat16.
TOLERANCE = 2e-2


def seconds(runs: Mapping[str, AttentionRun], rounds: int) -> dict[str, float]:
    """Return the median seconds of one call for each compiled run; none without rounds.

    As many calls are in flight as take a twentieth of a second. A slow run has fewer rounds.
    """
    times: dict[str, list[float]] = {name: [] for name in runs}
    calls: dict[str, int] = {}
    for number in range(rounds):
        for name, run in runs.items():
            if number >= 3 and calls[name] == 1:
                continue
            start = time.perf_counter()
            for _ in range(calls.get(name, 1)):
                last = run.start()
            run.wait(last)
            took = (time.perf_counter() - start) / calls.get(name, 1)
            if number:
                times[name].append(took)
            calls[name] = max(min(int(0.05 / took), CALLS), 1)
    return {name: statistics.median(found) for name, found in times.items() if found}


def measure(
    case: AttentionCase, rates: Mapping[str, float], how: How, rounds: int
) -> dict[str, Any]:
    """Return the seconds, the share of the machine's rate, and the largest error of each run.

    A run that fails has its error's first line; the others are still timed.
    """
    runs: dict[str, AttentionRun] = {}
    figures: dict[str, Any] = {}
    expected = case.expected()
    for name, make in case.runs.items():
        if name == how.without or (how.only and name not in how.only):
            continue
        try:
            run = make()
            found = run.start()
            run.wait(found)
        except Exception as error:  # The figures show any error.
            figures[name] = {"failed": f"{type(error).__name__}: {error}".splitlines()[0][:200]}
            continue
        runs[name], figures[name] = run, {}
        if name != "flex_attention" and "unmasked" not in name:
            off = jnp.abs(found - expected).max() / jnp.abs(expected).max()
            figures[name]["error"] = float(off)
    for name, took in seconds(runs, rounds).items():
        least = case.work / rates[case.rate]
        if "int8" in name:
            least /= 2
        figures[name] |= {"seconds": took, "of_the_machine": least / took}
    return figures


def run_case(name: str, how: How, rounds: int) -> dict[str, Any]:
    """Time all runs of one case, and the machine's rates."""
    small = how.small or not rounds
    rates = {
        "bytes": copy_rate(2**20 if small else 2**30),
        "operations": product_rate(512 if small else 8192),
    }
    return {
        "jax": jax.__version__,
        "device": jax.devices()[0].device_kind,
        "small": how.small,
        "interpreted": how.interpreted,
        "copy_gb_s": rates["bytes"] / 1e9,
        "product_tflops": rates["operations"] / 1e12,
        "runs": measure(CASES[name](how), rates, how, rounds),
    }


def in_own_process(name: str, options: list[str], without: str) -> dict[str, Any] | str:
    """Return the case's figures, or how its process ended, since a GPU fault ends the process."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "case.json"
        command = [sys.executable, "-m", "scripts.bench.kernels", *options, "--case", name]
        command += ["--here", "--without", without, "--json", str(path)]
        try:
            done = subprocess.run(command, timeout=CASE_S)
        except subprocess.TimeoutExpired:
            return f"stopped at {CASE_S} s"
        if done.returncode and not path.exists():
            return f"exit status {done.returncode}"
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))[name]
        return found


def in_own_processes(name: str, options: list[str]) -> dict[str, Any]:
    """Return the case's figures, without Mosaic's kernel if it has ended its process."""
    found = in_own_process(name, options, "")
    if isinstance(found, str):
        ended, found = found, in_own_process(name, options, "hopper")
        if isinstance(found, str):
            return {"runs": {"generic": {"failed": found}}}
        found["runs"]["hopper"] = {"failed": ended}
    return found


def is_wrong(name: str, run: Mapping[str, Any]) -> bool:
    """True if one of our kernels failed, or if its error is larger than rounding explains."""
    ours = name in ("generic", "hopper")
    return ours and not run.get("error", float("inf")) < TOLERANCE


@click.command()
@click.option("--json", "json_path", required=True, help="File for the figures.")
@click.option("--rounds", default=20)
@click.option("--flex", is_flag=True, help="With torch's flex_attention.")
@click.option("--small", is_flag=True, help="A 64th of the tokens.")
@click.option("--rehearse", is_flag=True, help="Small, and interpreted: on a CPU.")
@click.option("--case", "cases", type=click.Choice(list(CASES)), multiple=True, help="These alone.")
@click.option("--only", multiple=True, help="These runs alone, such as generic.")
@click.option("--without", default="", help="A run to leave out.")
@click.option("--here", is_flag=True, help="In this process.")
def main(
    json_path: str,
    rounds: int,
    flex: bool,
    small: bool,
    rehearse: bool,
    cases: tuple[str, ...],
    only: tuple[str, ...],
    without: str,
    here: bool,
) -> None:
    """Measure, print and write; exit with 1 if a kernel of ours has failed or is wrong."""
    how = How(small or rehearse, rehearse, flex, only, without)
    options = ["--rounds", str(rounds), *["--flex"] * flex, *["--small"] * small]
    options += [*["--rehearse"] * rehearse, *(word for name in only for word in ("--only", name))]
    figures: dict[str, Any] = {}
    for name in cases or CASES:
        if here:
            figures[name] = run_case(name, how, rounds)
        else:
            figures[name] = in_own_processes(name, options)
            show(name, figures[name]["runs"])
        text = json.dumps(figures, indent=2)
        Path(json_path).write_text(text + "\n", encoding="utf-8")
    wrong = sum(is_wrong(*run) for found in figures.values() for run in found["runs"].items())
    raise SystemExit(wrong > 0)


def show(case: str, runs: Mapping[str, Any]) -> None:
    """Print a line for each run."""
    for name, run in runs.items():
        said = run.get("failed", "")
        if "seconds" in run:
            said = f"{1000 * run['seconds']:.3f} ms, {run['of_the_machine']:.0%} of the machine's"
            said += " rate, "
        if "error" in run:
            said += f"off by {run['error']:.1e}"
        print(f"{case}: {name}: {said.removesuffix(', ')}", flush=True)


if __name__ == "__main__":
    main()
