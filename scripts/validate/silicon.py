"""Make the tables of measured points: as published, without rules, and with one fitted number.

    python -m scripts.validate.silicon --points points.csv --operators FOLDER --out DIR

Each variant is a run of ``jaxinfer check points`` in a folder of its own below DIR, which goes on
where it was cut off. DIR gets ``groups.csv``, ``experts.csv`` (of models with experts),
``ablations.csv``, ``tried.csv`` (what might explain groups that are far off) and ``halves.csv``,
with ``--peer NAME FILE`` of ``peer_estimates.py`` also ``NAME.csv`` and ``NAME_experts.csv``, and
with ``--log`` ``logs.csv``; none has a point's own figures. The number, ``sequence_s``, is fitted
on one half of the points and tested on the other.
"""

import hashlib
import json
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from jaxinfer.errors import JaxinferError
from jaxinfer.lab.validate.points import Point, read_points
from scripts.tables import Row, read_csv, show_table, write_csv

Group = Callable[[Point], bool]
# Engines whose launch scripts and operators are known.
DENSE = ("Llama-3.1-8B", "Llama-3.1-70B", "Qwen3-32B")
WHOLE, REPLICAS = "Qwen3 235B, attention on all GPUs", "Qwen3 235B, attention in replicas"
# Of these, only vLLM on H200 has tables of experts; all other points are refused. Rows do not say
# how many replicas attention has; there are several if experts have more GPUs than attention.
EXPERTS: Mapping[str, Group] = {
    WHOLE: lambda point: _has_experts(point, "Qwen3-235B") and point.attention_dp == 1,
    REPLICAS: lambda point: _has_experts(point, "Qwen3-235B") and point.attention_dp > 1,
    "gpt-oss 120B": lambda point: _has_experts(point, "gpt-oss"),
}
FULL_CARD = "Qwen3 32B, SGLang 0.5.8"
# A point above this takes as long as ten others.
LONGEST = 8191
FITTED = "0.00002"
TRIED = ("0", "0.00001", FITTED, "0.00003")
BUDGETS = (
    "max_num_tokens", "max_num_tokens_then", "max_prefill_tokens", "vllm_budget",
    "inferencex_vllm", "inferencex_trtllm", "batch_wait",
)  # fmt: skip
# For each name: rules that are left out, and values that are set.
VARIANTS: Mapping[str, tuple[Sequence[str], Sequence[str]]] = {
    "as published": ((), ()),
    "one budget of 8,192, chunks for all, no correction": (
        (*BUDGETS, "static_scales"),
        (
            "engine.max_num_batched_tokens=8192",
            "engine.policies.batching=mixed",
            "engine.max_in_flight=2",
            "simulate.tables.quickest_all_reduce=false",
            "simulate.tables.possible_attention=false",
        ),
    ),
    "quantization within products": (("static_scales",), ()),
    "the card's own all-reduces": ((), ("simulate.tables.quickest_all_reduce=false",)),
    "attention that the cards' peaks forbid": (
        (),
        ("simulate.tables.possible_attention=false",),
    ),
    "no small operators": ((), ("simulate.tables.small_operators=false",)),
    "two steps in flight": ((), ("engine.max_in_flight=2",)),
    "no wait of prompts": (("batch_wait",), ()),
    "KV in 16 bits but for InferenceX": (("fp8_kv",), ()),
    "today's budget for 1.0.0rc3": (("max_num_tokens_then",), ()),
    "SGLang's prompts first for all": (("max_prefill_tokens",), ()),
    "tables of 0.5.9 for all SGLang": (("sglang_tables",), ()),
}
# For each group and name: what was left out or set, to see whether it explains the error.
ATTEMPTS: Mapping[tuple[str, str], tuple[Sequence[str], Sequence[str]]] = (
    {
        (FULL_CARD, "as published"): ((), ()),
        # By Little's law, 5.2 requests of 1,024 tokens, or 2.7 of 2,048, are served at once.
        (FULL_CARD, "room for 6,000 tokens"): ((), ("engine.num_pages=375",)),
        (FULL_CARD, "room for 19,200 tokens"): ((), ("engine.num_pages=1200",)),
    }
    | {
        (group, name): asked
        for group in (WHOLE, REPLICAS)
        for name, asked in {
            "as published": ((), ()),
            "experts by their table, of vLLM 0.19": (("expert_blocks",), ()),
            "steps scheduled ahead": (("one_by_one",), ()),
        }.items()
    }
    | {
        ("gpt-oss 120B", name): ((), settings)
        for name, settings in {
            "as published": (),
            "tokens evenly over experts": ("simulate.tables.routing=balanced",),
            "tokens to more experts": ("simulate.tables.routing=power_law_1.01",),
        }.items()
    }
)


@click.command()
@click.option("--points", required=True, type=click.Path(path_type=Path))
@click.option("--operators", required=True)
@click.option("--out", required=True, type=click.Path(path_type=Path))
@click.option(
    "--peer",
    "peers",
    multiple=True,
    nargs=2,
    metavar="NAME FILE",
    help="Another program's figures; repeatable.",
)
@click.option(
    "--log",
    "logs",
    multiple=True,
    nargs=3,
    metavar="REQUESTS RUNFILE OPERATORS",
    help="A log of vLLM's requests, its engine's run file and operators; repeatable.",
)
def main(
    points: Path,
    operators: str,
    out: Path,
    peers: Sequence[tuple[str, str]],
    logs: Sequence[tuple[str, str, str]],
) -> None:
    """Run all variants, and write and print their tables."""
    out.mkdir(parents=True, exist_ok=True)
    dense = choose(points, out / "dense.csv", lambda p: any(n in _model(p) for n in DENSE))
    first = out / "variant0"
    runs = {
        name: run(dense, operators, out / f"variant{number}", first, *asked)
        for number, (name, asked) in enumerate(VARIANTS.items())
    }
    fits = {
        value: run(
            dense, operators, out / f"fit{value}", first, (), (f"simulate.sequence_s={value}",)
        )
        for value in TRIED[1:]
    }
    fits[TRIED[0]] = runs["as published"]
    attempts = try_all(points, operators, out)
    of_experts = {name: attempts[name, "as published"] for name in EXPERTS}
    experts = [each for name, found in of_experts.items() for each in groups(name, found)]
    together = [point for found in of_experts.values() for point in _usable(found)]
    tables = {
        "groups": [*groups("uncalibrated", fits["0"]), *groups("sequence_s fitted", fits[FITTED])],
        "experts": [
            *(each for each in experts if each["group"] != "all"),
            dict.fromkeys(experts[0], "")
            | {"run": "all", "group": "all", "tpot n": len(together)}
            | {"tpot median %": _median_error(together, together, "tpot", "")},
        ],
        "ablations": [
            {"variant": name} | each
            for name, found in runs.items()
            for each in groups("uncalibrated", found)
        ],
        "tried": [
            {"of": group, "changed": name} | row(found) for (group, name), found in attempts.items()
        ],
        "halves": halves(fits),
    }
    for peer, file in peers:
        tables[peer] = beside(peer, Path(file), {"uncalibrated": fits["0"], "fitted": fits[FITTED]})
        tables[f"{peer}_experts"] = [
            {"group": name} | each
            for name, found in of_experts.items()
            for each in beside(peer, Path(file), {"uncalibrated": found})
            if each["engine"] == "all" and each["n"]
        ]
    if logs:
        tables["logs"] = [each for log in logs for each in run_log(*log, out)]
    for name, rows in tables.items():
        write_csv(out / f"{name}.csv", rows)
        print(f"\n{name}:")
        show_table(rows)


def choose(points: Path, path: Path, group: Group) -> Path:
    """Write the points of a group whose outputs are not the longest."""
    rows = [p.row for p in read_points(points) if group(p) and p.osl <= LONGEST]
    write_csv(path, rows)
    return path


def _model(point: Point) -> str:
    return point.row["model_path"]


def _has_experts(point: Point, model: str) -> bool:
    return model in _model(point) and point.group[1:3] == ("h200_sxm", "vllm")


def try_all(points: Path, operators: str, out: Path) -> dict[tuple[str, str], Path]:
    """Try possible explanations for groups with large errors."""
    chosen: dict[str, Group] = {
        **EXPERTS,
        FULL_CARD: lambda p: p.group[2] == "sglang" and p.group[3].startswith("0.5.8"),
    }
    files = {
        name: choose(points, out / f"group{number}.csv", group)
        for number, (name, group) in enumerate(chosen.items())
    }
    found: dict[tuple[str, str], Path] = {}
    for number, ((group, name), asked) in enumerate(ATTEMPTS.items()):
        folder = out / f"tried{number}"
        known = found.get((group, "as published"), folder)
        found[group, name] = run(files[group], operators, folder, known, *asked)
    return found


def run_log(log: str, run_file: str, operators: str, out: Path) -> list[Row]:
    """Return figures of a log of requests, compared with those of its simulation."""
    name = Path(run_file).stem
    command = [sys.executable, "-m", "jaxinfer", "check", "points", log, "--run", run_file]
    _call([*command, "--operators", operators, "--out", str(out / name)])
    summary = json.loads((out / name / "summary.json").read_text(encoding="utf-8"))
    count = summary.pop("requests")
    return [
        {"run": name, "requests": count, "figure": figure, "off %": _percent(found["off"])}
        | {side: round(found[side], 4) for side in ("measured_s", "simulated_s")}
        for figure, found in summary.items()
    ]


def run(
    points: Path,
    operators: str,
    out: Path,
    known: Path,
    without: Iterable[str],
    settings: Iterable[str],
) -> Path:
    """Run or continue one variant; results that it does not change come from ``known``."""
    command = [
        sys.executable,
        "-m",
        "jaxinfer",
        "check",
        "points",
        str(points),
        "--operators",
        operators,
    ]
    command += ["--known", str(known)] if known != out else []
    for rule in (*without, "fitted"):
        command += ["--without", rule]
    for setting in settings:
        command += ["--set", setting]
    _call([*command, "--out", str(out)])
    return out


def _call(command: Sequence[str]) -> None:
    if subprocess.run(command, check=False).returncode:
        raise JaxinferError(f"{command[-1]}: jaxinfer check points has failed")


def groups(name: str, out: Path) -> list[Row]:
    """Return a row per group of a run."""
    summary = json.loads((out / "summary.json").read_text(encoding="utf-8"))
    summary.pop("left_out")
    return [{"run": name, "group": group} | _columns(found) for group, found in summary.items()]


def row(out: Path) -> Row:
    """Return a row for all points of a run."""
    summary = json.loads((out / "summary.json").read_text(encoding="utf-8"))
    return _columns(summary["all"])


def _columns(found: Mapping[str, Any]) -> Row:
    row: Row = {}
    for figure in ("tpot", "ttft", "e2e"):
        each = found[figure]
        row |= {f"{figure} n": each["n"]}
        for name in ("median", "p90", "bias"):
            row[f"{figure} {name} %"] = _percent(each[name])
        row[f"{figure} tau"] = "" if each["tau"] is None else round(each["tau"], 2)
    return row


def halves(fits: Mapping[str, Path]) -> list[Row]:
    """Fit on one half and test on the other, for all engines together and for each."""
    points = {value: _usable(out) for value, out in fits.items()}
    engines = sorted({each["backend"] for each in points["0"]})
    rows = []
    for engine in ["all", *engines]:
        for fitted_on in (0, 1):
            errors = {
                value: [_errors(found, engine, half) for half in (0, 1)]
                for value, found in points.items()
            }
            best = min(errors, key=lambda v: statistics.median(errors[v][fitted_on]))
            tested = 1 - fitted_on
            rows.append(
                {
                    "engine": engine,
                    "fitted on half": fitted_on,
                    "sequence_s": float(best),
                    "n tested": len(errors[best][tested]),
                    "TPOT uncalibrated %": _percent(statistics.median(errors["0"][tested])),
                    "TPOT fitted %": _percent(statistics.median(errors[best][tested])),
                }
            )
    return rows


def beside(peer: str, file: Path, runs: Mapping[str, Path]) -> list[Row]:
    """Return median errors of the peer and of ours, on the points with figures by the peer."""
    theirs = {each["id"]: each for each in read_csv(file) if not each["refused"]}
    ours = {name: {each["id"]: each for each in _usable(out)} for name, out in runs.items()}
    rows = []
    for engine in ["all", *sorted({each["backend"] for each in _usable(runs["uncalibrated"])})]:
        for figure in ("tpot", "ttft", "e2e"):
            row: Row = {"engine": engine, "figure": figure}
            for name, points in ours.items():
                chosen = [
                    each
                    for id, each in points.items()
                    if id in theirs
                    and engine in ("all", each["backend"])
                    and (figure == "tpot" or each["usable"] == "both")
                ]
                row["n"] = len(chosen)
                row[f"{name} %"] = _median_error(chosen, chosen, figure, "")
                others = [theirs[each["id"]] for each in chosen]
                row[f"{peer} %"] = _median_error(chosen, others, figure, "")
            rows.append(row)
    return rows


def _median_error(
    measured: Sequence[Row], predicted: Sequence[Row], figure: str, prefix: str
) -> float | str:
    """Return the median absolute error of a figure, in percent."""

    def milliseconds(found: Row, point: Row, of: str) -> float:
        if figure != "e2e":
            return float(found[f"{of}{figure}_ms"])
        ttft, tpot = (float(found[f"{of}{name}_ms"]) for name in ("ttft", "tpot"))
        return ttft + (point["osl"] - 1) * tpot

    errors = [
        abs(milliseconds(found, point, prefix) / milliseconds(point, point, "silicon_") - 1)
        for point, found in zip(measured, predicted, strict=True)
    ]
    return _percent(statistics.median(errors)) if errors else ""


def _usable(out: Path) -> list[Row]:
    return [each for each in read_csv(out / "points.csv") if each["usable"]]


def _errors(points: Sequence[Row], engine: str, half: int) -> list[float]:
    """Return errors of TPOT of an engine's points in one half, chosen by a digest of their ids."""
    return [
        abs(each["tpot_ms"] / each["silicon_tpot_ms"] - 1)
        for each in points
        if engine in ("all", each["backend"])
        and hashlib.sha256(str(each["id"]).encode()).digest()[0] % 2 == half
    ]


def _percent(share: float | None) -> float | str:
    return "" if share is None else round(100 * share, 1)


if __name__ == "__main__":
    main()
