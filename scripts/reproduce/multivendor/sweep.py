"""Ratios of prefill to decode instances on emulated groups of this machine's CPU, and replays.

The groups are those of configs/cpu/multivendor.yaml, which differ in everything. All KV is
verified. The model has the demo model's shape with fewer layers and random weights, so that
profiles take only minutes.
"""

import gc
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from jaxinfer import LLM
from jaxinfer.config.run_file import load_run_file
from jaxinfer.lab.measure import measure
from jaxinfer.lab.validate.replay import overruns, replay
from jaxinfer.report.latencies import LatencyTotals
from jaxinfer.report.plots import COLOURS
from jaxinfer.report.records import RunRecord
from jaxinfer.report.summary import figures
from jaxinfer.runtime.stage.devices import count_cpu_devices
from jaxinfer.workload.arrivals import Arrivals, with_arrivals
from jaxinfer.workload.lengths import BenchRequest
from scripts.reproduce.claims import Target, by_amount
from scripts.tables import CONFIGS, Row

RUN_FILE = CONFIGS / "cpu" / "multivendor.yaml"
SHAPE = RUN_FILE.parents[1] / "gpu" / "smollm2-135m"
RATIOS = ("1P1D", "2P1D", "3P1D", "1P2D", "1P3D")
LAYERS = 6
# Number of requests of a run, tokens of their prompts and answers, and seconds between two
# requests.
REQUESTS, LENGTHS, EVERY_S = 10, (192, 24), 2.0


def write_model(folder: Path) -> Path:
    """Write a model with the demo model's shape and ``LAYERS`` layers."""
    config = json.loads((SHAPE / "config.json").read_text(encoding="utf-8"))
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(config | {"num_hidden_layers": LAYERS})
    (folder / "config.json").write_text(text, encoding="utf-8")
    return folder


def config_of(ratio: str, model: Path) -> Any:
    """Return the run file with these numbers of instances."""
    prefills, decodes = (int(number) for number in re.findall(r"\d+", ratio))
    counts = {"groups.b": prefills, "instances.prefill": prefills}
    counts |= {"groups.a": decodes, "instances.decode": decodes}
    cut = "[{group: a, layers: 2}, {group: a, layers: 4}]"
    return load_run_file(
        RUN_FILE,
        [
            *(f"{path}.replicas={n}" for path, n in counts.items()),
            f"model={model}",
            "engine.load_format=dummy",
            f"instances.decode.stages={cut}",
        ],
    )


def latencies(run: RunRecord) -> dict[str, float | None]:
    """Return mean latencies of a run."""
    totals = LatencyTotals()
    for request in run.requests:
        totals.add(request.arrival, request.first_scheduled, request.token_times)
    found = totals.figures()
    return {name: found[f"{name}_mean"] for name in ("ttft", "tpot")}


def row_of(
    ratio: str, folder: Path, requests: int, lengths: tuple[int, int], every_s: float
) -> Row:
    """Return the row of a run and its replay."""
    llm = LLM.from_config(config_of(ratio, folder / "model"))
    same = [BenchRequest(None, *lengths, 0.0)] * requests
    work = with_arrivals(same, Arrivals(kind="interval", seconds=every_s))
    measure(llm, work, ratio, str(folder / ratio))
    newest = max((folder / ratio).glob("[0-9]*"), key=lambda path: int(path.name))
    real, simulated = replay(newest, folder / f"{ratio}.replay")
    for hint in overruns(real):
        print(f"{ratio}: {hint}")
    ours, theirs = figures(simulated), figures(real)
    row: Row = {"prefill:decode": ratio, "requests": requests}
    for name, (a, b) in {
        "makespan": (theirs.wall_s, ours.wall_s),
        **{name: (latencies(real)[name], latencies(simulated)[name]) for name in ("ttft", "tpot")},
    }.items():
        assert a is not None
        assert b is not None
        row |= {f"{name}_s": round(a, 3), f"{name}_replayed_s": round(b, 3)}
        row[f"{name}_difference_percent"] = round(100 * (b / a - 1), 1)
    row |= {"kv_bytes": theirs.num_bytes, "kv_bytes_replayed": ours.num_bytes}
    return row


def draw(rows: Sequence[Row]) -> Figure:
    """Draw each run next to its replay."""
    figure = Figure(figsize=(11, 3.2), layout="constrained")
    names = [row["prefill:decode"] for row in rows]
    titles = {"ttft": "mean TTFT", "tpot": "mean TPOT", "makespan": "makespan"}
    for ax, (name, title) in zip(figure.subplots(1, 3), titles.items(), strict=True):
        for shift, kind, colour in ((-0.2, "", COLOURS[0]), (0.2, "_replayed", COLOURS[1])):
            places = [number + shift for number in range(len(rows))]
            ax.bar(places, [row[f"{name}{kind}_s"] for row in rows], 0.4, color=colour)
            said = "replay" if kind else "run"
            first = (places[0], 0.5 * rows[0][f"{name}_s"])
            ax.text(*first, said, rotation=90, color="white", ha="center", va="center")
        ax.set_xticks(range(len(rows)), names)
        ax.set(xlabel="instances for prefill (P) and decode (D)", ylabel=f"{title} (s)")
        most = max(abs(row[f"{name}_difference_percent"]) for row in rows)
        ax.set_title(f"{title}: at most {most:.1f} % off", loc="left", fontsize=10)
    return figure


def sweep(folder: Path) -> list[Row]:
    """Return a row for each ratio.

    Args:
        folder: folder for the runs, which are always measured again.
    """
    model = write_model(folder / "model")
    # JAX counts devices only once.
    count_cpu_devices(config_of(ratio, model).cluster() for ratio in RATIOS)
    rows = []
    for ratio in RATIOS:
        rows.append(row_of(ratio, folder, REQUESTS, LENGTHS, EVERY_S))
        gc.collect()
    return rows


def swept(rows: Sequence[Row]) -> list[Target]:
    """Return targets for the largest differences between replays and runs."""
    targets = []
    for name in ("makespan", "ttft", "tpot"):
        apart = max(abs(float(row[f"{name}_difference_percent"])) for row in rows)
        claim = f"P:D ratios on emulated groups, {name}: replay beside run, furthest apart (%)"
        targets.append(by_amount(claim, 0, apart, 5, "%", "consistency"))
    return targets
