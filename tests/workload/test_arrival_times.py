"""Times of traces that count from their first request on, or not at all; odd distributions."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from jaxinfer import JaxinferError
from jaxinfer.commands.capacity import capacity
from jaxinfer.commands.simulate import simulate as simulate_command
from jaxinfer.config.run_file import as_run_file
from jaxinfer.workload.synthetic import Synthetic

ROWS = [(300 + 7 * i, 20 + i, 0.5 * i) for i in range(9)]
RUN = {
    "model": "llama-3-8b",
    "groups": {"g": {"kind": "A10"}},
    "instances": {"i": {"group": "g"}},
}


def trace(folder: Path, kind: str, at: float) -> str:
    """A window of a trace whose first request comes at ``at``."""
    path = folder / f"{kind}{at}.{'jsonl' if kind == 'mooncake' else 'csv'}"
    head, line = {
        "vidur": ("num_prefill_tokens,num_decode_tokens,arrived_at\n", "{0},{1},{2}\n"),
        "burst": ("Timestamp,Request tokens,Response tokens\n", "{2},{0},{1}\n"),
        "azure": ("TIMESTAMP,ContextTokens,GeneratedTokens\n", ""),
        "mooncake": ("", ""),
    }[kind]
    text = head
    for prompt, output, time in ROWS:
        if kind == "mooncake":
            row = {"timestamp": int((time + at) * 1000), "input_length": prompt}
            text += json.dumps(row | {"output_length": output}) + "\n"
        elif kind == "azure":
            minutes, seconds = divmod(time + at, 60)
            text += f"2023-11-16 18:{int(minutes):02}:{seconds:05.2f},{prompt},{output}\n"
        else:
            text += line.format(prompt, output, time + at)
    path.write_text(text)
    return str(path)


@pytest.mark.parametrize("kind", ["vidur", "burst", "azure", "mooncake"])
def test_a_window_that_begins_late_begins_at_0(tmp_path: Path, kind: str) -> None:
    notes: list[str] = []
    for at in (0, 500):
        path = trace(tmp_path, kind, at)
        config = as_run_file({"workload": {"trace": path, "arrivals": "trace"}})
        arrivals = [item.arrival for item in config.requests(notes.append)]
        assert arrivals == [time for *_, time in ROWS]
    late = [f"{path}: its first request comes at 500 s, which counts as 0"]
    assert notes == ([] if kind == "azure" else late)


@pytest.mark.parametrize("arrivals", [None, {"kind": "poisson", "rate": 2}, "at_once"])
def test_times_that_do_not_count_are_named(tmp_path: Path, arrivals: Any) -> None:
    path = trace(tmp_path, "vidur", 0)
    data = {"synthetic": "azure_code"} | ({"arrivals": arrivals} if arrivals else {})
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(RUN | {"workload": data}))
    given = [str(tmp_path / "run.yaml"), "--workload", path]
    kind = "poisson" if isinstance(arrivals, dict) else "at_once"
    note = f"{path}: its times do not count, since workload.arrivals is {kind}: --set "
    done = CliRunner().invoke(simulate_command, given, catch_exceptions=False)
    assert done.stderr == f"{note}workload.arrivals=trace takes them\n"
    given += ["--set", "workload.arrivals=trace"]
    done = CliRunner().invoke(simulate_command, given, catch_exceptions=False)
    assert done.stderr == ""
    # The time to the last arrival, and what it takes.
    assert "wall time" in done.stdout


def test_a_search_for_a_rate_says_that_times_do_not_count(tmp_path: Path) -> None:
    path = trace(tmp_path, "vidur", 0)
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(RUN))
    given = [str(tmp_path / "run.yaml"), "--workload", path, "--slo", "ttft=1e-9"]
    done = CliRunner().invoke(capacity, given, catch_exceptions=False)
    assert done.stderr == f"{path}: its times do not count, each rate is of Poisson arrivals\n"
    with pytest.raises(JaxinferError, match="--seed is given twice with one value"):
        CliRunner().invoke(capacity, [*given, "--seed", "1", "--seed", "1"], catch_exceptions=False)


def test_no_more_are_drawn_than_are_taken() -> None:
    """The same as the first of all."""
    lengths = {"kind": "uniform", "min": 1, "max": 9}
    options = {"input_len": lengths, "output_len": lengths}
    many = Synthetic.model_validate(options | {"count": 10**12})
    few = Synthetic.model_validate(options | {"count": 50})
    assert many.requests(limit=10) == few.requests(limit=10) == few.requests()[:10]
    assert few.requests(limit=60) == few.requests()
    config = as_run_file({"workload": {"synthetic": options | {"count": 10**12}, "limit": 7}})
    assert len(config.requests()) == 7


@pytest.mark.parametrize(
    "lengths",
    [
        {"kind": "lognormal", "mean": 1e-300, "std": 1e300},
        {"kind": "lognormal", "mean": 1e300, "std": 1e-300},
        {"kind": "lognormal", "mean": 1e300, "std": 0.0, "max": 9},
        {"kind": "lognormal", "median": 1e300, "sigma": 1e300, "max": 9},
        {"kind": "lognormal", "median": 5e-324, "sigma": 0.0},
        {"kind": "percentiles", "values": {1: 1.0, 99: 1e300}, "max": 9},
        {"kind": "uniform", "min": 1, "max": 10**400},
    ],
)
def test_odd_distributions_have_lengths(lengths: dict[str, Any]) -> None:
    drawn = Synthetic.model_validate({"input_len": lengths, "output_len": 3, "count": 50})
    assert all(item.prompt_len >= 1 for item in drawn.requests())


def test_a_deviation_as_large_as_the_mean_is_as_before() -> None:
    """sigma^2 = ln(1 + (std / mean)^2), whichever way it is reckoned."""
    from jaxinfer.workload.distribution import Lengths

    for power in (0, 20, 43, 44, 60):
        std = 10.0**power
        lengths = Lengths.model_validate({"kind": "lognormal", "mean": 1.0, "std": std})
        _, sigma = lengths._of_the_logarithm()
        assert sigma**2 == pytest.approx(math.log1p(std**2))


@pytest.mark.parametrize(
    ("arrivals", "last"),
    [
        ({"kind": "gamma", "rate": 2.0, "cv": 1e-200}, 2.0),
        ({"kind": "gamma", "rate": 2.0, "cv": 1e-9}, 2.0),
        ({"kind": "gamma", "rate": 2.0, "cv": 1e4}, None),
        ({"kind": "gamma", "rate": 2.0, "cv": 1e200}, "cv is 1e.200, must be"),
        ({"kind": "poisson", "rate": 5e-324}, "must be within 1e.09"),
        ({"kind": "gamma", "rate": 5e-324, "cv": 1e3}, "must be within 1e.09"),
        ({"kind": "poisson", "rate": 1e308}, 0.0),
        ({"kind": "interval", "seconds": 1e308}, "must be within 1e.09"),
        ({"kind": "ramp", "from": 0.0, "to": 1e-160, "over": 1e165}, "must be within 1e.09"),
        ({"kind": "ramp", "from": 5.0, "to": 1e-200, "over": 1.0}, None),
        ({"kind": "ramp", "from": 1e308, "to": 1e308, "over": 1e308}, 0.0),
        ({"kind": "closed", "concurrency": 1, "think_s": 1e308}, "think_s is 1e.308, must be"),
    ],
)
def test_odd_arrivals_have_times_or_are_refused(arrivals: Any, last: float | str | None) -> None:
    lengths = {"input_len": 1, "output_len": 1, "count": 5}
    try:
        config = as_run_file({"workload": {"synthetic": lengths, "arrivals": arrivals}})
        times = [item.arrival for item in config.requests()]
    except JaxinferError as error:
        assert last is None or isinstance(last, str)
        if last:
            with pytest.raises(JaxinferError, match=last):
                raise error
        return
    assert times == sorted(times)
    assert not isinstance(last, str)
    if last is not None:
        assert times[-1] == pytest.approx(last, abs=1e-6)
