"""Time a batch whose prompts share beginnings: in order of arrival and by prefixes, beside vLLM.

    python -m scripts.bench.ordered_batch OUT.json --vllm vllm.sh

There are questions about several contexts, in random order. Prompts are random tokens for
SmolLM2-135M-Instruct, and the engines run on a CPU with a prefix cache of the same size. vLLM also
gets the batch sorted by prompts. See ``side_by_side`` for ``--vllm``. All engines take turns in
each round.
"""

import json
import random
import sys
import tempfile
from pathlib import Path

import click

from scripts.bench.peer import PAGE
from scripts.bench.side_by_side import SCRIPTS, export_model, ours, run

# Ids of ordinary tokens in the model's vocabulary.
FIRST, LAST = 1000, 40000


def draw(contexts: int, questions: int, sizes: tuple[int, int, int], seed: int) -> list[str]:
    """Return the batch's lines in random order.

    Args:
        sizes: tokens of a context, of a question, and of an answer.
    """
    source = random.Random(seed)

    def tokens(count: int) -> list[int]:
        return [source.randrange(FIRST, LAST) for _ in range(count)]

    lines = []
    for _ in range(contexts):
        context = tokens(sizes[0])
        for _ in range(questions):
            prompt = context + tokens(sizes[1])
            lines.append(json.dumps({"prompt_token_ids": prompt, "max_tokens": sizes[2]}))
    source.shuffle(lines)
    return lines


@click.command()
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--contexts", default=40, help="Number of contexts.")
@click.option("--questions", default=50, help="Number of questions about each.")
@click.option("--tokens", nargs=3, default=(700, 32, 16), help="Of a context, question, answer.")
@click.option("--pages", default=256, help=f"Pages of {PAGE} tokens of the KV pool.")
@click.option("--rounds", default=1, help="Number of runs of each engine.")
@click.option("--only", multiple=True, help="Run only engines of these names.")
@click.option("--vllm", help="Python of vLLM's environment, or a script that starts it.")
def main(
    out: Path,
    contexts: int,
    questions: int,
    tokens: tuple[int, int, int],
    pages: int,
    rounds: int,
    only: tuple[str, ...],
    vllm: str | None,
) -> None:
    """Measure, print and write seconds."""
    pool = [f"engine.page_size={PAGE}", f"engine.num_pages={pages}"]
    pool += ["engine.enable_prefix_caching=true"]
    tree = ["workload.order=prefix_tree", "engine.policies={admit: once_per_prefix}"]
    walls: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        model, workload = Path(scratch) / "model", Path(scratch) / "batch.jsonl"
        export_model(model)
        lines = draw(contexts, questions, tokens, seed=0)
        workload.write_text("\n".join(lines) + "\n")
        in_order = Path(scratch) / "sorted.jsonl"
        in_order.write_text("\n".join(sorted(lines)) + "\n")
        figures = Path(scratch) / "figures.json"
        for _ in range(rounds):
            python, batch = sys.executable, str(workload)
            commands = {
                "order of arrival": ours(python, batch, "float32", figures, pool),
                "prefix_tree": ours(python, batch, "float32", figures, [*pool, *tree]),
            }
            if vllm:
                peer = [vllm, "-P", str(SCRIPTS / "bench" / "peer.py"), "vllm", str(model)]
                for words, given in (("order of arrival", batch), ("sorted batch", str(in_order))):
                    asked = ["float32", given, str(figures), "--pages", str(pages)]
                    commands[f"vLLM, {words}"] = [*peer, *asked]
            for name, command in commands.items():
                if only and name not in only:
                    continue
                run(command)
                found = json.loads(figures.read_text())
                wall = (found[0] if isinstance(found, list) else found)["wall_s"]
                walls.setdefault(name, []).append(wall)
                print(f"{name}: {wall:.1f} s", flush=True)
                out.write_text(json.dumps(walls) + "\n")


if __name__ == "__main__":
    main()
