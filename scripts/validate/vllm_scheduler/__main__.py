"""Our loop beside vLLM's own scheduler: the same arrivals, sampled tokens and ends of steps.

python -m scripts.validate.vllm_scheduler --python ENV/bin/python --batches 50000
python -m scripts.validate.vllm_scheduler --python ENV/bin/python --record FILE --batches 60
python -m scripts.validate.vllm_scheduler --check FILE
"""

import json
import subprocess
import time
from collections.abc import Iterable, Iterator, Mapping
from itertools import zip_longest
from pathlib import Path
from typing import Any

import click

from jaxinfer.errors import JaxinferError
from jaxinfer.serving.request_state import RequestState
from scripts.tables import write_csv
from scripts.validate.vllm_scheduler.options import option_rows
from scripts.validate.vllm_scheduler.our_side import Decision, Workload, decide
from scripts.validate.vllm_scheduler.workloads import DRAWN, MUTANTS, TRACED, workload

SIDE = "scripts.validate.vllm_scheduler.engine_side"
ROOT = Path(__file__).parents[3]
PARTS = "time", "rows", "admissions with their cached tokens", "victims", "free blocks"


class Theirs:
    """vLLM's side, a process that answers one workload after the other."""

    def __init__(self, python: Path) -> None:
        self._process = subprocess.Popen(
            [str(python.absolute()), "-m", SIDE],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self.ended: dict[str, int] = {}
        self._answers = False

    def decide(self, asked: Workload) -> Iterator[Decision]:
        """Yield its decisions."""
        to, of = self._process.stdin, self._process.stdout
        assert to
        assert of
        # The rest of an answer that was not read to its end.
        for line in of if self._answers else ():
            if line.startswith("{"):
                break
        to.write(json.dumps(asked) + "\n")
        to.flush()
        self._answers = True
        for line in of:
            found = json.loads(line)
            if isinstance(found, dict):
                self._answers = False
                self.ended = found["ended"]
                return
            yield found
        raise JaxinferError(f"{SIDE} ended with {self._process.wait()} in {asked['name']!r}")

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait()


def first_difference(
    theirs: Iterable[Decision], ours: Iterable[Decision]
) -> tuple[int, str | None]:
    """Count the batches that are alike, and say in words where the first other one differs."""
    number = 0
    for number, (one, two) in enumerate(zip_longest(theirs, ours), 1):
        if one == two:
            continue
        if one is None or two is None:
            there, here = ("ends" if each is None else "goes on" for each in (one, two))
            return number - 1, f"batch {number}: vLLM {there}, ours {here}"
        part = next(index for index, (a, b) in enumerate(zip(one, two, strict=True)) if a != b)
        where = _where(one[part], two[part]) if isinstance(one[part], list) else ""
        return number - 1, (
            f"batch {number}, at {one[0] / 1e6:.6f} s, {PARTS[part]}: "
            f"vLLM {_short(one[part])}; ours {_short(two[part])}{where}"
        )
    return number, None


def _where(one: list[Any], two: list[Any]) -> str:
    for index, (a, b) in enumerate(zip_longest(one, two)):
        if a != b:
            return f" (number {index}: {a} and {b})"
    return ""


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 160 else text[:150] + " ..."


def compare(engine: "Theirs", asked: Workload, changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row of the table: a workload's batches, what they hold, and the first difference."""
    counts = dict.fromkeys(("rows", "admissions", "cached_tokens", "preemptions"), 0)

    def counted() -> Iterator[Decision]:
        for decision in engine.decide(asked):
            _, rows, admitted, victims, _ = decision
            counts["rows"] += rows[0] if asked["counts_only"] else len(rows)
            counts["admissions"] += len(admitted)
            counts["cached_tokens"] += sum(cached for _, cached in admitted)
            counts["preemptions"] += len(victims)
            yield decision

    ended: dict[str, RequestState] = {}
    batches, difference = first_difference(counted(), decide(asked, changes, ended))
    difference = difference or _other_end(engine.ended, ended)
    return {"workload": asked["name"], "batches": batches, **counts, "difference": difference or ""}


def _other_end(theirs: Mapping[str, int], ours: Mapping[str, RequestState]) -> str | None:
    counts = {name: len(request.output_token_ids) for name, request in ours.items()}
    for name in {**theirs, **counts}:
        if (there := theirs.get(name)) != (here := counts.get(name)):
            return f"request {name!r} ends with {there} tokens at vLLM, with {here} here"
    return None


def check(path: Path, changes: Mapping[str, Any] | None = None) -> dict[str, str | None]:
    """Return by workload the first difference of our decisions from recorded ones."""
    found = {}
    for each in json.loads(path.read_text(encoding="utf-8")):
        ended: dict[str, RequestState] = {}
        ours = decide(each["workload"], changes, ended)
        # As JSON has them.
        plain = (json.loads(json.dumps(decision)) for decision in ours)
        difference = first_difference(each["decisions"], plain)[1]
        found[each["workload"]["name"]] = difference or _other_end(each["ended"], ended)
    return found


@click.command(help=__doc__)
@click.option("--python", type=click.Path(path_type=Path), help="Python that has vLLM 0.32.")
@click.option("--batches", default=1000, show_default=True, help="Batches of each workload.")
@click.option("--seed", default=1, show_default=True, help="Seed of the requests.")
@click.option("--traces", type=click.Path(path_type=Path), help="Folder with the traces' files.")
@click.option("--only", multiple=True, help="Workloads by name; all by default.")
@click.option("--mutants", is_flag=True, help="Change one choice of ours: each must be told.")
@click.option("--out", type=click.Path(path_type=Path), help="CSV file to write the table to.")
@click.option("--record", type=click.Path(path_type=Path), help="File for vLLM's decisions.")
@click.option("--options", "ablate", is_flag=True, help="What each option of ours decides.")
@click.option("--check", "checked", type=click.Path(path_type=Path), help="Check such a file.")
def main(
    python: Path | None,
    batches: int,
    seed: int,
    traces: Path | None,
    only: tuple[str, ...],
    mutants: bool,
    out: Path | None,
    record: Path | None,
    ablate: bool,
    checked: Path | None,
) -> None:
    """Run the command."""
    if checked:
        found = check(checked)
        for name, difference in found.items():
            click.echo(f"{name}: {difference or 'alike'}")
        raise SystemExit(any(found.values()))
    names = only or (*DRAWN, *(TRACED if traces else ()))
    if ablate:
        rows = option_rows([workload(name, batches, seed, traces) for name in names])
        for row in rows:
            click.echo(str(row))
        if out:
            write_csv(out, rows)
        return
    if python is None:
        raise click.UsageError("--python is missing: the interpreter with vLLM; or --check FILE")
    theirs = Theirs(python)
    rows = []
    try:
        if record:
            _record(theirs, [workload(name, batches, seed, traces) for name in names], record)
            return
        if mutants:
            for kind, (name, changed) in MUTANTS.items():
                asked = workload(name, batches, seed, traces)
                row = compare(theirs, asked, changed(asked))
                rows.append({"mutant": kind} | row)
                click.echo(f"{kind}: {rows[-1]['difference'] or 'NOT TOLD'}")
        for name in () if mutants else names:
            asked, start = workload(name, batches, seed, traces), time.perf_counter()
            rows.append(compare(theirs, asked, {}))
            rate = rows[-1]["batches"] / (time.perf_counter() - start)
            click.echo(f"{rows[-1]} {rate:.0f} batches/s")
    finally:
        theirs.close()
    if out:
        write_csv(out, rows)
    bad = [row for row in rows if bool(row["difference"]) != mutants]
    raise SystemExit(bool(bad))


def _record(theirs: Theirs, asked: list[dict[str, Any]], path: Path) -> None:
    kept = []
    for each in asked:
        decisions = list(theirs.decide(each))
        last = decisions[-1][0]
        needed = [request for request in each["requests"] if request["at"] <= last]
        kept.append(
            {
                "workload": each | {"requests": needed},
                "decisions": decisions,
                "ended": theirs.ended,
            }
        )
    path.write_text(json.dumps(kept, separators=(",", ":")) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
