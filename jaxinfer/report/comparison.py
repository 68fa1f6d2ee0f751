"""Compares serving systems on one workload: figures, a table, and a folder with all of it.

``runs`` is always display name -> that system's runs, one per round.
"""

import csv
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from jaxinfer.errors import JaxinferError
from jaxinfer.report.perfetto import write_trace
from jaxinfer.report.pictures import can_be_drawn, picture_link
from jaxinfer.report.summary import (
    Runs,
    emulation,
    figures,
    median_index,
    median_round,
    medians,
    number_text,
    requests_per_s,
)

LEGEND = (
    "Busy: utilisation, the share of the run in which some step ran on the group. Transfer "
    "hidden: its time in which the destination was computing, or the source the same prompt; "
    "visible: the rest. Cut: the share of a prompt that the first instance computed, mean over "
    "finished requests."
)

LATENCY_WORDS = {
    "ttft": "TTFT",
    "tpot": "TPOT",
    "tbt": "TBT",
    "e2e": "end-to-end",
    "normalised": "end-to-end by output tokens",
    "delay": "scheduling delay",
}
# For each field, its heading and the factor of its values.
EXTRA_WORDS = {
    "steady_requests_s": ("requests/s without ramp and drain", 1),
    "steady_output_tok_s": ("output tokens/s without ramp and drain", 1),
    "mfu": ("MFU, %", 100),
    "usd_per_request": ("$ per 1,000 requests", 1000),
    "usd_per_million_output_tokens": ("$ per million output tokens", 1),
    "wh_per_request": ("Wh per request, at most", 1),
    "wh_per_million_output_tokens": ("Wh per million output tokens, at most", 1),
}


def comparison_table(runs: Runs) -> Table:
    """Return a table of medians by system; its caption says what was emulated and what failed."""
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
    """Make the folder for ``write_comparison``; call it before the runs to detect errors early.

    Args:
        besides: name of an entry that it may already contain.

    Raises:
        JaxinferError: it cannot be made, or has other contents.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        used = any(entry.name != besides for entry in folder.iterdir())
    except OSError as error:
        raise JaxinferError(f"{folder}: cannot make the folder: {error.strerror}") from None
    if used:
        raise JaxinferError(f"{folder}: has files in it, must be a new or an empty folder")


def write_comparison(runs: Runs, folder: Path, command: str, pictures: str = "png") -> list[Path]:
    """Write the comparison, its pictures and its traces; return the files.

    ``compare.md`` is for readers, ``compare.csv`` has the figures of each round, ``compare.json``
    has these and the medians. If times are too large for pictures, there are no pictures or traces,
    and ``compare.md`` says so.

    Args:
        command: the command line that made the runs.
        pictures: format of the pictures, ``png``, ``svg`` or ``pdf``.

    Raises:
        JaxinferError: the folder has contents other than ``runs``, or cannot be made.
    """
    new_folder(folder, besides="runs")
    texts = [folder / f"compare.{suffix}" for suffix in ("md", "csv", "json")]
    _write_csv(runs, texts[1])
    texts[2].write_text(json.dumps(document(runs, command), indent=2) + "\n", encoding="utf-8")
    texts[0].write_text(_markdown(runs, command, pictures), encoding="utf-8")
    if _undrawn(runs):
        return texts
    # Imported here, because matplotlib takes a second to load.
    from jaxinfer.report.plots import latencies, throughput_bars, timeline

    bars, times = folder / f"throughput.{pictures}", folder / f"latency.{pictures}"
    throughput_bars(runs, bars)
    latencies(runs, times)
    written = [*texts, bars, times]
    for name, slug in _slugs(runs).items():
        picture, trace = folder / f"timeline-{slug}.{pictures}", folder / f"trace-{slug}.json"
        run = replace(median_round(runs[name]), name=name)
        timeline(run, picture)
        write_trace(run, trace)
        written += [picture, trace]
    return written


def _undrawn(runs: Runs) -> list[str]:
    """Return a list with the reason why there are no pictures, or an empty list."""
    times = [run.wall_s for rounds in runs.values() for run in rounds]
    beyond = [time for time in times if not can_be_drawn(time)]
    return [f"no pictures or traces: a run took {time:.3g} s" for time in beyond[:1]]


def _cells(runs: Runs) -> tuple[list[str], list[list[str]]]:
    found = medians(runs)
    groups = list(dict.fromkeys(group for f in found.values() for group in f.utilisation))
    columns = [
        "system",
        "requests/s",
        "output tokens/s",
        "TTFT p50 / p99",
        "TBT p50 / p99",
        *(f"{group} busy" for group in groups),
        "KV moved",
        "transfer hidden / visible",
        "mean cut",
    ]
    rows = []
    for name, f in found.items():
        has_transfers = f.hidden_s + f.visible_s > 0
        rows.append(
            [
                name,
                number_text(f.requests_s),
                number_text(f.output_tok_s),
                f"{_seconds(f.ttft_p50)} / {_seconds(f.ttft_p99)}",
                f"{_seconds(f.tbt_p50)} / {_seconds(f.tbt_p99)}",
                *(_percent(f.utilisation.get(group)) for group in groups),
                _bytes(f.num_bytes) if f.num_bytes else "-",
                f"{_seconds(f.hidden_s)} / {_seconds(f.visible_s)}" if has_transfers else "-",
                _percent(f.mean_cut),
            ]
        )
    return columns, rows


def _latency_cells(runs: Runs) -> tuple[list[str], list[list[str]]]:
    """Return the cells of means and percentiles of all latencies."""
    columns = ["system", "latency", "mean", "p50", "p90", "p99"]
    rows = [
        [name, words, *(_seconds(getattr(f, f"{metric}_{column}")) for column in columns[2:])]
        for name, f in medians(runs).items()
        for metric, words in LATENCY_WORDS.items()
    ]
    return columns, rows


def _extra_lines(runs: Runs) -> list[str]:
    """Return the lines of a table of further figures that some system has."""
    found = medians(runs)
    known = {
        field: (words, factor)
        for field, (words, factor) in EXTRA_WORDS.items()
        if any(getattr(f, field) is not None for f in found.values())
    }
    if not known:
        return []
    rows = [
        [name, *(_number(getattr(f, field), factor) for field, (_, factor) in known.items())]
        for name, f in found.items()
    ]
    return [*_markdown_table(["system", *(words for words, _ in known.values())], rows), ""]


def _number(value: float | None, factor: float) -> str:
    return "-" if value is None else number_text(value * factor)


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
        *_undrawn(runs),
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
    """Return parts of file names for these names, all different."""
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


def document(runs: Runs, command: str) -> dict[str, Any]:
    """Return each system's figures, for all rounds and as medians, as in ``compare.json``."""
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


def _markdown(runs: Runs, command: str, pictures: str) -> str:
    columns, rows = _cells(runs)
    spread = []
    for name, rounds in runs.items():
        rates = sorted(map(requests_per_s, rounds))
        shown = str(median_index(rounds) + 1)
        spread.append([name, str(len(rounds)), *map(number_text, (rates[0], rates[-1])), shown])
    heading = ["system", "rounds", "least requests/s", "most requests/s", "round in the pictures"]
    lines = [
        f"# {_title(runs)}", "", "```sh", command, "```", "",
        *(f"- {line}" for line in _remarks(runs)), "",
        *_markdown_table(columns, rows), "",
        LEGEND, "",
        *_markdown_table(*_latency_cells(runs)), "",
        *_extra_lines(runs),
        *_markdown_table(heading, spread), "",
    ]  # fmt: skip
    if _undrawn(runs):
        return "\n".join(lines[:-1]) + "\n"
    lines += [
        picture_link("Requests per second", f"throughput.{pictures}"),
        "",
        picture_link("Distributions of TTFT and TBT", f"latency.{pictures}"),
        "",
    ]
    for name, slug in _slugs(runs).items():
        lines += [
            f"## {name}",
            "",
            picture_link("Timeline", f"timeline-{slug}.{pictures}"),
            "",
            f"The whole run: [trace-{slug}.json](trace-{slug}.json), for <https://ui.perfetto.dev>.",
            "",
        ]
    return "\n".join(lines[:-1]) + "\n"


def _markdown_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    ruler = ["---", *["---:"] * (len(columns) - 1)]
    cells = ([cell.replace("|", r"\|") for cell in row] for row in [columns, ruler, *rows])
    return [f"| {' | '.join(row)} |" for row in cells]
