"""Predictions of layers' times: rates by seconds that are given, memory, rows of products."""

import os
from types import ModuleType

import click
import pytest

from jaxinfer.models.layouts import LAYOUTS
from jaxinfer.sharding.costs import LayoutFlow


@pytest.fixture(scope="module")
def script() -> ModuleType:
    """The script, which asks for devices when it is read; those that come later have their own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XLA_FLAGS", os.environ.get("XLA_FLAGS", ""))
        from scripts.validate import layout_times
    return layout_times


def test_rates_by_the_seconds_of_runs(script: ModuleType) -> None:
    """A machine of known rates gives them back, whatever a launch takes."""
    launch, fixed, one = 1e-3, 2e-4, 4 * script.NUMBERS
    sent = {"all-reduce": 7 / 4, "all-gather": 7 / 8, "all-to-all": 7 / 8}
    runs = {
        "launch": 0,
        "flops": 2 * 512**3 / 1e10,
        "stream": 2 * one / 2e9,
        "fresh": 4 * script.LARGE * (2 / 2e9 + 1 / 3e8),
        "last": 7 / 8 * one / 1e8 + fixed,
    }
    runs |= {f"{rows} rows": script.NUMBERS * rows * 1e-9 for rows in script.ROWS}
    for kind, share in sent.items():
        runs[kind] = share * one / 4e9 + fixed
        runs |= {f"{kind}, small": fixed, f"{kind}, chain": script.CHAIN * fixed}
    found = script.rates({name: launch + seconds for name, seconds in runs.items()})
    expected = launch, 1e10, 2e9, 3e8, 1e8
    got = found.launch, found.flops, found.stream, found.fresh, found.last
    assert got == pytest.approx(expected)
    for each in found.each.values():
        assert each == pytest.approx((4e9, fixed))
    assert found.product == pytest.approx({rows: rows * 1e-9 for rows in script.ROWS})
    # Between those measured, and beyond.
    for rows in (1, 3, 100, 1024):
        assert script.product_s(rows, found) == pytest.approx(rows * 1e-9)
    with pytest.raises(click.ClickException, match=r"^fresh took .* try again"):
        script.rates({name: launch + seconds for name, seconds in runs.items()} | {"fresh": launch})


def test_new_memory_of_gathered_weights(script: ModuleType) -> None:
    """All of fsdp's, of which o and down twice; half of weight_gathered's fits what is there."""
    D, F, KV = 1024, 4096, 512
    found = {
        name: script.fresh_bytes(LayoutFlow(script.MODEL, LAYOUTS[name], script.MESH))
        for name in ("megatron", "weight_gathered", "fsdp")
    }
    numbers = 2 * D * D + 2 * D * KV + 3 * D * F + (D * D + D * F)
    assert found == {"megatron": 0, "weight_gathered": 0, "fsdp": 4 * numbers}


@pytest.mark.parametrize(
    ("measured", "expected"), [((1, 2, 3, 4), 1), ((4, 3, 2, 1), -1), ((1, 3, 2, 4), 2 / 3)]
)
def test_tau(measured: tuple[int, ...], expected: float, script: ModuleType) -> None:
    assert script.tau(list(zip((1, 2, 3, 4), measured, strict=True))) == pytest.approx(expected)
