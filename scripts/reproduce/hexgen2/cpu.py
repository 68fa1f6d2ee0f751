"""HexGen-2's plans for groups of this machine's CPU, run for real: planned and real rates.

The plan file is configs/plan/hexgen2_cpu.yaml, with the figures of a profile of this machine (see
``plan_cpu.py``). It is planned for three mixes of lengths. Requests are served by each plan, and by
the same groups with swapped roles. All requests are present at the start.
"""

import gc
import random
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path
from typing import Any

from jaxinfer.config.run_file import RunFile, as_run_file
from jaxinfer.lab.plan.problem import Problem, load_problem
from jaxinfer.llm import LLM
from jaxinfer.papers.hexgen2.capacity import GroupRole
from jaxinfer.papers.hexgen2.certify import Certified
from jaxinfer.papers.hexgen2.flow import KVNetwork, shared_flow
from jaxinfer.papers.hexgen2.gpus import Site
from jaxinfer.papers.hexgen2.moves import as_plan
from jaxinfer.papers.hexgen2.refine import Effort, Scorer
from jaxinfer.report.records import read_lines
from jaxinfer.report.run_folder import run_folders
from jaxinfer.request import RequestOutput, SamplingParams
from jaxinfer.runtime.stage.devices import count_cpu_devices
from jaxinfer.simulate.run import simulate
from jaxinfer.workload.lengths import BenchRequest, read_workload, synthetic_tokens
from scripts.reproduce.claims import Target, agrees, by_share
from scripts.reproduce.hexgen2.plan_cpu import PLAN
from scripts.reproduce.hexgen2.plan_cpu import real as on_cpu
from scripts.reproduce.hexgen2.runs import planner_of, requests_s
from scripts.tables import Row

# Lengths at which prompts and answers take about equally long, prompts take longer, and answers
# take longer.
FILES = {"both": "bursts", "prompts": "prefill_heavy", "answers": "one_burst"}
# Lengths for which the two roles have unlike groups in the plan.
SWAPPED = ("prompts", "answers")
OTHER: dict[GroupRole, GroupRole] = {"prefill": "decode", "decode": "prefill"}
# About the seconds of a run; each length of the file is used at least twice.
SECONDS, TIMES = 170.0, 2


@dataclass(frozen=True)
class CpuCase:
    """A plan for some lengths.

    Attributes:
        name: name of the case.
        problem: the planner's problem.
        flow: planned requests per second.
        part: the planned part of a run file.
        words: its prefill groups and its decode groups.
    """

    name: str
    problem: Problem
    flow: float
    part: dict[str, Any]
    words: tuple[str, str]

    @property
    def work(self) -> list[BenchRequest]:
        """Return the file's lengths several times, in random order, all at the start."""
        file = [replace(item, arrival=0.0) for item in self.problem.work]
        times = max(ceil(self.flow * SECONDS / len(file)), TIMES)
        return random.Random(0).sample(times * file, times * len(file))

    @property
    def config(self) -> RunFile:
        """Return the run file for emulated groups of the CPU."""
        return as_run_file(on_cpu(self.part, self.problem.run_file(self.part)))

    def simulated(self) -> float:
        """Return the requests per second with the costs of the plan."""
        config = as_run_file(self.problem.run_file(self.part))
        return requests_s(simulate(config, self.work))


def cases() -> dict[str, CpuCase]:
    """Return our planner's plans by name, some also with swapped roles."""
    found = {}
    for name, file in FILES.items():
        work = read_workload(f"configs/cpu/{file}.csv")
        problem = load_problem(PLAN).for_work(work, 1.0)
        planner = planner_of(problem)
        capacity = planner.capacity(problem)
        plans = {name: planner.certified(problem)}
        if name in SWAPPED:
            network = KVNetwork(capacity.site, capacity.layer_bytes)
            scorer = Scorer(capacity, network, shared_flow, Effort(1, 1))
            swapped = as_plan((group, OTHER[role]) for group, role in plans[name].plan)
            plans[f"{name}, swapped"] = replace(
                plans[name], plan=swapped, groups=scorer.placed(swapped), flow=scorer.flow(swapped)
            )
        for called, plan in plans.items():
            part = dict(planner.candidate(problem, plan).part)
            words = groups_of(capacity.site, plan)
            found[called] = CpuCase(called, problem, plan.flow.total, part, words)
    return found


def groups_of(site: Site, plan: Certified) -> tuple[str, str]:
    """Return the groups of each role that requests go through: ``quick, slow + slow``."""
    used = [plan.groups[number] for number in sorted({i for pair in plan.flow.pairs for i in pair})]
    return tuple(  # type: ignore[return-value]
        ", ".join(
            " + ".join(site.names[node] for node, *_ in placed.layers(site))
            for placed in used
            if placed.role == role
        )
        for role in OTHER
    )


def serve(case: CpuCase, folder: Path) -> None:
    """Serve the requests for real."""
    llm = LLM.from_config(case.config, progress=False)
    requests = []
    for index, item in enumerate(case.work):
        params = SamplingParams(temperature=0, max_tokens=item.max_tokens, ignore_eos=True)
        prompt = synthetic_tokens(item.prompt_len, llm.vocab_size, seed=index)
        requests += llm.make_requests(str(index), prompt, params)

    def check(output: RequestOutput) -> None:
        assert not output.error, output.error

    llm.run(requests, check, run_dir=folder, progress=False)


def row_of(case: CpuCase, folder: Path) -> Row:
    """Return the row of a run, compared with its plan."""
    run = read_lines(run_folders(folder)[-1]).run
    found = run["metrics"]["steady_requests_s"]
    lengths = [(item.prompt_len, item.max_tokens) for item in case.problem.work]
    prompt, output = (sum(each) / len(lengths) for each in zip(*lengths, strict=True))
    prefill, decode = case.words
    return {
        "lengths": case.name,
        "prompt": round(prompt),
        "output": round(output),
        "prefill": prefill,
        "decode": decode,
        "requests": run["metrics"]["requests"],
        "planned (requests/s)": round(case.flow, 3),
        "simulated": round(case.simulated(), 3),
        "real": round(found, 3),
        "real by planned (%)": round(100 * (found / case.flow - 1), 1),
        "steps late by (s)": round(sum(each["seconds"] for each in run["overruns"].values()), 1),
    }


def targets_of(rows: Sequence[Row]) -> list[Target]:
    """Return targets for plans' flows, and for planned roles compared with swapped ones."""
    by_name = {row["lengths"]: row for row in rows}
    shares = [by_name[name]["real"] / by_name[name]["planned (requests/s)"] for name in FILES]
    furthest = max(shares, key=lambda share: abs(share - 1))
    pairs = [(by_name[name]["real"], by_name[f"{name}, swapped"]["real"]) for name in SWAPPED]
    return [
        by_share("real: requests/s by planned, the plan that is furthest off", 1, furthest, 0.1,
                 "consistency"),
        agrees("real: the planned roles carry more than swapped ones",
              ", ".join(f"{ours:g} for {other:g} requests/s" for ours, other in pairs),
              all(ours > other for ours, other in pairs), "more, in each pair"),
    ]  # fmt: skip


def real(folder: Path) -> tuple[list[Row], list[Target]]:
    """Return the row of each plan's run.

    Args:
        folder: folder for the runs. A run takes three to five minutes, without anything else on the
            machine. Runs that the folder already has are not repeated.
    """
    known = cases()
    folders = {name: folder / name.replace(", ", "_") for name in known}
    missing = [name for name in known if not folders[name].is_dir()]
    count_cpu_devices(known[name].config.cluster() for name in missing)
    for name in missing:
        unfinished = folders[name].with_suffix(".unfinished")
        shutil.rmtree(unfinished, ignore_errors=True)
        serve(known[name], unfinished)
        unfinished.rename(folders[name])
        gc.collect()
    rows = [row_of(case, folders[name]) for name, case in known.items()]
    return rows, targets_of(rows)
