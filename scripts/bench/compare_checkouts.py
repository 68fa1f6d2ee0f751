"""CPU time that a simulated step costs in two checkouts, side by side.

    python -m scripts.bench.compare_checkouts BEFORE AFTER

BEFORE and AFTER are folders, ``git archive REVISION | tar x -C BEFORE`` makes one. Each round runs
both, in turns first, in processes of their own; the ratio of a pair is what counts, since a
machine's speed changes from minute to minute.
"""

import statistics
import subprocess
import sys
from pathlib import Path

import click

# The least of three, so that a disturbance of one does not count.
CODE = """
import gc, runpy, sys, time
root, count, script = sys.argv[1], int(sys.argv[2]), sys.argv[3]
sys.path[:0] = [root]
sys.meta_path = [each for each in sys.meta_path if "editable" not in repr(each).lower()]
run_file = runpy.run_path(script)["run_file"]
import jaxinfer
from jaxinfer.simulate.run import simulate
assert jaxinfer.__file__.startswith(root), jaxinfer.__file__
config, found = run_file(count, 4), []
for _ in range(3):
    work = list(config.requests())
    gc.collect()
    start = time.process_time()
    steps = simulate(config, work).steps
    found.append(1e6 * (time.process_time() - start) / steps)
print(min(found))
"""


def microseconds(root: Path, requests: int) -> float:
    """Measure the microseconds of a step."""
    command = [sys.executable, "-I", "-c", CODE, str(root.resolve())]
    command += [str(requests), str(Path(__file__).with_name("scale_simulator.py"))]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


@click.command()
@click.argument("before", type=click.Path(path_type=Path, exists=True))
@click.argument("after", type=click.Path(path_type=Path, exists=True))
@click.option("--rounds", default=30, type=click.IntRange(min=2))
@click.option("--requests", default=700)
def main(before: Path, after: Path, rounds: int, requests: int) -> None:
    """Print each round, the medians and the ratios."""
    pairs = []
    for number in range(rounds):
        order = (before, after) if number % 2 else (after, before)
        times = {root: microseconds(root, requests) for root in order}
        pairs.append((times[before], times[after]))
        click.echo(f"{number + 1}: {times[before]:.2f} and {times[after]:.2f} us a step")
    ratios = [b / a for a, b in pairs]
    error = statistics.stdev(ratios) / len(ratios) ** 0.5
    click.echo(
        f"medians {statistics.median(a for a, _ in pairs):.2f} and "
        f"{statistics.median(b for _, b in pairs):.2f} us a step; ratio: median "
        f"{statistics.median(ratios):.3f}, mean {statistics.mean(ratios):.3f} +- {error:.3f}"
    )


if __name__ == "__main__":
    main()
