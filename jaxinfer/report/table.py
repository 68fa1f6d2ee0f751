"""A run's metrics as a table for the terminal."""

from collections.abc import Mapping, Sequence

from rich.table import Table

from jaxinfer.report.metrics import RunMetrics


def metrics_table(m: RunMetrics) -> Table:
    """Return a table with a line per figure."""
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold")
    table.add_column(justify="right")
    for name, value in _rows(m):
        table.add_row(name, value)
    return table


def beyond_measured(beyond: Mapping[str, Mapping[str, Sequence[float]]]) -> str | None:
    """Describe how far a modelled run exceeded the measured range; return None if it did not.

    Args:
        beyond: see ``RunMetrics``.
    """
    each = [
        f"{name}: {had:,.0f} {what} (measured up to {last:,.0f})"
        for name, held in beyond.items()
        for what, (had, last) in held.items()
    ]
    if not each:
        return None
    return (
        "warning: some steps are larger than any measured one; their times are extrapolated: "
        + "; ".join(each)
    )


def _rows(m: RunMetrics) -> list[tuple[str, str]]:
    failed = f" ({m.failed} failed)" if m.failed else ""
    late = f", {m.late_compiles} of them during the run" if m.late_compiles else ""
    hit_rate = 100 * m.cached_tokens / max(m.prompt_tokens, 1)
    cached = f" ({hit_rate:.1f} % from the prefix cache)" if m.cached_tokens else ""
    return [
        ("requests", f"{m.requests}{failed}"),
        ("prompt tokens", f"{m.prompt_tokens:,}{cached}"),
        ("output tokens", f"{m.output_tokens:,}"),
        ("wall time", f"{m.wall_s:.2f} s"),
        ("prefill", f"{m.prompt_tok_s:,.1f} tokens/s"),
        ("decode", f"{m.output_tok_s:,.1f} tokens/s"),
        ("TTFT p50 / p99", f"{_seconds(m.ttft_p50)} / {_seconds(m.ttft_p99)}"),
        ("TBT p50 / p99", f"{_seconds(m.tbt_p50)} / {_seconds(m.tbt_p99)}"),
        ("end-to-end p50 / p99", f"{_seconds(m.e2e_p50)} / {_seconds(m.e2e_p99)}"),
        *_without_ends(m),
        *([("MFU", f"{100 * m.mfu:.1f} %")] if m.mfu is not None else []),
        ("peak KV pages", f"{m.peak_pages:,} of {m.num_pages:,}"),
        ("preemptions", f"{m.preemptions}"),
        *_moves(m),
        *([("compiles", f"{m.compiles} in {m.compile_s:.1f} s{late}")] if m.compiles else []),
    ]


def _moves(m: RunMetrics) -> list[tuple[str, str]]:
    if (moves := m.slice_moves) is None:
        return []
    left_out = moves.without_room + moves.at_once
    also = f", {left_out} left out" if left_out else ""
    return [("moves of KV heads", f"{moves.begun} of {moves.num_bytes / 1e6:,.1f} MB{also}")]


def _without_ends(m: RunMetrics) -> list[tuple[str, str]]:
    if m.steady_requests_s is None:
        return []
    tokens = f"{m.steady_output_tok_s:,.1f} tokens/s"
    return [("without ramp and drain", f"{m.steady_requests_s:.3g} requests/s, {tokens}")]


def _seconds(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.2f} s" if value >= 1 else f"{value * 1000:.1f} ms"
