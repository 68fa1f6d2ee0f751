"""Workers of several kinds by dollars: the planner's mixes, and Aladdin's rule."""

import math
import random
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

import yaml

from jaxinfer.config.run_file import load_run_file
from jaxinfer.errors import JaxinferError
from jaxinfer.files.kept import KeptResults
from jaxinfer.lab.plan.problem import load_problem
from jaxinfer.lab.plan.search import DrivenSearch
from jaxinfer.papers.aladdin.best_fit import Job, Limits, WorkerAccount
from jaxinfer.papers.aladdin.planner import AladdinPlanner, AladdinPlannerOptions
from jaxinfer.simulate.cluster import fit_instance
from jaxinfer.simulate.run import prepare
from scripts.reproduce.aladdin.packing import by_rule, in_order, least_usd
from scripts.reproduce.aladdin.runs import draw
from scripts.reproduce.claims import Target, agrees
from scripts.reproduce.reproduction import Work
from scripts.tables import CONFIGS, Row

PLAN = CONFIGS / "plan" / "aladdin_unlike.yaml"
FILE = CONFIGS / "aladdin" / "unlike.yaml"
# Limits of the seconds to the first token, and between tokens. Looser limits can be met by more
# small GPUs.
LEVELS = ((0.8, 0.03), (1.6, 0.06), (4.0, 0.2))
REQUESTS, MOST = 500, 10
KINDS = ("large", "middle", "small")


def cheapest(
    work: Work, out: Path, seeds: Sequence[int], simulated: KeptResults
) -> tuple[list[Row], list[Target]]:
    """Return dollars of each kind alone and of the cheapest mix, by level of the targets."""
    rows = _cheapest_of_all(work, out, seeds, simulated)
    mixes = [row["mix ($/h)"] for row in rows]
    alone = [min(_usd(row[f"{name} ($/h)"]) for name in KINDS) for row in rows]
    pairs = list(zip(mixes, alone, strict=True))
    met = all(_usd(mix) <= each + 1e-9 for mix, each in pairs)
    less = sum(_usd(mix) < each - 1e-9 for mix, each in pairs)
    says = f"cheaper in {less} of {len(rows)}, dearer in none" if met else "dearer in some"
    claim = "mix of A100, L40 and A6000: dollars, against the cheapest kind alone"
    return rows, [agrees(claim, says, met, "never dearer")]


def _cheapest_of_all(
    work: Work, out: Path, seeds: Sequence[int], simulated: KeptResults
) -> list[Row]:
    rows = []
    data = yaml.safe_load(FILE.read_text(encoding="utf-8"))
    kinds = {name: each["group"] for name, each in data["instances"].items()}
    choices = [[name] for name in kinds] + [list(kinds)]
    for ttft, atgt in LEVELS:
        data["system"] |= {"ttft_s": ttft, "atgt_s": atgt}
        for seed in seeds:
            row: Row = {"first token (s)": ttft, "gap (ms)": round(1000 * atgt), "seed": seed}
            for names in choices:
                path = out / f"unlike_{'_'.join(names)}.yaml"
                part = data | {
                    "groups": {kinds[name]: data["groups"][kinds[name]] for name in names},
                    "instances": {name: data["instances"][name] for name in names},
                }
                path.write_text(yaml.safe_dump(part), encoding="utf-8")
                label = names[0] if len(names) == 1 else "mix"
                row |= _cheapest(path, label, (ttft, atgt), draw(work, seed, REQUESTS), simulated)
            rows.append(row)
    return rows


def _usd(found: float | str) -> float:
    return math.inf if isinstance(found, str) else found


def _cheapest(
    path: Path, label: str, slo: tuple[float, float], work: Work, simulated: KeptResults
) -> Row:
    settings = [f"goal.slo='ttft={slo[0]},tpot={slo[1]}'"]
    problem = load_problem(PLAN, settings).for_work(work, 1.0)
    search = DrivenSearch(problem, kept=simulated)
    try:
        best = AladdinPlanner(AladdinPlannerOptions(file=str(path), most=MOST)).plan(
            search.problem, search
        )
    except JaxinferError:
        return {f"{label} ($/h)": "none", label: ""}
    usd = search.costs(best).amount("usd")
    one = "workers" in best.axes
    counts = [best.axes["workers"]] if one else list(best.axes.values())
    return {f"{label} ($/h)": round(usd, 2), label: " + ".join(map(str, counts))}


def small_cases(
    work: Work, level: tuple[float, float], count: int
) -> tuple[list[Row], list[Target]]:
    """Compare Aladdin's rule with the cheapest packing, for four workers and eight requests."""
    rows = _small_cases(work, level, count)
    ours, first = (row["mean above (%)"] for row in rows)
    claim = f"eight requests, four unlike workers, {level[0]:g} s: dollars above the best packing"
    says = f"{ours} % ({first} % by first fit)"
    return rows, [agrees(claim, says, ours < first, "less than first fit")]


def _small_cases(work: Work, level: tuple[float, float], count: int) -> list[Row]:
    rng = random.Random(0)
    kinds = workers(level)
    long = [item for item in work if item.prompt_len + item.max_tokens >= 1500]
    gaps: dict[str, list[float]] = {"Aladdin's rule": [], "first fit, as they come": []}
    unserved = dict.fromkeys(gaps, 0)
    for _ in range(count):
        off = [
            WorkerAccount(str(n), each.limits, usd=each.usd)
            for n, each in enumerate(rng.choices(kinds, k=4))
        ]
        jobs = [
            Job(
                str(n),
                each.prompt_len,
                each.prompt_len + each.max_tokens - 1,
                each.max_tokens,
                each.max_tokens,
            )
            for n, each in enumerate(rng.sample(long, 8))
        ]
        least = least_usd(jobs, off)
        if least is None:
            continue
        for name, rule in zip(gaps, (by_rule, in_order), strict=True):
            found = rule(jobs, off)
            if found is None:
                unserved[name] += 1
            else:
                gaps[name].append(100 * (found / least - 1))
    return [
        {
            "opened": name,
            "cases": len(each) + unserved[name],
            "not all served": unserved[name],
            "at the least dollars": sum(gap < 1e-6 for gap in each),
            "mean above (%)": round(fmean(each), 1),
            "most (%)": round(max(each), 1),
        }
        for name, each in gaps.items()
    ]


def workers(level: tuple[float, float]) -> list[WorkerAccount]:
    """Return one worker of each kind, with its price and the limits that a run gives it."""
    prices = load_problem(PLAN).prices
    config = load_run_file(FILE)
    cluster = prepare(config)
    theta, found = config.system["theta"], []
    for name, modelled in cluster.instances.items():
        fit = fit_instance(modelled, relative=True)
        assert fit.decode
        limits = Limits(fit.prefill, fit.decode, *level, theta, 0.5, modelled.num_tokens, 16)
        kind = str(config.groups[modelled.groups[0]].kind)
        found.append(WorkerAccount(name, limits, usd=prices[kind]))
    return found
