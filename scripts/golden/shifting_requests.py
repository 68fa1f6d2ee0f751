"""Write requests whose mix changes twice: configs/plan/shifting.csv.

    python -m scripts.golden.shifting_requests --out configs/plan/shifting.csv

The trace has programmers' requests (long prompts, short answers), then chats with short prompts and
long answers, then the first kind again. Lengths are drawn from Azure's published percentiles, and
arrivals are Poisson.
"""

import random
from pathlib import Path

import click

from jaxinfer.workload.synthetic import Synthetic, WorkloadClass
from scripts.tables import write_csv

# Lengths, their class if there is one, requests per second, and seconds.
PHASES: tuple[tuple[str, WorkloadClass | None, float, float], ...] = (
    ("azure_code", None, 3.2, 150.0),
    ("azure_conversation", "LPHD", 6.0, 150.0),
    ("azure_code", None, 3.2, 150.0),
)


def phases(seed: int) -> list[dict[str, float]]:
    """Return the requests of all phases, by arrival."""
    rng, begin, rows = random.Random(seed), 0.0, []
    for number, (lengths, only, rate, seconds) in enumerate(PHASES):
        now = begin
        for item in Synthetic(lengths=lengths, count=3000, seed=3 * seed + number).requests(only):
            now += rng.expovariate(rate)
            if now >= begin + seconds:
                break
            rows.append(
                {
                    "arrived_at": round(now, 3),
                    "num_prefill_tokens": item.prompt_len,
                    "num_decode_tokens": item.max_tokens,
                }
            )
        begin += seconds
    return rows


@click.command()
@click.option("--out", required=True, type=click.Path(path_type=Path))
@click.option("--seed", default=0)
def main(out: Path, seed: int) -> None:
    """Write the trace."""
    write_csv(out, phases(seed))


if __name__ == "__main__":
    main()
