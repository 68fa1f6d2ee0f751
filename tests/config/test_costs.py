"""The section ``simulate``: what holds for a group with its own costs, and what rules out what."""

from typing import Any

import pytest

from jaxinfer import JaxinferError
from jaxinfer.config.costs import GroupCosts, SimulateOptions
from jaxinfer.config.step_costs import (
    CurveCosts,
    DecodeCosts,
    LinearCosts,
    PhaseCosts,
    PrefillCosts,
)

LINEAR = LinearCosts(step_s=0.5)
PHASES = PhaseCosts(prefill=PrefillCosts(step_s=0.5), decode=(DecodeCosts(step_s=0.5),))


def held(common: dict[str, Any], own: dict[str, Any]) -> tuple[Any, ...]:
    """Return the shares of the peaks, the tables and the coefficients of ``g``, beside ``h``."""
    options = SimulateOptions(**common, groups={"g": GroupCosts(**own), "h": GroupCosts()})
    found, other = options.of("g"), options.of("h")
    assert (other.tables, other.linear) == (options.tables, options.linear)
    return found.flops, found.bandwidth, found.tables, found.linear


def test_what_is_not_stated() -> None:
    found = SimulateOptions().of("g")
    assert (found.flops, found.bandwidth, found.fit) == (0.6, 0.7, "relative")
    assert (found.step_s, found.sequence_s, found.hop_s, found.reserve_gb) == (0, 0, 0, None)


@pytest.mark.parametrize("common", [{"tables": "all"}, {"linear": LINEAR}])
def test_a_group_s_own_kind_of_costs_takes_the_place_of_the_others(common: dict[str, Any]) -> None:
    assert held(common, {"flops": 0.5}) == (0.5, 0.7, None, None)
    assert held(common, {"bandwidth": 0.5}) == (0.6, 0.5, None, None)
    assert held(common, {"tables": "own"}) == (0.6, 0.7, "own", None)
    other = LinearCosts(token_s=0.25)
    assert held(common, {"linear": other}) == (0.6, 0.7, None, other)
    kept = common.get("tables"), common.get("linear")
    assert held(common, {"reserve_gb": 2.0}) == (0.6, 0.7, *kept)


@pytest.mark.parametrize("options", [GroupCosts, SimulateOptions])
@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ({"tables": "x"}, ("flops", "bandwidth")),
        ({"linear": LINEAR}, ("flops", "bandwidth", "step_s", "sequence_s")),
        ({"phases": PHASES}, ("flops", "bandwidth", "step_s", "sequence_s")),
        ({"curves": CurveCosts(file="x")}, ("flops", "bandwidth", "step_s", "sequence_s")),
    ],
)
def test_what_has_no_use_beside_another_kind(
    options: Any, kind: dict[str, Any], names: tuple[str, ...]
) -> None:
    for name in ("flops", "bandwidth", "step_s", "sequence_s"):
        if name in names:
            with pytest.raises(
                JaxinferError, match=f"^{name} has no effect with {next(iter(kind))}"
            ):
                options(**kind, **{name: 0.5})
        else:
            assert getattr(options(**kind, **{name: 0.5}), name) == 0.5


@pytest.mark.parametrize(
    ("options", "name", "value", "bound"),
    [
        *(
            (options, name, value, bound)
            for options in (GroupCosts, SimulateOptions)
            for name, value, bound in (
                ("flops", 0.0, "greater than 0"),
                ("flops", 1.01, "less than or equal to 1"),
                ("bandwidth", 0.0, "greater than 0"),
                ("bandwidth", 1.01, "less than or equal to 1"),
                ("step_s", -1.0, "greater than or equal to 0"),
                ("sequence_s", -1.0, "greater than or equal to 0"),
                ("reserve_gb", -1.0, "greater than or equal to 0"),
            )
        ),
        (SimulateOptions, "hop_s", -1.0, "greater than or equal to 0"),
    ],
)
def test_numbers_beyond_their_bounds_are_refused(
    options: Any, name: str, value: float, bound: str
) -> None:
    with pytest.raises(JaxinferError, match=f"^{name} is {value}, must be {bound}$"):
        options(**{name: value})


def test_a_share_may_be_all_and_a_time_nothing() -> None:
    for options in (GroupCosts, SimulateOptions):
        found = options(flops=1.0, bandwidth=1.0, step_s=0.0, sequence_s=0.0, reserve_gb=0.0)
        assert (found.flops, found.bandwidth, found.step_s, found.sequence_s) == (1, 1, 0, 0)


def test_a_null_has_no_use_and_needs_none() -> None:
    assert GroupCosts(tables="x", flops=None).tables == "x"


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ({"folder": "x", "backend": "vllm"}, r"tables.*version.*is missing"),
        ({"folder": "x", "backend": "vllm", "version": "1", "fp8": "rows"}, r"fp8 is 'rows'"),
        ({"folder": "x", "backend": "vllm", "version": "1", "expert_parallel": 0}, r"expert_para"),
        (7, r"must be a folder, or a mapping of folder, backend, version, not 7"),
    ],
)
def test_mistakes_in_published_tables_are_named(tables: object, message: str) -> None:
    for kind in (GroupCosts, SimulateOptions):
        with pytest.raises(JaxinferError, match=message) as found:
            kind(tables=tables)
        assert "\n" not in str(found.value)


def test_skew_has_no_use_beside_coefficients() -> None:
    with pytest.raises(JaxinferError, match=r"^skew has no effect with linear"):
        SimulateOptions(linear={"step_s": 1.0}, skew=True)
