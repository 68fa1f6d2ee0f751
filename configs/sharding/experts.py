"""Whole experts on each device, all else as built in: for ``engine.sharding`` of a run file."""

from jaxinfer.models.sharding import HEADS_AXIS, RULES, Rule

RULES = (
    Rule("*.mlp.*_EDF", {"E": HEADS_AXIS}),
    Rule("*.mlp.*_EFD", {"E": HEADS_AXIS}),
    *RULES,
)
