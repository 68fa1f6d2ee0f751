"""Whole experts on each device, all else as built in: for ``engine.layout`` of a run file."""

from dataclasses import replace

from jaxinfer.models.layouts import ALL, LAYOUTS, Rule

MEGATRON = LAYOUTS["megatron"]
EXPERTS = (Rule("*.mlp.*_EDF", {"E": ALL}), Rule("*.mlp.*_EFD", {"E": ALL}))
LAYOUT = replace(MEGATRON, parameters=(*EXPERTS, *MEGATRON.parameters))
