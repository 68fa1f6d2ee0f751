"""Lengths given in a run file, against scipy's distributions and closed forms."""

import json
import math
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from scipy import stats

from jaxinfer import JaxinferError
from jaxinfer.config.run_file import as_run_file
from jaxinfer.workload.lengths import BenchRequest

COUNT = 6_000


def requests(**options: Any) -> list[BenchRequest]:
    return as_run_file({"workload": {"synthetic": options}}).requests()


def drawn(length: Any, seed: int = 3, count: int = COUNT) -> np.ndarray:
    """Prompts; the outputs' own stream is tested below."""
    found = requests(input_len=length, output_len=7, count=count, seed=seed)
    assert all(item.max_tokens == 7 for item in found)
    return np.array([item.prompt_len for item in found])


def test_fixed() -> None:
    assert (
        requests(input_len=1024, output_len=128, count=3)
        == [BenchRequest(None, 1024, 128, 0.0)] * 3
    )


@pytest.mark.parametrize(
    ("length", "ratio", "least", "most"), [(1000, 0.1, 900, 1100), (5, 0.5, 2, 8), (1, 0.9, 1, 2)]
)
def test_vllm_s_ranges(length: int, ratio: float, least: int, most: int) -> None:
    """Lengths are from floor(L (1 - r)) to ceil(L (1 + r)), at least 1, and equally likely."""
    found = requests(input_len=length, output_len=length, range_ratio=ratio, count=COUNT)
    for values in ([i.prompt_len for i in found], [i.max_tokens for i in found]):
        counts = np.bincount(values, minlength=most + 1)
        assert counts[:least].sum() == 0
        assert len(counts) == most + 1
        assert stats.chisquare(counts[least:]).pvalue > 0.01


def test_uniform() -> None:
    counts = np.bincount(drawn({"kind": "uniform", "min": 3, "max": 30}))
    assert (counts[:3].sum(), len(counts)) == (0, 31)
    assert stats.chisquare(counts[3:]).pvalue > 0.01


@pytest.mark.parametrize(
    ("options", "median", "sigma"),
    [
        ({"median": 20_000, "sigma": 0.7}, 20_000, 0.7),
        # sigma^2 = ln(1 + (s/m)^2), mu = ln m - sigma^2 / 2: by s = m, ln 2.
        ({"mean": 30_000, "std": 30_000}, 30_000 / math.sqrt(2), math.sqrt(math.log(2))),
    ],
)
def test_lognormal(options: Mapping[str, float], median: float, sigma: float) -> None:
    """So long that rounding is far below what the test can see."""
    found = drawn({"kind": "lognormal", **options})
    assert stats.kstest(found, stats.lognorm(sigma, scale=median).cdf).pvalue > 0.01
    if "mean" in options:
        assert abs(found.mean() - options["mean"]) < 4 * found.std() / math.sqrt(COUNT)


# The log-normal with its 16th and 84th percentile.
LAWS: list[dict[str, Any]] = [
    {"kind": "lognormal", "median": 500, "sigma": 1.0},
    {"kind": "percentiles", "values": {100 * stats.norm.cdf(z): 500 * math.e**z for z in (-1, 1)}},
]


@pytest.mark.parametrize("given", LAWS)
def test_clipping_puts_the_tails_at_the_ends(given: dict[str, Any]) -> None:
    found = drawn({**given, "min": 100, "max": 2000})
    law = stats.lognorm(1.0, scale=500)
    assert (found.min(), found.max()) == (100, 2000)
    # Half a token is what rounding moves.
    for share, expected in (
        ((found == 100).mean(), law.cdf(100.5)),
        ((found == 2000).mean(), law.sf(1999.5)),
    ):
        assert abs(share - expected) < 4 * math.sqrt(expected * (1 - expected) / COUNT)


def test_no_draw_is_too_far_out() -> None:
    """Half of such draws are below any float's logarithm, half above."""
    law = {"kind": "lognormal", "median": 500, "sigma": 1e5, "min": 3, "max": 2000}
    assert set(drawn(law, count=40)) == {3, 2000}
    assert (
        drawn({"kind": "percentiles", "values": {50: 2, 50.001: 1e300}, "max": 9}, 3, 40).max() == 9
    )


TABLES: list[dict[int, int]] = [
    {50: 4_000, 90: 40_000},
    {1: 300, 50: 4_000, 99: 90_000},
    {0: 1_000, 50: 4_000, 100: 64_000},
    {0: 1_000, 100: 64_000},
    {0: 1_000, 20: 2_000, 60: 2_500, 90: 70_000},
]


@pytest.mark.parametrize("table", TABLES)
def test_percentiles(table: dict[int, int]) -> None:
    """Straight between the points: by normal scores, or where 0 or 100 is one, by shares."""
    found = np.sort(drawn({"kind": "percentiles", "values": table}))
    for percent, length in table.items():
        if percent in (0, 100):
            continue  # The bounds, below.
        share, error = percent / 100, math.sqrt(percent / 100 * (1 - percent / 100) / COUNT)
        assert abs((found <= length).mean() - share) <= 4 * error + 1e-9
    points = [(p / 100, math.log(length)) for p, length in table.items()]

    def quantile(share: float) -> float:
        """The inverse of what is drawn, by itself."""
        pairs = list(pairwise(points))
        (a, fa), (b, fb) = next((p for p in pairs if share < p[1][0]), pairs[-1])
        if a > 0 and b < 1:
            a, b, share = (float(stats.norm.ppf(x)) for x in (a, b, share))
        return math.exp(fa + (fb - fa) * (share - a) / (b - a))

    # As quantiles at so many shares: a KS test's largest distance.
    shares = (np.arange(COUNT) + 0.5) / COUNT
    expected = np.array([quantile(share) for share in shares])
    assert stats.ks_2samp(found, expected).pvalue > 0.01
    if 0 in table:
        assert found.min() >= table[0]
    if 100 in table:
        assert found.max() <= table[100]


def test_prompts_and_outputs_have_streams_of_their_own() -> None:
    law = {"kind": "lognormal", "median": 300, "sigma": 0.8}
    both = requests(input_len=law, output_len=law, count=5_000, seed=1)
    other = requests(
        input_len=law, output_len={"kind": "uniform", "min": 1, "max": 9}, count=5_000, seed=1
    )
    prompts = [item.prompt_len for item in both]
    assert prompts == [item.prompt_len for item in other]
    assert prompts != [
        item.prompt_len for item in requests(input_len=law, output_len=law, count=5_000, seed=2)
    ]
    assert abs(np.corrcoef(prompts, [item.max_tokens for item in both])[0, 1]) < 4 / math.sqrt(5000)


def test_a_record_of_it_in_json_is_the_same() -> None:
    """A run's record keeps the workload such that it draws the same requests."""
    law = {"kind": "percentiles", "values": {50: 3, 90.5: 9}}
    ramp = {"kind": "ramp", "from": 1, "to": 3.5, "over": 3}
    drawn = {"input_len": law, "output_len": 9, "range_ratio": 0.5, "count": 50}
    config = as_run_file({"workload": {"synthetic": drawn, "arrivals": ramp}})
    kept = json.dumps(config.model_dump(mode="json", exclude_unset=True))
    assert as_run_file(json.loads(kept)).requests() == config.requests()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "synthetic: give lengths, a name in .*, or input_len and output_len"),
        ({"input_len": 5}, "synthetic: give lengths"),
        ({"lengths": "sharegpt", "input_len": 5}, "input_len: lengths is sharegpt, which has both"),
        ({"input_len": 0, "output_len": 1}, "input_len: must be an integer >= 1, or a mapping"),
        ({"input_len": "x", "output_len": 1}, "input_len: must be an integer >= 1"),
        ({"input_len": {"kind": "unifrom"}, "output_len": 1}, "input_len"),
        ({"input_len": {"kind": "uniform", "min": 3}, "output_len": 1}, "uniform needs max"),
        (
            {"input_len": {"kind": "uniform", "min": 3, "max": 2}, "output_len": 1},
            "min is 3, must be at most max, 2",
        ),
        ({"input_len": {"kind": "lognormal", "median": 3}, "output_len": 1}, "median and sigma"),
        (
            {"input_len": {"kind": "lognormal", "median": 3, "std": 1}, "output_len": 1},
            "median and sigma, or mean and std",
        ),
        (
            {"input_len": {"kind": "uniform", "min": 1, "max": 2, "std": 1}, "output_len": 1},
            "std is not for kind uniform",
        ),
        ({"input_len": {"kind": "percentiles", "values": {50: 3}}, "output_len": 1}, "two percen"),
        (
            {"input_len": {"kind": "percentiles", "values": {"p50": 3, 90: 9}}, "output_len": 1},
            "'p50' is no percentile",
        ),
        (
            {"input_len": {"kind": "percentiles", "values": {0: 3, 50: 9}}, "output_len": 1},
            "leave open what lies beyond",
        ),
        (
            {"input_len": {"kind": "percentiles", "values": {50: 9, 90: 3}}, "output_len": 1},
            "must rise",
        ),
        (
            {"input_len": {"kind": "percentiles", "values": {50: 0, 90: 9}}, "output_len": 1},
            "lengths from 1 on",
        ),
        (
            {"input_len": {"kind": "percentiles", "values": {50: 3, 101: 9}}, "output_len": 1},
            "must be from 0 to 100",
        ),
        (
            {
                "input_len": {"kind": "uniform", "min": 1, "max": 2},
                "output_len": {"kind": "uniform", "min": 1, "max": 2},
                "range_ratio": 0.5,
            },
            "range_ratio: is for an input_len or output_len that is a number",
        ),
    ],
)
def test_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(JaxinferError, match=message) as error:
        requests(**options)
    assert "\n" not in str(error.value)
