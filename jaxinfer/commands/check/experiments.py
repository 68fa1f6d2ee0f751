"""``jaxinfer check points`` for experiments with several load stages and other simulators."""

import json
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from rich.console import Console

from jaxinfer.commands.common import cores, counted, kept_results, say
from jaxinfer.commands.figures import print_json
from jaxinfer.errors import JaxinferError

# What keeps the figures of a folder.
_FOUND = "found.jsonl"
ABOUT = "experiments.yaml"


def validate_experiments(
    path: Path,
    operators: str,
    out: str,
    about: str,
    jobs: int | None,
    own: Mapping[str, Any],
    as_json: bool = False,
) -> None:
    """Simulate the experiments of a file, and write and print the errors of all simulators.

    Args:
        operators: folder of tables.
        about: file that describes how the experiments were run.
        own: values of run files by dotted keys; they take precedence over all others.
        as_json: print the errors as JSON instead of a table.
    """
    from jaxinfer.files.contents import contents
    from jaxinfer.files.kept import key_of
    from jaxinfer.lab.plan.result import write_table
    from jaxinfer.lab.validate.experiments import (
        ALL_STAGES,
        Experiments,
        ExperimentSetup,
        StageRow,
        read_experiments,
        set_up,
    )
    from jaxinfer.lab.validate.scoreboard import (
        ScoredRow,
        predict_experiment,
        score,
        show_scores,
    )
    from jaxinfer.report.progress import CountProgress

    rules, rows = Experiments.read(about), read_experiments(path)
    said = {"rules": rules.model_dump(mode="json"), "set": dict(own)}
    tables = contents({"folder": operators} | said)
    files = contents({"trace": str(path)}) | tables
    asked = said | {"files": files}
    several: dict[str, list[StageRow]] = {}
    stages: dict[str, set[int]] = {}
    for row in rows:
        if not row.wrong:
            several.setdefault(row.experiment, []).append(row)
        if row.stage != ALL_STAGES:
            stages.setdefault(row.experiment, set()).add(row.stage)
    with kept_results(out, "validate.json", json.dumps(asked, indent=2), _FOUND) as (folder, kept):
        found: dict[str, Mapping[str, Any]] = {}
        todo: dict[str, tuple[str, ExperimentSetup]] = {}
        for name, its in several.items():
            try:
                setup = set_up(rules, its[0], stages.get(name, set()), operators, own)
            except JaxinferError as error:
                found[name] = {"refused": str(error)}
                continue
            loads = [list(load) for load in setup.loads]
            sent = [setup.prompt, setup.output, loads, repr(setup.prompts)]
            key = key_of({**setup.data, "loads": sent}, None, tables)
            known = kept.get(key)
            if known is None:
                todo[name] = key, setup
            else:
                found[name] = known
        at = nullcontext((map, 1)) if jobs == 1 or not todo else cores(None, jobs)
        with at as (map_setups, _), CountProgress("experiments", len(todo)) as bar:
            setups = [setup for _, setup in todo.values()]
            each_found = map_setups(predict_experiment, setups)
            for (name, (key, _)), figures in zip(todo.items(), each_found, strict=True):
                if "refused" not in figures:
                    kept.add(key, figures)
                found[name] = figures
                bar.advance(name)
        scored = [_scored(ScoredRow, row, found) for row in rows]
        if not any(each.ours for each in scored):
            for line in _why_lines(scored):
                say(line)
            say(f"jaxinfer: {path}: none of {counted(len(several), 'experiment')} can be simulated")
            sys.exit(1)
        scores = score(scored)
        write_table(folder / "points.csv", [each.cells for each in scored])
        summary = {"figures": scores, "left_out": _left_out(scored)}
        text = json.dumps(summary, indent=2)
        (folder / "summary.json").write_text(text + "\n", encoding="utf-8")
    if as_json:
        print_json(summary)
        return
    console = Console(width=None if sys.stdout.isatty() else 170)
    console.print(show_scores(scores))
    for line in _why_lines(scored):
        console.print(line, soft_wrap=True, markup=False, highlight=False)
    console.print(f"points and errors: {folder}{os.sep}", markup=False)


def _scored(kind: Any, row: Any, found: Mapping[str, Mapping[str, Any]]) -> Any:
    if row.wrong:
        return kind(row, {}, row.wrong)
    figures = found[row.experiment]
    if "refused" in figures:
        return kind(row, {}, figures["refused"])
    return kind(row, figures[str(row.stage)])


def _left_out(scored: Sequence[Any]) -> dict[str, list[str]]:
    """The experiments of rows without figures, by the reason."""
    found: dict[str, list[str]] = {}
    for each in scored:
        if each.why and each.row.experiment not in found.setdefault(each.why, []):
            found[each.why].append(each.row.experiment)
    return found


def _why_lines(scored: Sequence[Any]) -> list[str]:
    return [f"left out: {', '.join(names)}: {why}" for why, names in _left_out(scored).items()]
