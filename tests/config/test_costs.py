"""The section ``simulate``: what holds for a group with its own costs, and what rules out what."""

from typing import Any

import pytest

from jaxinfer import JaxinferError
from jaxinfer.config.costs import GroupCosts, SimulateOptions
from jaxinfer.simulate.linear import LinearCosts

LINEAR = LinearCosts(step_s=0.5)


def held(common: dict[str, Any], own: dict[str, Any]) -> tuple[Any, ...]:
    """Of a group ``g`` beside another one: shares of the peaks, tables, coefficients."""
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
    ],
)
def test_what_has_no_use_beside_another_kind(
    options: Any, kind: dict[str, Any], names: tuple[str, ...]
) -> None:
    for name in ("flops", "bandwidth", "step_s", "sequence_s"):
        if name in names:
            with pytest.raises(
                JaxinferError, match=f"^{name} has no use beside {next(iter(kind))}"
            ):
                options(**kind, **{name: 0.5})
        else:
            assert getattr(options(**kind, **{name: 0.5}), name) == 0.5
