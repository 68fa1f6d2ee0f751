"""Tables of what layouts cost, for the terminal and as CSV."""

import csv
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from rich.markup import escape
from rich.table import Table

from jaxinfer.lab.sharding.crossings import Crossing
from jaxinfer.lab.sharding.hlo import KINDS, Counts
from jaxinfer.lab.sharding.study import LayoutFinding, LayoutQuestion, RefusedLayout
from jaxinfer.sharding.links import described


def tables(
    question: LayoutQuestion,
    findings: Sequence[LayoutFinding],
    refused: Sequence[RefusedLayout],
    title: str,
) -> Iterator[Table]:
    """Yield a table for each phase, and one for the head."""
    heads = {
        "prefill": f"prefill of {question.tokens:,} tokens",
        "decode": f"decode of {question.sequences:,} sequences, {question.context:,} tokens each",
        "head": f"head of {question.sequences:,} sequences, once a step",
    }
    for phase, words in heads.items():
        found = [each for each in findings if each.phase == phase]
        others = [each for each in refused if each.phase == phase]
        if found or others:
            yield _table(question, found, others, f"{words}: {title}", phase == "head")


def _table(
    question: LayoutQuestion,
    findings: Sequence[LayoutFinding],
    refused: Sequence[RefusedLayout],
    title: str,
    is_head: bool,
) -> Table:
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    table.add_column("layout", no_wrap=True)
    for name in () if is_head else ("weights", "KV", "temp.", "fits"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("collectives" if is_head else "collectives of a layer")
    table.add_column("closed form")
    table.add_column("time" if is_head else "step", justify="right", no_wrap=True)
    table.add_column("binds", no_wrap=True)
    for each in findings:
        sizes = (each.cost.weight_bytes, each.kv_bytes, each.temporary_bytes)
        memory = [*map(gigabytes, sizes), "yes" if fits(question, each) else "no"]
        table.add_row(
            each.layout,
            *(() if is_head else memory),
            _collectives(each.compiled, question.itemsize),
            verdict(each, question.itemsize),
            f"{each.seconds.total * 1e3:.3g} ms",
            each.seconds.binds,
        )
    for other in refused:
        blank = () if is_head else ("", "", "", "no")
        table.add_row(other.layout, *blank, f"refused: {escape(other.why)}")
    return table


def fits(question: LayoutQuestion, finding: LayoutFinding) -> bool:
    """Tell whether weights, KV and temporaries fit on one card."""
    return finding.total_bytes <= question.card.memory_gb * 1e9


def verdict(finding: LayoutFinding, itemsize: int) -> str:
    """Return a cell that says whether the compiler matches the closed forms, with notes."""
    said = "equal" if finding.equal else _collectives(finding.closed, itemsize)
    return "; ".join([said, *finding.notes, *([finding.padding] if finding.padding else [])])


def _collectives(found: Counts, itemsize: int) -> str:
    said = (
        f"{number} {kind} {megabytes(numbers * itemsize)}"
        for kind, (number, numbers) in found.items()
    )
    return ", ".join(said) or "none"


def gigabytes(size: float) -> str:
    """Return bytes as a text in 10^9 bytes."""
    return f"{size / 1e9:,.1f} GB"


def megabytes(size: float) -> str:
    """Return bytes as a text in 10^6 bytes."""
    return f"{size / 1e6:,.3g} MB" if size < 1e9 else f"{size / 1e6:,.0f} MB"


UNITS = (
    "MB: what one device sends in one layer, by kind of collective (for the head: in one step). "
    "Step: all layers and the head"
)


def link_line(question: LayoutQuestion) -> str:
    """Return a line that describes the links that the seconds assume."""
    each_s = max(link.each_s for link in question.links.values())
    said = described(question.links, question.card, question.mesh)
    return f"bandwidth of a device: {said}; each collective adds {each_s * 1e6:g} us"


def fastest_lines(fastest: Mapping[str, Sequence[tuple[int, str]]]) -> Iterator[str]:
    """Yield a line per phase that says from how many tokens on which layout is the fastest."""
    for phase, found in fastest.items():
        if not found:
            continue
        units = "tokens" if phase == "prefill" else "sequences"
        names = [found[0][1], *(f"from {count:,} {units} on {name}" for count, name in found[1:])]
        yield f"fastest {phase} that fits: {', '.join(names)}"


def write_csvs(
    folder: Path,
    question: LayoutQuestion,
    findings: Sequence[LayoutFinding],
    refused: Sequence[RefusedLayout],
    crossed: Mapping[str, Sequence[Crossing]],
) -> None:
    """Write ``layouts.csv``, and ``crossings.csv`` with the crossings of all pairs."""
    found = all_rows(question, findings, refused)
    _write(folder / "layouts.csv", found, list(found[0]))
    rows = [
        {"phase": phase, "tokens": each.tokens, "faster": each.faster, "slower": each.slower}
        for phase, found in crossed.items()
        for each in found
    ]
    _write(folder / "crossings.csv", rows, ["phase", "tokens", "faster", "slower"])


def all_rows(
    question: LayoutQuestion, findings: Sequence[LayoutFinding], refused: Sequence[RefusedLayout]
) -> list[dict[str, object]]:
    """Return the figures of all layouts in all phases, followed by the refused layouts."""
    left_out = [
        {"layout": each.layout, "phase": each.phase, "fits": False, "refused": each.why}
        for each in refused
    ]
    return [*(row(question, each) for each in findings), *left_out]


def row(question: LayoutQuestion, each: LayoutFinding) -> dict[str, object]:
    """Return the figures of a layout in a phase; bytes are those of one device."""
    found: dict[str, object] = {
        "layout": each.layout,
        "phase": each.phase,
        "weight_bytes": round(each.cost.weight_bytes),
        "kv_bytes": round(each.kv_bytes),
        "temporary_bytes": round(each.temporary_bytes),
        "fits": fits(question, each),
        "seconds": each.seconds.total,
        "compute_s": each.seconds.compute,
        "memory_s": each.seconds.memory,
        "links_s": each.seconds.links,
        "binds": each.seconds.binds,
        "domain": question.card.domain or "",
        "links": described(question.links, question.card, question.mesh),
    }
    for source, counts in (("compiled", each.compiled), ("closed", each.closed)):
        for kind in KINDS:
            count, numbers = counts.get(kind, (0, 0.0))
            name = f"{source}_{kind.replace('-', '_')}"
            found |= {name: count, f"{name}_bytes": round(numbers * question.itemsize)}
    return found | {
        "equal": each.equal,
        "notes": "; ".join(each.notes),
        "padding": each.padding,
        "refused": "",
    }


def _write(path: Path, rows: Sequence[Mapping[str, object]], columns: Sequence[str]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows(rows)
