"""The simulator beside a real engine: vLLM's request timings, and ours by tables of its operators.

    python -m scripts.validate.vllm --run RUNFILE --tables FOLDER --requests requests.jsonl

RUNFILE is a run file of the machine, its engine and its model (by default the one of an RTX 4090),
FOLDER has the operators' profile (``meta.yaml``, ``tp1`` and so on), requests.jsonl vLLM's timings,
both as in LLMServingSim's repository. With ``--out`` the simulated run is kept. Prints what the
tables had besides the figures of ``jaxinfer validate requests.jsonl``, which writes files.
"""

from pathlib import Path
from tempfile import TemporaryDirectory

import click
import yaml

from jaxinfer.config.run_file import load_run_file
from jaxinfer.errors import JaxinferError
from jaxinfer.validate.request_log import figures, read_requests, request_rows, simulated
from scripts.tables import CONFIGS

RUN_FILE = CONFIGS / "vllm" / "rtx4090_llama31_8b.yaml"


@click.command()
@click.option("--run", "run_file", default=str(RUN_FILE))
@click.option("--tables", help="By default what the run file has under simulate.")
@click.option("--requests", "path", required=True, type=click.Path(path_type=Path))
@click.option("--out", type=click.Path(path_type=Path))
@click.option("--set", "settings", multiple=True)
def main(
    run_file: str, tables: str | None, path: Path, out: Path | None, settings: tuple[str, ...]
) -> None:
    """Print what the tables had, and mean TTFT, mean TPOT and makespan of both."""
    given = (f"simulate.tables={tables}",) if tables else ()
    try:
        real = read_requests(path)
        config = load_run_file(run_file, [*given, *settings])
        with TemporaryDirectory() as scratch:
            run = simulated(config, real, out or Path(scratch))
    except JaxinferError as error:
        raise click.ClickException(str(error)) from None
    for name, instance in run.run["instances"].items():
        for stage in instance["stages"]:
            print(f"{name}: {stage['num_pages']} pages of KV")
            if "tables" in stage:
                print(yaml.safe_dump(stage["tables"], default_flow_style=None, sort_keys=False))
    for figure in figures(request_rows(real, run.requests), real, run.requests):
        print(figure.line)
    print(f"preemptions: {sum(each.preemptions for each in run.requests)}")


if __name__ == "__main__":
    main()
