"""Steps of decodes by format of the weights, and the time that reading the weights needs.

    python -m scripts.bench.decode_weights --format bfloat16 --format int8 --out decode.csv

The model is the demo model, or with ``--layers`` a model with this number of layers, Llama 3.2 1B's
shape and random weights. Each format has its own engine; their steps are measured in turns. The
column "Needs" is the size of the weights divided by the rate of a sum over 1 GiB. Nothing else
should run on the machine.
"""

import csv
import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import click

from jaxinfer import LLM
from jaxinfer.runtime.layout_table import mib
from jaxinfer.runtime.profiling.measure_steps import measure_in_a_row
from scripts.bench.step_parts import IN_A_ROW, MODEL, best_read_rate

SHAPE = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 128256, "hidden_size": 2048,
    "intermediate_size": 8192, "num_attention_heads": 32, "num_key_value_heads": 8,
    "head_dim": 64, "max_position_embeddings": 4096, "rope_theta": 5e5, "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True, "bos_token_id": None, "eos_token_id": 2,
}  # fmt: skip
CONTEXT = 100


@contextmanager
def model_of(layers: int | None) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the model's folder, and the options that it needs."""
    if layers is None:
        yield MODEL, {}
        return
    with tempfile.TemporaryDirectory() as folder:
        config = json.dumps(SHAPE | {"num_hidden_layers": layers})
        Path(folder, "config.json").write_text(config)
        yield folder, {"load_format": "dummy"}


def options_of(name: str) -> dict[str, str]:
    """Return options of a format: ``int8`` with float32, ``int8+bfloat16``, or a dtype alone."""
    weights, _, dtype = name.partition("+")
    if weights in ("int8", "fp8"):
        return {"weight_dtype": weights, "dtype": dtype or "float32"}
    return {"dtype": name}


@click.command()
@click.option("--format", "formats", multiple=True, default=("float32", "bfloat16", "int8", "fp8"))
@click.option("--layers", type=click.IntRange(min=1), help="Of Llama 3.2 1B's; the demo model.")
@click.option("--rows", type=click.IntRange(min=1), multiple=True, default=(1, 4, 16))
@click.option("--rounds", type=click.IntRange(min=1), default=5)
@click.option("--out", required=True, help="File for the table, as CSV.")
def main(
    formats: tuple[str, ...], layers: int | None, rows: tuple[int, ...], rounds: int, out: str
) -> None:
    """Measure steps of decodes."""
    read, took = best_read_rate(), dict[tuple[str, int], list[float]]()
    with model_of(layers) as (model, needed):
        llms = {}
        for name in formats:
            llms[name] = LLM(
                model,
                progress=False,
                max_num_seqs=max(rows),
                max_num_batched_tokens=64,
                max_model_len=256,
                enable_prefix_caching=False,
                **needed,
                **options_of(name),
            )
        engines = {name: llm.engine for name, llm in llms.items()}
        for _ in range(rounds):
            for name, engine in engines.items():
                for count in rows:
                    parts = ((CONTEXT, 1),) * count
                    times = measure_in_a_row(engine.worker, engine.new_kv(), parts, IN_A_ROW)
                    took.setdefault((name, count), []).append(median(times[1:]))
    with Path(out).open("w", newline="", encoding="utf-8") as file:
        table = csv.writer(file)
        table.writerow(("weights", "bytes", "rows", "step_s", "needs_s"))
        for (name, count), seconds in took.items():
            size = engines[name].plan.weight_bytes
            row = name, size, count, median(seconds), size / read
            table.writerow(row)
            print(name, mib(size), count, *(f"{1000 * x:.1f} ms" for x in row[3:]))


if __name__ == "__main__":
    main()
