"""All systems on one card that plays several: answers, decisions, and times next to simulations.

    python -m scripts.bench.one_card --out DIR                 # on a GPU
    python -m scripts.bench.one_card --out DIR --processes     # then: a process for each group
    python -m scripts.bench.one_card --out DIR --rehearse      # on a CPU: tiny
    python -m scripts.bench.one_card --predict one_card_predicted.csv    # simulations alone

The run files are those of configs/gpu/one_card/. They run in two ways. ``exact`` has four layers of
SmolLM2-135M in float32; its answers must equal those of ``single``, token by token. ``large`` has
Llama 3 8B's shape in bfloat16. There, the other rows of a step change the last bits, so answers may
differ from a tie on, that is, where both tokens had log probabilities within BOUND of each other in
``single``.

Each run keeps a ledger, and the simulator must make the same decisions. Makespans are compared with
two simulations: one by the card's data sheet (``predicted_s``), and one by the profile of steps
measured here (``replayed_s``). Runs for which no time is left are reported as missing.
"""

import gc
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import click
import yaml

from jaxinfer.config.run_file import RunFile, load_run_file
from jaxinfer.errors import JaxinferError, one_line
from jaxinfer.lab.validate.replay import replay
from jaxinfer.lab.validate.same_decisions import check_decisions
from jaxinfer.report.records import read_run
from jaxinfer.report.run_folder import run_folders
from jaxinfer.report.summary import figures
from jaxinfer.request import SamplingParams
from jaxinfer.simulate.run import simulate
from scripts.bench.same_answers import TOP, ComparedAnswers, Comparison, compare
from scripts.tables import Row, show_table, write_csv

FOLDER = Path("configs/gpu/one_card")
# Systems that need the times of all steps come first, because the others use their profiles.
SYSTEMS = (
    "cronus", "single", "takeover", "disaggregated", "tetriinfer", "hexgen2", "splitwise",
    "distserve", "aladdin", "hetis",
)  # fmt: skip
PROCESSES = {"processes_cronus": ("host", "transfer_server")}
ALONE = "single"
CARDS = ("H100-SXM", "H200")
# The difference of log probabilities that counts as a tie, by dtype of the weights.
BOUND = {"float32": 1e-4, "bfloat16": 0.125}
SMALL = (
    "engine.max_model_len=512", "engine.page_size=16", "engine.num_pages=161",
    "engine.max_num_seqs=8", "engine.max_num_batched_tokens=256", "engine.token_buckets=[256]",
    "workload.synthetic={input_len: 120, output_len: 24, range_ratio: 0.8, count: 12, seed: 0}",
)  # fmt: skip
# Few pages, so that requests wait, prompts are cut, and KV heads leave their own device.
LEAST = (
    "engine.max_model_len=256", "engine.page_size=16", "engine.num_pages=81",
    "engine.max_num_seqs=4", "engine.max_num_batched_tokens=128", "engine.token_buckets=[128]",
    "workload.synthetic={input_len: 60, output_len: 12, range_ratio: 0.8, count: 8, seed: 0}",
)  # fmt: skip
# Settings of some systems' small runs: KV heads leave their own device, there are as many layers as
# segments, and steps have enough rows to fit decodes.
OF_SYSTEM: dict[tuple[tuple[str, ...], str], str] = {
    (SMALL, "aladdin"): "engine.max_num_seqs=16",
    (LEAST, "aladdin"): "engine.max_num_seqs=16",
    (SMALL, "hetis"): "engine.num_pages=49",
    (LEAST, "hetis"): "engine.num_pages=13",
    (LEAST, "splitwise"): "instances.prompt.segments=2",
}
# Settings of a rehearsal, which spends most of its time on compilation.
XLA_FLAGS = "--xla_backend_optimization_level=0"
# Systems of the large model in a rehearsal, where it is as tiny as the other one.
REHEARSED = ("cronus", ALONE)
SMOLLM2 = Path("configs/gpu/smollm2-135m/config.json")
TINY = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 512, "hidden_size": 64,
    "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "rope_theta": 10000.0,
    "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
}  # fmt: skip


@dataclass(frozen=True)
class Pass:
    """One way to run all files.

    Attributes:
        name: name of the way.
        model: model to run.
        size: settings of the run files that make runs smaller.
        dtype: dtype of weights and KV.
        is_large: whether runs are compared with simulations by the data sheet.
    """

    name: str
    model: str
    size: tuple[str, ...]
    dtype: str
    is_large: bool

    def of(self, system: str, *more: str) -> list[str]:
        """Return the settings of one system's file."""
        found = [f"model={self.model}", f"engine.dtype={self.dtype}", *self.size]
        if self.size:
            found.append("engine.kernels=plain")
        if setting := OF_SYSTEM.get((self.size, system)):
            found.append(setting)
        return [*found, *more]


def passes(out: Path, is_rehearsal: bool) -> list[Pass]:
    """Return both ways, or tiny ones in a rehearsal; write the small model to the folder."""
    folder, size = out / "model", LEAST if is_rehearsal else SMALL
    folder.mkdir(exist_ok=True)
    # Few layers compile faster.
    widths = TINY if is_rehearsal else json.loads(SMOLLM2.read_text()) | {"num_hidden_layers": 4}
    folder.joinpath("config.json").write_text(json.dumps(widths))
    exact = Pass("exact", str(folder), size, "float32", False)
    if is_rehearsal:
        return [exact, Pass("large", str(folder), size, "bfloat16", True)]
    return [exact, Pass("large", str(FOLDER / "llama3-8b"), (), "bfloat16", True)]


def own_groups(path: Path) -> list[str]:
    """Return the groups of a run file that have devices of their own."""
    groups = yaml.safe_load(path.read_text())["groups"]
    return [name for name, group in groups.items() if "shares" not in group]


def predict(system: str, card: str, settings: Sequence[str] = ()) -> Row | None:
    """Simulate a run file by a card's data sheet; None if the file cannot be modelled."""
    path = FOLDER / f"{system}.yaml"
    kinds = [f"groups.{name}.kind={card}" for name in own_groups(path)]
    config = load_run_file(path, [*settings, *kinds])
    if any(instance.is_spread for instance in config.instances.values()):
        return None  # Attention groups on one device take turns.
    found = simulate(config, config.requests())
    assert found.ttft_p50 is not None
    assert found.tbt_p50 is not None
    return {
        "card": card,
        "system": system,
        "makespan_s": round(found.wall_s, 6),
        "output_tokens_per_s": round(found.output_tokens / found.wall_s, 1),
        "ttft_p50_s": round(found.ttft_p50, 3),
        "tbt_p50_s": round(found.tbt_p50, 4),
    }


def write_predictions(path: Path) -> None:
    """Write the simulations of all files on all cards."""
    names = [*SYSTEMS, *PROCESSES]
    rows = [row for card in CARDS for name in names if (row := predict(name, card))]
    write_csv(path, rows)
    show_table(rows)


@dataclass(frozen=True)
class Suite:
    """Runs of systems on one card, and the folder of their results.

    Attributes:
        out: folder of the results.
        card: the card's name in ``configs/gpus.yaml``, or another name on a CPU.
        is_rehearsal: whether CPU devices stand for the card.
    """

    out: Path
    card: str
    is_rehearsal: bool

    @property
    def shown_card(self) -> str:
        """The card's name in the results, which says if a CPU stood for it."""
        return f"{self.card}, played by a CPU" if self.is_rehearsal else self.card

    def run(self, kind: Pass, system: str, label: str, *more: str) -> Row:
        """Run one system; if it fails, the row says so."""
        start = time.monotonic()
        row: Row = {"pass": kind.name, "system": label, "card": self.shown_card, "result": "ok"}
        try:
            row |= self._measured(kind, system, label, more)
        except Exception as error:
            row["result"] = f"failed: {type(error).__name__}: {one_line(error)}"
        gc.collect()  # The memory that a system had on the card is free only now.
        return row | {"seconds": round(time.monotonic() - start, 1)}

    def _measured(self, kind: Pass, system: str, label: str, more: Sequence[str]) -> Row:
        from jaxinfer.lab.measure import GREEDY, measure
        from jaxinfer.llm import LLM

        path, folder = FOLDER / f"{system}.yaml", self.out / kind.name / label
        config = load_run_file(path, [*kind.of(system, "ledger=true", *more), *self._on_cpu(path)])
        work, answers = config.requests(), ComparedAnswers()
        sampling = SamplingParams(temperature=0, logprobs=TOP) if system == ALONE else GREEDY
        start = time.monotonic()
        llm = LLM.from_config(config, progress=False)
        loaded = time.monotonic() - start
        measure(
            llm, work, str(path), str(folder), progress=False, sampling=sampling,
            on_output=answers.add,
        )  # fmt: skip
        transports = dict(llm.cluster.transports)
        del llm
        answers.write(self.out / f"{kind.name}_{label}.json")
        return {"load_s": round(loaded, 1), **self._figures(config, folder, kind, system)} | {
            "transports": transports
        }

    def _on_cpu(self, path: Path) -> list[str]:
        if not self.is_rehearsal:
            return []
        return [f"groups.{name}.platform=cpu" for name in own_groups(path)]

    def _figures(self, config: RunFile, folder: Path, kind: Pass, system: str) -> Row:
        """Read a run's folder, replay its decisions, and simulate it."""
        (ran,) = run_folders(folder)
        record = read_run(ran, system)
        late = record.run["overruns"].values()
        decided = check_decisions(ran)
        row: Row = {
            "wall_s": round(record.wall_s, 4),
            "predicted_s": None,
            "replayed_s": None,
            "steps": len(record.steps),
            "overruns": sum(each["steps"] for each in late),
            "overrun_s": round(sum(each["seconds"] for each in late), 3),
            "transfers": len(record.transfers),
            "ledger_entries": decided.entries,
            "ledger": decided.difference or "the same in both worlds",
        }
        if any(instance.is_spread for instance in config.instances.values()):
            return row
        replayed = replay(ran, self.out / "replayed" / kind.name / folder.name)[1]
        row["replayed_s"] = round(figures(replayed).wall_s, 4)
        if kind.is_large and self.card in CARDS:
            found = predict(system, self.card, kind.of(system))
            row["predicted_s"] = found and found["makespan_s"]
        return row

    def against(self, kind: Pass, row: Row) -> Row:
        """Compare a row's answers with those of one instance."""
        alone, own = (self.out / f"{kind.name}_{name}.json" for name in (ALONE, row["system"]))
        if row["result"] != "ok":
            return row
        if not alone.is_file():
            return row | {"result": f"failed: {ALONE} has not run, no answers to compare with"}
        found = compare(ComparedAnswers.read(alone), ComparedAnswers.read(own), BOUND[kind.dtype])
        return row | told(found)


def told(found: Comparison) -> Row:
    """Return a comparison as columns."""
    return {
        "equal": found.equal,
        "tied": found.tied,
        "apart": len(found.apart),
        "tokens_compared": found.tokens,
        "largest_gap": round(found.largest_gap, 5),
    }


def is_wrong(row: Row) -> bool:
    """True if a run failed, has other answers, or has other decisions than the simulator."""
    return (
        row["result"].startswith("failed")
        or bool(row.get("apart"))
        or row.get("ledger", "the same in both worlds") != "the same in both worlds"
    )


def rows_of(
    suite: Suite, kinds: Sequence[Pass], systems: Sequence[str], seconds: float
) -> Iterator[Row]:
    """Run systems one after the other, as long as there is time."""
    end = time.monotonic() + seconds
    for kind in kinds:
        for system in systems:
            if suite.is_rehearsal and kind.is_large and system not in REHEARSED:
                continue
            if time.monotonic() > end:
                late = {"pass": kind.name, "system": system, "card": suite.shown_card}
                yield {**late, "result": "not run: no time left"}
            else:
                yield suite.run(kind, system, system)


def rows_of_processes(suite: Suite, kinds: Sequence[Pass], seconds: float) -> Iterator[Row]:
    """Run files with processes by each transport, and the large model by the quicker one."""
    end = time.monotonic() + seconds
    for system, kind in product(PROCESSES, kinds):
        jobs = [(system, "transport=auto")]
        if not kind.is_large:
            jobs = [(f"{system}_{name}", f"transport={name}") for name in PROCESSES[system]]
        for label, setting in jobs:
            if time.monotonic() > end:
                late = {"pass": kind.name, "system": label, "card": suite.shown_card}
                yield {**late, "result": "not run: no time left"}
            else:
                yield suite.run(kind, system, label, setting)


def write(rows: Sequence[Row], out: Path, name: str) -> None:
    """Write rows as JSON, and as a CSV file with all their columns."""
    out.joinpath(f"{name}.json").write_text(json.dumps(rows, indent=2) + "\n")
    columns = dict.fromkeys(column for row in rows for column in row)
    write_csv(out / f"{name}.csv", [{c: row.get(c) for c in columns} for row in rows])


def card_here() -> str:
    """Return the first device's name in ``configs/gpus.yaml``, or else its JAX name."""
    import jax

    from jaxinfer.hardware.catalogue import name_of_device
    from jaxinfer.runtime.stage.gpu_memory import share_chosen

    with share_chosen():
        return name_of_device(jax.devices()[0].device_kind)[0]


@click.command()
@click.option("--out", type=click.Path(path_type=Path), help="Folder for the results.")
@click.option("--processes", is_flag=True, help="Groups in processes; after a run without, there.")
@click.option("--systems", default=",".join(SYSTEMS), help="Files' names; all by default.")
@click.option("--passes", "wanted", default="exact,large", help="Of both; both by default.")
@click.option("--seconds", default=300.0, help="Time after which no more is begun.")
@click.option("--rehearse", is_flag=True, help="Tiny, on a CPU, as if it were an H100.")
@click.option("--predict", "predicted", type=click.Path(path_type=Path), help="CSV; runs nothing.")
def main(
    out: Path | None,
    processes: bool,
    systems: str,
    wanted: str,
    seconds: float,
    rehearse: bool,
    predicted: Path | None,
) -> None:
    """Run, compare and write; exit with 1 if something is wrong."""
    if predicted:
        write_predictions(predicted)
        return
    if not out:
        raise JaxinferError("give --out DIR, or --predict FILE")
    if rehearse:
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {XLA_FLAGS}"
    out.mkdir(parents=True, exist_ok=True)
    known = out / "card.json"
    if processes and not known.is_file():
        raise JaxinferError(f"{out}: no run without --processes has been made there")
    if not processes:
        card = CARDS[0] if rehearse else card_here()
        known.write_text(json.dumps(card))
    kinds = [kind for kind in passes(out, rehearse) if kind.name in wanted.split(",")]
    if unknown := {*wanted.split(",")} - {kind.name for kind in kinds}:
        raise JaxinferError(f"--passes has {', '.join(unknown)}, must be exact or large, or both")
    suite = Suite(out, json.loads(known.read_text()), rehearse)
    rows = []
    names = systems.split(",")
    found = (
        rows_of_processes(suite, kinds, seconds)
        if processes
        else rows_of(suite, kinds, names, seconds)
    )
    for row in found:
        rows.append(row)
        print(json.dumps(row), flush=True)
    by_name = {kind.name: kind for kind in kinds}
    rows = [suite.against(by_name[row["pass"]], row) for row in rows]
    write(rows, out, "processes" if processes else "systems")
    show = ("pass", "system", "result", "wall_s", "predicted_s", "replayed_s", "equal", "tied",
            "apart", "overruns", "ledger")  # fmt: skip
    show_table([{name: row.get(name) for name in show} for row in rows])
    if wrong := [f"{row['pass']} {row['system']}" for row in rows if is_wrong(row)]:
        print(f"wrong: {', '.join(wrong)}")
        sys.exit(1)


if __name__ == "__main__":
    main()
