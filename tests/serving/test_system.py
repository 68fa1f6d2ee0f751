"""Defaults of a system."""

import pytest

from jaxinfer.serving.system import Assignment, NoOptions, System
from jaxinfer.serving.views import ClusterView, Leg


class Plain(System):
    """Says nothing."""


class Watches(System):
    def on_step(self, step, cluster):  # type: ignore[no-untyped-def]
        return ()


VIEW = ClusterView(0.0, {})


def test_a_leg_goes_to_the_end_and_is_fetched_on_demand() -> None:
    assert Leg("A") == Leg("A", None, "on_demand")
    assert Assignment("r", (Leg("A"),)).legs == (Leg("A"),)


def test_defaults() -> None:
    system = Plain()
    assert (system.tick_interval, system.needs_fits, system.ttft_counts_transfer) == (
        None,
        False,
        False,
    )
    assert system.options == NoOptions()
    given = NoOptions()
    assert Plain(given).options is given
    assert (system.check([]), system.report()) == (None, {})
    assert list(system.on_tick(VIEW)) == list(system.on_step(None, VIEW)) == []  # type: ignore[arg-type]
    with pytest.raises(NotImplementedError):
        system.route([], VIEW)


def test_kv_may_go_from_any_instance_to_any_other() -> None:
    assert sorted(Plain().routes(["x", "y", "z"])) == [
        ("x", "y"),
        ("x", "z"),
        ("y", "x"),
        ("y", "z"),
        ("z", "x"),
        ("z", "y"),
    ]


def test_who_watches_steps_needs_the_rows_of_decodes() -> None:
    assert not Plain().needs_decode_rows
    assert Watches().needs_decode_rows
