"""Print the errors of the times that Cronus' Balancer predicted.

python -m scripts.reproduce.cronus.balancer_error RUN_DIR ...
"""

import statistics
from pathlib import Path

import click

from jaxinfer.options.validation import read_json


@click.command()
@click.argument("runs", nargs=-1, required=True, type=click.Path(path_type=Path))
def main(runs: tuple[Path, ...]) -> None:
    """Print each run's median of |actual / predicted - 1|, over the requests."""
    for folder in runs:
        cuts = read_json(folder / "run.json")["system_report"]["cuts"].values()
        for part in ("prefill", "chunked"):
            errors = [
                abs(cut[part] / cut[f"expected_{part}"] - 1)
                for cut in cuts
                if cut[f"expected_{part}"]
            ]
            print(f"{folder}: T_{part} {statistics.median(errors):.1%} ({len(errors)} requests)")


if __name__ == "__main__":
    main()
