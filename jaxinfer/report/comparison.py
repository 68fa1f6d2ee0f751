"""Serving systems on one workload, side by side: figures, a table, and a folder with it all.

``runs`` is always display name -> that system's runs, one per round.
"""

import csv
import json
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from jaxinfer.errors import JaxinferError
from jaxinfer.report.percentiles import percentile
from jaxinfer.report.perfetto import write_trace
from jaxinfer.report.records import RunRecord

Runs = Mapping[str, Sequence[RunRecord]]

LEGEND = (
    "Busy: utilisation, the share of the run in which some step ran on the group. Transfer "
    "hidden: its time in which the destination was computing, or the source the same prompt; "
    "visible: the rest. Cut: the share of a prompt that the first instance computed, mean over "
    "finished requests."
)


@dataclass(frozen=True)
class Figures:
    """What a run comes to, or the median of several. A median's counts may be halves.

    Attributes:
        wall_s: seconds of the run.
        requests_s: finished requests per second.
        output_tok_s: output tokens of finished requests per second.
        ttft_p50, ttft_p99: seconds from arrival to first token, over all requests that have one;
            None if none has.
        tbt_p50, tbt_p99: seconds between tokens, over all gaps of all requests; None if there are
            none.
        utilisation: device group -> share of the run, 0 to 1, in which a stage on it was busy.
        num_bytes: KV bytes moved between instances.
        hidden_s: seconds of transfers in which their destination was computing, or their source
            the same prompt.
        visible_s: the other seconds of transfers.
        mean_cut: mean of cut / prompt length over finished requests, 0 to 1; None if none was cut.
        preemptions: of all requests.
        failed: requests with an error.
    """

    wall_s: float
    requests_s: float
    output_tok_s: float
    ttft_p50: float | None
    ttft_p99: float | None
    tbt_p50: float | None
    tbt_p99: float | None
    utilisation: Mapping[str, float]
    num_bytes: float
    hidden_s: float
    visible_s: float
    mean_cut: float | None
    preemptions: float
    failed: float


def figures(run: RunRecord) -> Figures:
    """The figures of one run."""
    done = [request for request in run.requests if request.error is None]
    ttft = [t for request in run.requests if (t := request.ttft) is not None]
    tbt = [gap for request in run.requests for gap in request.tbt]
    cuts = [request.cut / request.prompt_len for request in done]
    hidden_s = sum(t.hidden_s for t in run.transfers)
    transfer_s = sum(t.end - t.start for t in run.transfers)
    return Figures(
        wall_s=run.wall_s,
        requests_s=_requests_s(run),
        output_tok_s=sum(len(request.token_times) for request in done) / run.wall_s,
        ttft_p50=percentile(ttft, 50),
        ttft_p99=percentile(ttft, 99),
        tbt_p50=percentile(tbt, 50),
        tbt_p99=percentile(tbt, 99),
        utilisation=_utilisation(run),
        num_bytes=sum(t.num_bytes for t in run.transfers),
        hidden_s=hidden_s,
        # Files have rounded times, whose sum may be less by some microseconds.
        visible_s=max(transfer_s - hidden_s, 0.0),
        mean_cut=statistics.fmean(cuts) if any(cuts) else None,
        preemptions=sum(request.preemptions for request in run.requests),
        failed=len(run.requests) - len(done),
    )


def medians(runs: Runs) -> dict[str, Figures]:
    """Each system's figures, each the median over the rounds that have it."""
    return {name: _median([figures(run) for run in rounds]) for name, rounds in runs.items()}


def median_round(rounds: Sequence[RunRecord]) -> RunRecord:
    """The run with the median requests/s; of an even number, the slower of the middle two."""
    return rounds[_median_index(rounds)]


def emulation(runs: Runs) -> list[str]:
    """What was emulated, as lines: one if it is the same for all, else one per system."""
    words = {
        name: "; ".join(dict.fromkeys(word for run in rounds for word in run.emulated))
        for name, rounds in runs.items()
    }
    if len(set(words.values())) == 1:
        return [f"emulated: {said}" for said in set(words.values()) if said]
    return [f"{name}, emulated: {said}" for name, said in words.items() if said]


def number_text(value: float) -> str:
    """Three digits that count, and all before the point."""
    return f"{value:,.0f}" if value >= 99.95 else f"{value:#.3g}"


def comparison_table(runs: Runs) -> Table:
    """One row of medians per system; the caption says what was emulated, and what failed."""
    columns, rows = _cells(runs)
    table = Table(
        title=_title(runs),
        title_justify="left",
        caption=Text("\n".join(_remarks(runs))),
        caption_justify="left",
        box=None,
        pad_edge=False,
    )
    for number, column in enumerate(columns):
        table.add_column(Text(column), justify="right" if number else "left")
    for row in rows:
        table.add_row(*map(Text, row))
    return table


def new_folder(folder: Path, besides: str | None = None) -> None:
    """Make the folder for ``write_comparison``; best called before the runs, too.

    Args:
        besides: name of what may be in it already.

    Raises:
        JaxinferError: it cannot be made, or has something in it.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        used = any(entry.name != besides for entry in folder.iterdir())
    except OSError as error:
        raise JaxinferError(f"{folder}: cannot make the folder: {error.strerror}") from None
    if used:
        raise JaxinferError(f"{folder}: has files in it, must be a new or an empty folder")


def write_comparison(runs: Runs, folder: Path, command: str) -> list[Path]:
    """Write the comparison, its pictures and its traces; returns the files.

    ``compare.md`` is for readers, ``compare.csv`` has the figures of each round, ``compare.json``
    these and the medians.

    Args:
        command: the command line that made the runs.

    Raises:
        JaxinferError: the folder has more in it than ``runs``, or cannot be made.
    """
    # matplotlib takes a second to load.
    from jaxinfer.report.plots import latency_cdfs, throughput_bars, timeline

    new_folder(folder, besides="runs")
    texts = [folder / f"compare.{suffix}" for suffix in ("md", "csv", "json")]
    bars, cdfs = folder / "throughput.png", folder / "latency.png"
    throughput_bars(runs, bars)
    latency_cdfs(runs, cdfs)
    written = [*texts, bars, cdfs]
    for name, slug in _slugs(runs).items():
        picture, trace = folder / f"timeline-{slug}.png", folder / f"trace-{slug}.json"
        run = replace(median_round(runs[name]), name=name)
        timeline(run, picture)
        write_trace(run, trace)
        written += [picture, trace]
    _write_csv(runs, texts[1])
    texts[2].write_text(json.dumps(_document(runs, command), indent=2) + "\n", encoding="utf-8")
    texts[0].write_text(_markdown(runs, command), encoding="utf-8")
    return written


def _requests_s(run: RunRecord) -> float:
    return sum(request.error is None for request in run.requests) / run.wall_s


def _median_index(rounds: Sequence[RunRecord]) -> int:
    order = sorted(range(len(rounds)), key=lambda i: _requests_s(rounds[i]))
    return order[(len(rounds) - 1) // 2]


def _utilisation(run: RunRecord) -> dict[str, float]:
    busy: dict[str, list[tuple[float, float]]] = {
        group: [] for groups in run.groups.values() for group in groups
    }
    for step in run.steps:
        for group, interval in zip(run.groups[step.instance], step.stages, strict=True):
            busy[group].append(interval)
    return {group: _covered(intervals) / run.wall_s for group, intervals in busy.items()}


def _covered(intervals: Iterable[tuple[float, float]]) -> float:
    """Length of the union; instances that share a group overlap."""
    covered, at = 0.0, float("-inf")
    for start, end in sorted(intervals):
        covered += max(end - max(start, at), 0.0)
        at = max(at, end)
    return covered


def _median(rounds: Sequence[Figures]) -> Figures:
    values: dict[str, Any] = {}
    for name in (field.name for field in fields(Figures)):
        found = [value for f in rounds if (value := getattr(f, name)) is not None]
        if name == "utilisation":
            values[name] = {g: statistics.median(u[g] for u in found) for g in found[0]}
        else:
            values[name] = statistics.median(found) if found else None
    return Figures(**values)


def _cells(runs: Runs) -> tuple[list[str], list[list[str]]]:
    found = medians(runs)
    groups = list(dict.fromkeys(group for f in found.values() for group in f.utilisation))
    columns = [
        "system", "requests/s", "output tokens/s", "TTFT p50 / p99", "TBT p50 / p99",
        *(f"{group} busy" for group in groups), "KV moved", "transfer hidden / visible", "mean cut",
    ]  # fmt: skip
    rows = []
    for name, f in found.items():
        has_transfers = f.hidden_s + f.visible_s > 0
        rows.append([
            name, number_text(f.requests_s), number_text(f.output_tok_s),
            f"{_seconds(f.ttft_p50)} / {_seconds(f.ttft_p99)}",
            f"{_seconds(f.tbt_p50)} / {_seconds(f.tbt_p99)}",
            *(_percent(f.utilisation.get(group)) for group in groups),
            _bytes(f.num_bytes) if f.num_bytes else "-",
            f"{_seconds(f.hidden_s)} / {_seconds(f.visible_s)}" if has_transfers else "-",
            _percent(f.mean_cut),
        ])  # fmt: skip
    return columns, rows


def _title(runs: Runs) -> str:
    counts = sorted({len(rounds) for rounds in runs.values()})
    rounds = f"{counts[0]} to {counts[-1]}" if len(counts) > 1 else f"{counts[0]}"
    if counts == [1]:
        return "Serving systems on one workload, one round"
    return f"Serving systems on one workload, medians of {rounds} rounds"


def _remarks(runs: Runs) -> list[str]:
    failed = {name: sum(figures(run).failed for run in rounds) for name, rounds in runs.items()}
    return [
        *emulation(runs),
        *(f"{name}: {count:.0f} failed requests" for name, count in failed.items() if count),
    ]


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{number_text(100 * value)} %"


def _seconds(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{number_text(value)} s" if value >= 1 else f"{number_text(value * 1000)} ms"


def _bytes(value: float) -> str:
    gib = value / 2**30
    return f"{number_text(gib)} GiB" if gib >= 1 else f"{number_text(gib * 1024)} MiB"


def _slugs(names: Iterable[str]) -> dict[str, str]:
    """Names -> parts of file names, such that no two are one."""
    slugs: dict[str, str] = {}
    for name in names:
        plain = re.sub(r"[^a-z0-9_.]+", "-", name.lower()).strip("-.") or "system"
        slug, number = plain, 1
        while slug in slugs.values():
            number += 1
            slug = f"{plain}-{number}"
        slugs[name] = slug
    return slugs


def _write_csv(runs: Runs, path: Path) -> None:
    rows: list[dict[str, object]] = []
    for name, rounds in runs.items():
        for number, run in enumerate(rounds, 1):
            values = asdict(figures(run))
            shares = values.pop("utilisation")
            row = {"system": name, "round": number} | values
            rows.append(row | {f"utilisation {group}": share for group, share in shares.items()})
    columns = list(dict.fromkeys(column for row in rows for column in row))
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def _document(runs: Runs, command: str) -> dict[str, object]:
    middle = medians(runs)
    systems = {
        name: {
            "emulated": list(dict.fromkeys(word for run in rounds for word in run.emulated)),
            "median": asdict(middle[name]),
            "rounds": [asdict(figures(run)) for run in rounds],
        }
        for name, rounds in runs.items()
    }
    return {"command": command, "systems": systems}


def _markdown(runs: Runs, command: str) -> str:
    columns, rows = _cells(runs)
    spread = []
    for name, rounds in runs.items():
        rates = sorted(map(_requests_s, rounds))
        shown = str(_median_index(rounds) + 1)
        spread.append([name, str(len(rounds)), *map(number_text, (rates[0], rates[-1])), shown])
    heading = ["system", "rounds", "least requests/s", "most requests/s", "round in the pictures"]
    lines = [
        f"# {_title(runs)}", "", "```sh", command, "```", "",
        *(f"- {line}" for line in _remarks(runs)), "",
        *_markdown_table(columns, rows), "",
        LEGEND, "",
        *_markdown_table(heading, spread), "",
        "![Requests per second](throughput.png)", "",
        "![Distributions of TTFT and TBT](latency.png)", "",
    ]  # fmt: skip
    for name, slug in _slugs(runs).items():
        lines += [
            f"## {name}", "",
            f"![Timeline](timeline-{slug}.png)", "",
            f"The whole run: [trace-{slug}.json](trace-{slug}.json), for <https://ui.perfetto.dev>.",
            "",
        ]  # fmt: skip
    return "\n".join(lines[:-1]) + "\n"


def _markdown_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    ruler = ["---", *["---:"] * (len(columns) - 1)]
    cells = ([cell.replace("|", r"\|") for cell in row] for row in [columns, ruler, *rows])
    return [f"| {' | '.join(row)} |" for row in cells]
