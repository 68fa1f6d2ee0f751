"""Plan HexGen-2 for slowed-down groups of this machine's CPU, and write the run file.

    jaxinfer profile configs/cpu/hexgen2.yaml --out runs/profile
    python -m scripts.reproduce.hexgen2.plan_cpu --quick PROFILE.json --slow PROFILE.json
    python -m scripts.reproduce.hexgen2.plan_cpu

Run these from the repository's root. The first command measures, and prints the files of its
profiles. The second puts two of these profiles into configs/plan/hexgen2_cpu.yaml: of an instance
on a quick group (prefill0), and of one on slow groups (prefill1). The third plans, and writes
configs/cpu/hexgen2.yaml.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click
import yaml

from jaxinfer.config.resolve import resolve
from jaxinfer.config.run_file import as_run_file, load_run_file
from jaxinfer.config.site import model_site
from jaxinfer.lab.plan.problem import load_problem
from jaxinfer.serving.step_fit import least_squares
from jaxinfer.simulate.cluster import model_cluster
from jaxinfer.steps.profile import Profile, read_profile
from jaxinfer.steps.times import work_of_parts
from scripts.reproduce.hexgen2.runs import planner_of

PLAN, RUN = Path("configs/plan/hexgen2_cpu.yaml"), Path("configs/cpu/hexgen2.yaml")
MODEL = "smollm2-135m-instruct"
# Factor by which a group of each node is slower than this machine.
SLOWDOWNS = {"quick": 6, "slow": 16}
KINDS = {"quick": "quick-cpu", "slow": "slow-cpu"}
CHUNK = 128
# As in configs/cpu/single.yaml.
ENGINE = {
    "max_model_len": 1024,
    "page_size": 32,
    "max_num_seqs": 16,
    "enable_prefix_caching": False,
    "max_num_batched_tokens": CHUNK,
    "token_buckets": [64, 96, CHUNK],
}
HEADING = """\
# HexGen-2 on six groups of this machine's CPU, two of them slowed down less than the other four,
# none of which holds the model: which prefill, which decode, with which layers, and the flows
# between them are those of `jaxinfer plan configs/plan/hexgen2_cpu.yaml`, which plans from a
# profile. Written by scripts/reproduce/hexgen2/plan_cpu.py.
"""


def phases(profile: Profile, slower: Sequence[float]) -> dict[str, Any]:
    """Return Cronus' eq. 3 for full chunks, and decodes by the padded number of rows.

    A chunk of C tokens after s entries adds C (2 s + C) pairs.
    """
    mixed = profile.fit(slower).mixed
    pair_s = max(mixed.per_prefill_context, 0.0) / (2 * CHUNK)
    token_s = (mixed.constant - pair_s * CHUNK**2) / CHUNK
    return {
        "prefill": _short({"token_s": token_s, "pair_s": pair_s}),
        "decode": decodes(profile, slower),
        "share_step": True,
    }


def decodes(profile: Profile, slower: Sequence[float]) -> list[dict[str, float]]:
    """Return Aladdin's eq. 3 for each padded number of rows.

    A step with fewer rows takes as long as one with the next larger padded number.
    """
    by_rows: defaultdict[int, list[tuple[tuple[float, ...], float]]] = defaultdict(list)
    for point in profile.points:
        if not (work := work_of_parts(point.parts)).chunks:
            seconds = sum(a * b for a, b in zip(point.stages, slower, strict=True))
            by_rows[work.singles].append(((work.single_context, 1.0), seconds))
    found = []
    for rows, points in sorted(by_rows.items()):
        fitted = least_squares(points, relative=True)
        assert fitted
        below = {"below": rows + 1} if rows < max(by_rows) else {}
        found.append(below | _short(dict(zip(("context_s", "step_s"), fitted, strict=True))))
    return found


def _short(costs: Mapping[str, float]) -> dict[str, float]:
    return {name: float(f"{max(value, 0.0):.4g}") for name, value in costs.items()}


def write_plan(profiles: Mapping[str, Profile]) -> None:
    """Write the plan file with the measurements of each node's groups."""
    data = yaml.safe_load(PLAN.read_text(encoding="utf-8"))
    measured = {}
    for node, profile in profiles.items():
        slower = [float(SLOWDOWNS[node])] * len(profile.points[0].stages)
        measured[KINDS[node]] = {"phases": phases(profile, slower)}
    data["planner"]["measured"] = measured
    comments = [line for line in PLAN.read_text().splitlines(True) if line.startswith("#")]
    PLAN.write_text("".join(comments) + as_text(data), encoding="utf-8")


def section(name: str, value: Any) -> str:
    """Format a section of a run file, with a line for each group, link and instance."""
    if isinstance(value, str):
        return f"{name}: {value}\n"
    if isinstance(value, list):
        return f"{name}:\n" + "".join(f"  - {in_line(each)}\n" for each in value)
    if name in ("groups", "instances"):
        return f"{name}:\n" + "".join(f"  {key}: {in_line(each)}\n" for key, each in value.items())
    return f"{name}: {in_line(value)}\n"


def in_line(value: Any) -> str:
    """Format a value as YAML in one line or a few."""
    text = yaml.safe_dump(value, sort_keys=False, default_flow_style=True, width=88)
    return text.strip().replace("\n", "\n    ")


def as_text(data: dict[str, Any]) -> str:
    """Format a value as YAML in short lines."""
    return yaml.safe_dump(data, sort_keys=False, default_flow_style=None, width=100)


def real(part: dict[str, Any], run: dict[str, Any]) -> dict[str, Any]:
    """Return a planned part as a run file of emulated CPU groups."""
    modelled = model_cluster(model_site(resolve(as_run_file(run)))).instances
    nodes = {name: costs["node"] for name, costs in part["simulate"]["groups"].items()}
    groups = {
        name: {"platform": "cpu", "emulate": {"slowdown": SLOWDOWNS[node]}}
        for name, node in nodes.items()
    }
    instances = {
        # As many pages as fit into the memory of the plan.
        name: {**instance, "num_pages": min(min(modelled[name].num_pages), 320)}
        for name, instance in part["instances"].items()
    }
    names = list(groups)
    links = [
        {"between": [a, b], "gb_s": 1, "latency_s": 0.001}
        for number, a in enumerate(names)
        for b in names[number + 1 :]
    ]
    return {
        "model": MODEL,
        "engine": ENGINE,
        "groups": groups,
        "links": links,
        "instances": instances,
        "system": part["system"],
        "workload": {"trace": "configs/cpu/bursts.csv"},
    }


def write_run() -> None:
    """Write the plan as a run file."""
    problem = load_problem(PLAN)
    planner = planner_of(problem)
    candidate = planner.candidate(problem, planner.certified(problem))
    data = real(dict(candidate.part), problem.run_file(candidate.part))
    RUN.write_text(HEADING + "".join(section(*each) for each in data.items()), encoding="utf-8")
    load_run_file(RUN)
    print(candidate)


@click.command()
@click.option("--quick", type=click.Path(exists=True, path_type=Path), help="Of a quick group.")
@click.option("--slow", type=click.Path(exists=True, path_type=Path), help="Of slow groups.")
def main(quick: Path | None, slow: Path | None) -> None:
    """Update the plan file, or plan."""
    if bool(quick) != bool(slow):
        raise click.UsageError("--quick and --slow: give both, or none to plan")
    if quick and slow:
        write_plan({"quick": read_profile(quick), "slow": read_profile(slow)})
    else:
        write_run()


if __name__ == "__main__":
    main()
