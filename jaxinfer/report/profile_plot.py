"""A profile as a table, and as Cronus' Figure 3 for this machine."""

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from rich.table import Table

from jaxinfer.report.pictures import save_picture
from jaxinfer.steps.attention_profile import AttentionProfile
from jaxinfer.steps.profile import Profile


def profile_figures(
    profiles: Mapping[str, tuple[Profile, list[float]]], attention: Mapping[str, AttentionProfile]
) -> dict[str, Any]:
    """Return the numbers of ``profile_table`` and ``attention_table``, in seconds, by instance."""
    found: dict[str, Any] = {}
    for name, (profile, slowdowns) in profiles.items():
        fit, (prefill, mixed) = profile.fit(slowdowns), profile.quality()
        found[name] = {
            "prefill": asdict(fit.prefill) | {"r2": prefill.r2, "mape": prefill.mape},
            "mixed": asdict(fit.mixed) | {"r2": mixed.r2, "mape": mixed.mape},
        }
    for name, shards in attention.items():
        found[name]["attention"] = [
            {"group": shard.group}
            | asdict(shard.fit())
            | dict(zip(("attention_mape", "exchange_mape"), shard.errors(), strict=True))
            for shard in shards.shards
        ]
    return {"instances": found}


def profile_table(profiles: Mapping[str, tuple[Profile, list[float]]]) -> Table:
    """Return a table with a line per instance and equation.

    Args:
        profiles: instance -> profile, and the emulated slowdown of each stage.
    """
    table = Table(title="Profile", title_justify="left", box=None, pad_edge=False)
    for column in ("instance", "equation", "coefficients", "R^2", "MAPE"):
        table.add_column(column, justify="right" if column in ("R^2", "MAPE") else "left")
    for name, (profile, slowdowns) in profiles.items():
        fit, (prefill, mixed) = profile.fit(slowdowns), profile.quality()
        table.add_row(
            name,
            "2: partial prefill",
            f"{fit.prefill.per_token * 1e3:.4g} ms per token + {fit.prefill.constant * 1e3:.4g} ms",
            f"{prefill.r2:.3f}",
            f"{100 * prefill.mape:.1f} %",
        )
        table.add_row(
            "",
            "3: mixed iteration",
            f"{fit.mixed.per_prefill_context * 1e6:.4g} us per token of prefill context + "
            f"{fit.mixed.per_decode_context * 1e6:.4g} of decode context + "
            f"{fit.mixed.constant * 1e3:.4g} ms",
            f"{mixed.r2:.3f}",
            f"{100 * mixed.mape:.1f} %",
        )
    return table


def attention_table(profiles: Mapping[str, AttentionProfile]) -> Table:
    """Return a table of Hetis' eqs. 3 and 4 for one layer: a line per device group and equation."""
    table = Table(title="Attention of one layer", title_justify="left", box=None, pad_edge=False)
    for column in ("instance", "group", "equation", "coefficients", "MAPE"):
        table.add_column(column, justify="right" if column == "MAPE" else "left")
    for name, profile in profiles.items():
        for shard in profile.shards:
            fit, (attention, exchange) = shard.fit(), shard.errors()
            if shard.attention:
                table.add_row(
                    name,
                    shard.group,
                    "3: attention",
                    f"{fit.per_pair * 1e6:.4g} us per KV head + {fit.per_entry * 1e9:.4g} ns per "
                    f"KV entry + {fit.constant * 1e6:.4g} us",
                    f"{100 * attention:.1f} %",
                )
            if shard.exchange:
                table.add_row(
                    name,
                    shard.group,
                    "4: exchange",
                    f"{fit.exchange_per_pair * 1e6:.4g} us per KV head + "
                    f"{fit.exchange * 1e6:.4g} us",
                    f"{100 * exchange:.1f} %",
                )
    return table


def draw_profile(name: str, profile: Profile, slowdowns: list[float], path: Path) -> Figure:
    """Draw measured times and fitted lines: prefills by length, and iterations by context."""
    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    fit = profile.fit(slowdowns)
    lengths = np.array([n for n, _ in profile.prefills])
    left.plot(lengths, [np.dot(t, slowdowns) for _, t in profile.prefills], "o", label="measured")
    left.plot(lengths, [fit.prefill.seconds(n) for n in lengths], "-", label="eq. 2")
    left.set_xlabel("length of the prefill (tokens)")
    left.set_ylabel("time (s)")
    left.legend(frameon=False)
    decodes = sorted({d for _, d, _ in profile.mixed})
    colours = [f"C{number}" for number in range(len(decodes))]
    for decode, colour in zip(decodes, colours, strict=True):
        here = [(p, 1e3 * np.dot(t, slowdowns)) for p, d, t in profile.mixed if d == decode]
        right.plot(*zip(*here, strict=True), "o", color=colour, label=f"{decode:,} tokens")
        line = [(p, 1e3 * fit.mixed.seconds(p, decode)) for p, _ in here]
        right.plot(*zip(*line, strict=True), "-", color=colour, linewidth=1)
    right.set_xlabel("prefill context (tokens)")
    right.set_ylabel("time of one iteration (ms)")
    right.legend(title="decode context; lines: eq. 3", frameon=False)
    key = profile.key
    chunk = f"chunks of {key['chunk_tokens']} tokens"
    slowed = [s for s in slowdowns if s != 1]
    emulated = f", emulated {slowed[0]:g} times slower" if slowed else ""
    figure.suptitle(f"{name}: {key['model']}, {key['dtype']}, {chunk}{emulated}")
    save_picture(figure, path)
    return figure
