"""A plan as part of a run file: groups on nodes, stages with their layers, and flows."""

from collections.abc import Callable, Mapping, Sequence
from math import ceil
from typing import Any

from jaxinfer.config.costs import GroupCosts
from jaxinfer.papers.hexgen2.capacity import GroupRole
from jaxinfer.papers.hexgen2.flow import Flow, PlacedGroup
from jaxinfer.papers.hexgen2.gpus import Site

# Smallest number of prompts per step if a mean prompt fills a step, because short ones do not.
_FEWEST = 3.0


def names_of(groups: Sequence[PlacedGroup], flow: Flow) -> dict[int, str]:
    """Return the names of groups that have flow, such as prefill0 and decode0, by number."""
    names: dict[int, str] = {}
    for side, role in enumerate(("prefill", "decode")):
        used = sorted({pair[side] for pair in flow.pairs})
        names |= {number: f"{role}{count}" for count, number in enumerate(used)}
    return names


def as_part(
    site: Site,
    groups: Sequence[PlacedGroup],
    flow: Flow,
    engines: Mapping[GroupRole, Mapping[str, Any]],
    prompt: float,
    step_tokens: Callable[[int], int],
    measured: Mapping[str, GroupCosts] | None = None,
) -> dict[str, Any]:
    """Return a plan's run file without model and workload, for simulations and runs.

    Args:
        engines: engine options of each role.
        prompt: mean number of prompt tokens; an instance may have a full step of prompts for each
            of its stages, and one more that waits.
        step_tokens: tokens of a full prefill step of an instance, by its number of stages.
        measured: costs of groups, by the name of their GPU.
    """
    names = names_of(groups, flow)
    part: dict[str, Any] = {"groups": {}, "instances": {}, "simulate": {"groups": {}}}
    most: dict[str, int] = {}
    for number, name in names.items():
        placed, stages = groups[number], []
        for index, (node, tp, start, stop) in enumerate(placed.layers(site)):
            group = f"{name}_{index}"
            part["groups"][group] = {"kind": site.nodes[node].gpu, "devices": tp}
            costs = (measured or {}).get(site.nodes[node].gpu)
            own = costs.model_dump(mode="json", exclude_unset=True) if costs else {}
            part["simulate"]["groups"][group] = {"node": site.names[node], **own}
            stages.append({"group": group, "layers": stop - start})
        part["instances"][name] = {"stages": stages, **engines[placed.role]}
        if placed.role == "decode" and len(stages) > 1:
            policies = part["instances"][name].get("policies", {})
            if not policies.keys() & {"batching", "form_batch"}:  # The latter is the old key.
                part["instances"][name]["policies"] = {"batching": "even_decodes", **policies}
        if placed.role == "prefill":
            part["instances"][name]["max_num_batched_tokens"] = tokens = step_tokens(len(stages))
            most[name] = ceil(max(tokens / prompt, _FEWEST) * (len(stages) + 1))
    flows: dict[str, dict[str, float]] = {}
    for (i, j), rate in flow.pairs.items():
        flows.setdefault(names[i], {})[names[j]] = float(f"{rate:.6g}")
    part["system"] = {"name": "hexgen2", "flows": flows, "max_in_prefill": most}
    return part
