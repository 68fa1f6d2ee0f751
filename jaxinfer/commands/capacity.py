"""``jaxinfer capacity``: the largest rate at which targets are met."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal

import click
from rich.console import Console

from jaxinfer.commands.common import (
    cores,
    refuse,
    say,
    with_limit,
    with_ray,
    with_settings,
    with_workload,
    workload_settings,
)
from jaxinfer.commands.figures import print_json, with_json
from jaxinfer.commands.systems import bound_rate, print_share, with_bound
from jaxinfer.config.run_file import load_run_file

if TYPE_CHECKING:
    from jaxinfer.simulate.capacity import TriedRate


@click.command()
@click.argument("run_file")
@with_workload
@with_limit
@click.option(
    "--slo",
    required=True,
    help="Targets in seconds: for each request, as ttft=1,tpot=0.1 (also tbt, e2e, delay, "
    "normalised); for percentiles, as ttft:p90=2,tbt:p99=0.2; or a YAML file of slowdowns.",
)
@click.option(
    "--attainment", type=float, help="Share of requests that must meet the targets (default: 0.9)."
)
@click.option(
    "--criterion",
    type=click.Choice(["both", "each"]),
    help="The share must meet all targets together (both, the default), or each one (each).",
)
@click.option("--requests-per-gpu", type=click.IntRange(min=1), help="Use N requests for each GPU.")
@click.option(
    "--precision",
    type=click.FloatRange(1e-6, 1, max_open=True),
    default=0.02,
    help="Share by which the rate found may be too low (default: 0.02).",
)
@click.option(
    "--seed", "seed", type=int, multiple=True, help="Seed of the arrivals; may be repeated."
)
@click.option("--seeds", type=click.IntRange(min=1), help="Use the seeds 0 to N - 1.")
@with_bound
@with_ray
@with_settings
@with_json
def capacity(
    run_file: str,
    workload: str | None,
    limit: int | None,
    slo: str,
    attainment: float | None,
    criterion: Literal["both", "each"] | None,
    requests_per_gpu: int | None,
    precision: float,
    seed: tuple[int, ...],
    seeds: int | None,
    bound: bool,
    ray_address: str | None,
    settings: tuple[str, ...],
    as_json: bool,
) -> None:
    """Find the largest request rate at which a modelled cluster meets latency targets."""
    from jaxinfer.simulate.capacity import capacity, met_above, num_gpus, requests_for
    from jaxinfer.simulate.read_targets import read_targets

    if seeds:
        refuse("not for use with --seeds: give one of them", {"--seed": seed})
    refuse("given twice with one value", {"--seed": len(set(seed)) < len(seed)})
    config = load_run_file(run_file, [*settings, *workload_settings(workload, limit)])
    work = config.requests(say, searched=True)
    if requests_per_gpu:
        work = list(requests_for(num_gpus(config), work, requests_per_gpu))
    targets = read_targets(slo, work, attainment, criterion)
    # Before the search: a cluster without a bound is refused at once.
    most = bound_rate(config, work) if bound else None
    console = Console()
    tried: list[TriedRate] = []

    def show(load: "TriedRate") -> None:
        tried.append(load)
        if not as_json:
            console.print(_line(load), soft_wrap=True)

    of_arrivals = tuple(range(seeds)) if seeds else seed or (0,)
    with cores(ray_address) as (map_rates, at_once):
        best = capacity(
            config,
            work,
            targets,
            seeds=of_arrivals,
            precision=precision,
            on_load=show,
            map_rates=map_rates,
            at_once=at_once,
        )
        again = best.rate and met_above(
            config, work, targets, best, of_arrivals, precision, map_rates
        )
    if as_json:
        found = _figures(best) | {"tried": [_figures(load) for load in tried]}
        found["met_again_at"] = again.rate if again else None
        print_json(found | ({"bound_requests_s": most} if bound else {}))
        return
    for line in _found(best):
        console.print(line, soft_wrap=True)
    if again:
        console.print(
            f"the targets are met again at {again.rate:.3g} requests/s: attainment does not fall "
            "with the rate, and the capacity depends on which rates are tried",
            soft_wrap=True,
        )
    if most is not None:
        print_share(most, best.rate)


def _figures(load: "TriedRate") -> dict[str, Any]:
    verdict = load.verdict
    from jaxinfer.simulate.capacity import AT_ONCE

    return {
        "requests_s": load.rate,
        "at_once": load.rate == AT_ONCE,
        "met": verdict.met,
        "attainment": verdict.attainment,
        "figures": verdict.figures,
        "goodput_requests_s": load.goodput,
        "goodput_per_gpu": load.goodput_per_gpu,
        "enough_requests": load.enough,
    }


def _found(best: "TriedRate") -> Iterator[str]:
    """Yield lines on the largest rate, and on whether there were enough requests."""
    from jaxinfer.simulate.capacity import too_few

    if best.rate == 0:
        yield "capacity: 0 requests/s, any rate misses the targets"
        return
    share = best.verdict.attainment
    at = "" if share is None else f" at {share:.1%} attainment"
    yield (
        f"capacity: {best.rate:.3g} requests/s{at}, goodput {best.goodput:.3g} requests/s, "
        f"{best.goodput_per_gpu:.3g} per GPU"
    )
    if best.enough:
        yield too_few(best.rate, best.enough)


def _line(load: "TriedRate") -> str:
    """Return a line on a rate, and how well it meets the targets."""
    from jaxinfer.simulate.capacity import AT_ONCE

    share, figures = load.verdict.attainment, load.verdict.figures
    rate = "all requests at once: " if load.rate == AT_ONCE else f"{load.rate:9.3f} requests/s: "
    if share is None:
        found = [f"{name} {'-' if v is None else f'{v:.3g}'}" for name, v in figures.items()]
        said = "met" if load.verdict.met else "missed"
        return rate + (said if load.goodput is None else f"{said}, {', '.join(found)}")
    at_most = "at most " if load.goodput is None else ""
    each = ", ".join(f"{name} {v:.1%}" for name, v in figures.items())
    more = f" ({each})" if len(figures) > 1 else ""
    return f"{rate}{at_most}{share:.1%} attainment{more}"
