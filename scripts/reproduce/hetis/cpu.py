"""Hetis on this machine's CPU, for real: the places of heads during a burst, and their moves.

The run file is configs/cpu/hetis.yaml. One device has the layers of the demo model, and two slower
ones have only KV heads.
"""

import gc
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import yaml
from matplotlib.figure import Figure

from jaxinfer.config.run_file import RunFile, as_run_file
from jaxinfer.llm import LLM
from jaxinfer.report.records import RunLines, read_lines
from jaxinfer.report.run_folder import run_folders
from jaxinfer.request import RequestOutput, SamplingParams
from jaxinfer.runtime.stage.devices import count_cpu_devices
from jaxinfer.workload.lengths import BenchRequest, synthetic_tokens
from scripts.reproduce.claims import Target, agrees
from scripts.reproduce.hetis.pictures import draw_heads
from scripts.tables import CONFIGS, Row

FILE = CONFIGS / "cpu" / "hetis.yaml"
DEVICES = ("primary", "near", "far")
# A number of pages so small that requests reach the pool's end, and a Theta by which none moves for
# time.
SMALL, NEVER = 6, 1000.0


@dataclass(frozen=True)
class Served:
    """A run's files, and the tokens of its requests."""

    lines: RunLines
    tokens: Mapping[str, Sequence[int]]

    @property
    def heads(self) -> list[list[int]]:
        """Number of heads on each device, for each step."""
        return [step["heads"] for step in self.lines.steps]

    @property
    def preemptions(self) -> int:
        """Number of preemptions of all requests."""
        return int(self.lines.run["metrics"]["preemptions"])


def cases() -> dict[str, RunFile]:
    """Return the cases: as it is, one device, a near device that is soon full, and halves."""
    as_it_is = yaml.safe_load(FILE.read_text(encoding="utf-8"))
    single = as_it_is | {
        "groups": {"primary": {"platform": "cpu"}},
        "instances": {"engine": {"group": "primary", "num_pages": 320}},
        "system": "single",
    }
    found = {"hetis": as_it_is, "single": single}
    (stage,) = as_it_is["instances"]["engine"]["stages"]
    near, *others = stage["attention"]
    full = [{"group": "primary", "attention": [near | {"num_pages": SMALL}, *others]}]
    found["near is full"] = as_it_is | {
        "instances": {"engine": as_it_is["instances"]["engine"] | {"stages": full}},
        "system": {"name": as_it_is["system"], "theta": NEVER},
    }
    halves = as_it_is["instances"]["engine"] | {"half_batches": "always"}
    found["as halves"] = as_it_is | {"instances": {"engine": halves}}
    return {name: as_run_file(each) for name, each in found.items()}


def serve(llm: LLM, work: Sequence[BenchRequest], folder: Path) -> Served:
    """Serve the requests with greedy sampling; all are present at the start."""
    requests, tokens = [], {}
    for index, item in enumerate(work):
        params = SamplingParams(temperature=0, max_tokens=item.max_tokens, ignore_eos=True)
        prompt = synthetic_tokens(item.prompt_len, llm.vocab_size, seed=index)
        requests += llm.make_requests(str(index), prompt, params)

    def keep(output: RequestOutput) -> None:
        assert not output.error, output.error
        tokens[output.request_id] = list(output.outputs[0].token_ids)

    llm.run(requests, keep, run_dir=folder, progress=False)
    return Served(read_lines(run_folders(folder)[-1]), tokens)


def median_s(run: Served) -> float:
    """Return the median seconds of the larger steps without prompts.

    A step counts if it has at least half as many decodes as the largest one.
    """
    steps = [step for step in run.lines.steps if not step["prefill_tokens"]]
    most = max(step["decode_tokens"] for step in steps)
    return statistics.median(
        step["end"] - step["start"] for step in steps if 2 * step["decode_tokens"] >= most
    )


def row(name: str, run: Served) -> Row:
    """Return the row of a run."""
    metrics, most = run.lines.run["metrics"], max(run.heads, key=sum)
    moves = metrics["slice_moves"]
    return {
        "run": name,
        "requests": metrics["requests"],
        "preemptions": run.preemptions,
        "seconds": round(metrics["wall_s"], 1),
        "ms a decode step": round(1e3 * median_s(run), 1),
        "steps as halves": sum("halves" in step for step in run.lines.steps),
        "peak pages": metrics["peak_pages"],
        "moves": moves["begun"],
        "moved (MB)": round(moves["num_bytes"] / 1e6, 1),
        **run.lines.run["system_report"],
        **{
            f"heads on {device} at most": max(step[i] for step in run.heads)
            for i, device in enumerate(DEVICES)
        },
        "at the step with most": " / ".join(map(str, most)),
    }


def moved_while_it_decodes(run: Served, prompts: Mapping[str, int]) -> Sequence[str]:
    """Return requests with heads that left the near device after the prompt was done.

    A move sends full pages first, and then the rest. Further transfers of the same heads belong to
    the same move.
    """
    found, last = set[str](), dict[str, tuple[Any, int]]()
    for part in run.lines.transfers:
        name, moves = part["request"], part["moves"]
        before, tokens = last.get(name, (None, 0))
        tokens = part["tokens"] + (tokens if before == moves else 0)
        last[name] = moves, tokens
        if tokens > prompts[name] and any(source == 1 for source, _, _ in moves):
            found.add(name)
    return sorted(found)


def check(runs: Mapping[str, Served], own_pages: int, prompts: Mapping[str, int]) -> list[Target]:
    """Return the claims about real runs."""
    burst, alone, moved = runs["hetis"], runs["one request"], runs["near is full"]
    most = max(burst.heads, key=sum)
    mean = [sum(step[i] for step in burst.heads) / len(burst.heads) for i in range(len(DEVICES))]
    peak = burst.lines.run["metrics"]["peak_pages"]
    left = moved_while_it_decodes(moved, prompts)
    same = sum(burst.tokens[name] == tokens for name, tokens in runs["single"].tokens.items())
    also = sum(moved.tokens[name] == tokens for name, tokens in runs["single"].tokens.items())
    cut = sum(
        runs["as halves"].tokens[name] == tokens for name, tokens in runs["single"].tokens.items()
    )
    return [
        agrees("real: tokens are those of one device",
              f"{same}, {also} and, as halves, {cut} of {len(prompts)} requests",
              same == also == cut == len(prompts), "all equal"),
        agrees("real: a request alone stays on the device with the layers",
              f"heads elsewhere in {sum(any(step[1:]) for step in alone.heads)} steps",
              not any(any(step[1:]) for step in alone.heads), "all heads, in all steps"),
        agrees("real: under a burst heads spread, and the slower device has fewer",
              f"{' / '.join(map(str, most))} at the step with most, "
              f"{' / '.join(f'{each:.1f}' for each in mean)} in the mean",
              mean[0] > mean[1] > mean[2] > 0, "the slower, the fewer in the mean"),
        agrees("real: 1.9 times the own tokens are held without a preemption",
              f"{peak / own_pages:.2f}, {burst.preemptions}",
              peak >= 1.9 * own_pages and not burst.preemptions, "1.9 or more, 0"),
        agrees("real: a long request on a full device is moved and not preempted",
              f"{len(left)} of them moved, {moved.preemptions} preemptions",
              bool(left) and not moved.preemptions, "moved, 0"),
    ]  # fmt: skip


def real() -> tuple[list[Row], list[Row], list[Target]]:
    """Run all cases for real; return the heads on each device by step of the burst, and claims."""
    configs = cases()
    count_cpu_devices(config.cluster() for config in configs.values())
    work = list(configs["hetis"].requests())
    runs: dict[str, Served] = {}
    for name, config in configs.items():
        llm = LLM.from_config(config, progress=False)
        with TemporaryDirectory() as folder:
            runs[name] = serve(llm, work, Path(folder))
            if name == "hetis":
                runs["one request"] = serve(llm, work[:1], Path(folder))
        print(f"{name}: {runs[name].preemptions} preemptions", flush=True)
        del llm
        gc.collect()
    rows = [row(name, run) for name, run in runs.items() if name != "single"]
    heads = [
        {"seconds": step["start"]} | dict(zip(DEVICES, step["heads"], strict=True))
        for step in runs["hetis"].lines.steps
    ]
    engine = configs["hetis"].instances["engine"]
    assert engine.num_pages
    prompts = {str(index): item.prompt_len for index, item in enumerate(work)}
    kv_heads = runs["hetis"].lines.run["instances"]["engine"]["kv_heads"][0]
    return rows, heads, check(runs, (engine.num_pages - 1) * kv_heads, prompts)


def draw_real(heads: Sequence[Row]) -> Figure:
    """Draw the heads on each device during the burst."""
    names = {
        "primary": "device with the layers",
        "near": "2 times slower device",
        "far": "8 times slower device",
    }
    return draw_heads(heads, names, "The demo model on three CPU devices, 25 requests at once")
