"""Results of following a load: tables of schedules and of windows, run files, and a picture."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from jaxinfer.lab.plan.file_parts import REQUESTS
from jaxinfer.lab.plan.problem import Problem
from jaxinfer.lab.plan.replan.replan import Followed
from jaxinfer.lab.plan.replan.schedule import ScheduleResult
from jaxinfer.lab.plan.replan.trace_windows import Window, split
from jaxinfer.lab.plan.result import is_untouched, write_sealed, write_table
from jaxinfer.report.pictures import save_picture
from jaxinfer.simulate.targets import PercentileTargets, RequestTargets, Targets, Verdict

# Figures of all requests, in addition to the targets' own figures.
LATENCIES = ("ttft_mean", "ttft_p99", "tpot_mean", "e2e_mean", "e2e_p99")


def rows(served: Sequence[ScheduleResult]) -> list[dict[str, Any]]:
    """Return a row for each schedule: its costs, and its figures over the whole trace."""
    found = []
    for each in served:
        verdict, figures = each.verdict, each.latencies.figures()
        seen = [window for window in each.windows if window]
        found.append(
            {
                "way": each.schedule.name,
                "placements": len(each.courses),
                "drain_s": each.drain_s,
                "reload_s": each.reload_s,
                "gpus": max(course.gpus for course in each.courses),
                "gpu_hours": each.gpu_hours,
                "targets": "kept" if verdict.met else "missed",
                **_named("", verdict),
                "windows_kept": sum(window.met for window in seen),
                "windows": len(seen),
                **{name: figures[name] for name in LATENCIES},
            }
        )
    return found


def table(served: Sequence[ScheduleResult]) -> Table:
    """Return a table of the schedules for the terminal, without most latencies."""
    found = Table(box=None, pad_edge=False)
    shown = [
        {name: value for name, value in row.items() if name not in ("windows", *LATENCIES[1:])}
        | {"windows_kept": f"{row['windows_kept']} of {row['windows']}"}
        for row in rows(served)
    ]
    for name in shown[0]:
        found.add_column(name.replace("_", " "), justify="left" if name == "way" else "right")
    for row in shown:
        found.add_row(*map(_text, row.values()))
    return found


def _text(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, float) else "-" if value is None else str(value)


def window_rows(followed: Followed) -> list[dict[str, Any]]:
    """Return a row per window: its mix, the plan made at its end, and each schedule's result."""
    found = []
    for number, (window, look) in enumerate(zip(followed.windows, followed.looks, strict=True)):
        mix = window.mix
        row = {
            "start_s": window.start,
            "stop_s": window.stop,
            "requests": len(window.work),
            "requests_s": mix and mix.rate,
            "prompt_tokens": mix and mix.prompt,
            "output_tokens": mix and mix.output,
            "stands": str(followed.stands[number]),
            "oracle": str(followed.oracle[number]),
            "shift": look.shift,
            "planned": look.chosen and str(look.chosen),
        }
        for each in followed.served:
            row |= _named(f"{each.schedule.name}_", each.windows[number])
        found.append(row | {"refused": look.refused})
    return found


def _named(prefix: str, verdict: Verdict | None) -> dict[str, float | None]:
    if verdict is None:
        return {}
    found = {} if verdict.attainment is None else {f"{prefix}attainment": verdict.attainment}
    figures = {f"{prefix}{n.replace(' ', '_')}": value for n, value in verdict.figures.items()}
    return found | figures


def write(
    folder: Path, problem: Problem, followed: Followed, kind: str, force: bool = False
) -> None:
    """Write ``replan.csv``, ``windows.csv``, a run file for each used placement, and a picture.

    Args:
        force: overwrite run files that were edited.

    Raises:
        JaxinferError: a run file was edited.
    """
    write_table(folder / "replan.csv", rows(followed.served))
    write_table(folder / "windows.csv", window_rows(followed))
    for served in followed.served[:2]:
        write_run_files(folder, problem, followed.windows, served, force)
    draw(folder / f"replan.{kind}", followed.windows, followed.served, problem.targets)


def write_run_files(
    folder: Path, problem: Problem, windows: Sequence[Window], served: ScheduleResult, force: bool
) -> None:
    """Write a run file for each period of a schedule, and a trace of its requests."""
    periods, name = served.schedule.periods, served.schedule.name
    work = [item for window in windows for item in window.work]
    parts = split(work, [period.start for period in periods])
    for number, (period, part, course) in enumerate(
        zip(periods, parts, served.courses, strict=True)
    ):
        trace = folder / f"{name}{number}.csv"
        own = {k: v for k, v in period.data["workload"].items() if k not in REQUESTS}
        data = {**period.data, "workload": {**own, "trace": str(trace), "arrivals": "trace"}}
        head = (
            f"Found by jaxinfer plan with {problem.planner['name']}, for requests from "
            f"{period.start:g} s on.",
            f"It serves from {course.ready:.6g} s on, and has ended all of them at "
            f"{course.drained:.6g} s.",
        )
        write_sealed(trace.with_suffix(".yaml"), data, head, force)
        lines = [f"{i.arrival - period.start!r},{i.prompt_len},{i.max_tokens}\n" for i in part]
        header = "arrived_at,num_prefill_tokens,num_decode_tokens\n"
        trace.write_text(header + "".join(lines), encoding="utf-8")
    # A trace that has been changed since may have had more windows.
    for old in folder.glob(f"{name}[0-9]*.yaml"):
        ending = old.stem.removeprefix(name)
        # ``name0.mine.yaml`` may be a user's file.
        if re.fullmatch("[0-9]+", ending) and int(ending) >= len(periods) and is_untouched(old):
            old.unlink()
            old.with_suffix(".csv").unlink(missing_ok=True)


# Quantities of a window's mix to draw, by their unit.
_LOAD = (("requests/s", "rate"), ("prompt tokens", "prompt"), ("output tokens", "output"))


def draw(
    path: Path, windows: Sequence[Window], served: Sequence[ScheduleResult], targets: Targets
) -> None:
    """Draw the load, and each target's figure per window; grey: nothing serves new requests."""
    from matplotlib.figure import Figure

    from jaxinfer.report.plots import COLOURS

    limits = _limits(targets)
    figure = Figure((8.5, 2.2 + 2 * len(limits)), layout="constrained")
    load, *panels = figure.subplots(1 + len(limits), 1, sharex=True)
    edges = [*(window.start for window in windows), windows[-1].stop]
    first = next(mix for window in windows if (mix := window.mix))
    for (unit, of), colour, dash in zip(_LOAD, COLOURS[4:], ("-", "--", ":"), strict=False):
        at_first = getattr(first, of)
        shares = [getattr(w.mix, of) / at_first if w.mix else None for w in windows]
        _steps(load, edges, shares, label=f"{unit} ({at_first:.4g})", color=colour, ls=dash, lw=1.5)
    load.set_ylabel("load,\nfirst window = 1")
    _log_scale(load)
    _explain(load, "means of a window\n(of the first one)")
    for axes, (name, limit) in zip(panels, limits.items(), strict=True):
        for number, (each, colour) in enumerate(zip(served, COLOURS * len(served), strict=False)):
            values = [window.figures[name] if window else None for window in each.windows]
            dash = "--" if each.schedule.free else "-"
            label = {"label": each.schedule.name} if axes is panels[0] else {}
            # Earlier lines lie above and are thinner, so that equal ones can be told apart.
            style = {"lw": 1.2 + 0.6 * number, "zorder": 3 - 0.1 * number, "alpha": 0.9}
            _steps(axes, edges, values, color=colour, ls=dash, **label, **style)
        axes.axhline(limit, color="0.3", lw=1, ls=":", zorder=1)
        if isinstance(targets, PercentileTargets):
            _log_scale(axes)
        axes.set_ylabel(_in_words(name, targets))
        for course in served[0].courses[1:]:
            axes.axvspan(course.start, course.ready, color="0.88", lw=0, zorder=0)
    # The first panel has the labels that all panels share.
    panels[0].plot([], [], color="0.3", lw=1, ls=":", label="target")
    if len(served[0].courses) > 1:
        words = "replanned: the old end,\nthen weights load"
        panels[0].fill_between([], [], color="0.88", label=words)
    _explain(panels[0], "placement")
    panels[-1].set_xlabel("time of arrival, s")
    figure.align_ylabels()
    save_picture(figure, path)


def _log_scale(axes: Any) -> None:
    """Set a logarithmic scale with plain numbers at 1, 2, 5 and their tens."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_locator(NullLocator())


def _explain(axes: Any, title: str) -> None:
    """Add a legend next to the axes."""
    axes.legend(
        frameon=False,
        fontsize="small",
        title=title,
        title_fontsize="small",
        loc="upper left",
        bbox_to_anchor=(1.0, 1.05),
        alignment="left",
    )


def _in_words(name: str, targets: Targets) -> str:
    """Return the name of a figure with its unit."""
    metric, _, percent = name.partition(" ")
    if isinstance(targets, PercentileTargets):
        return f"{metric.upper()} {percent}, {'times alone' if targets.reference else 's'}"
    return f"share of requests\nthat keep {metric.upper()}"


def _steps(axes: Any, edges: Sequence[float], values: Sequence[float | None], **style: Any) -> None:
    axes.stairs([float("nan") if v is None else v for v in values], edges, baseline=None, **style)


def _limits(targets: Targets) -> dict[str, float]:
    """Return the limit of each figure in a verdict."""
    if isinstance(targets, PercentileTargets):
        return {f"{metric} p{percent:g}": limit for metric, percent, limit in targets.limits}
    assert isinstance(targets, RequestTargets)
    return dict.fromkeys(targets.limits, targets.attainment)
