"""Layouts: tables by name that place a model's parameters, activations and KV on a mesh.

A logical axis is a letter of a name's suffix (``layers.0.attn.q_DNH`` has D, N and H). Each table
assigns some of them to axes of the mesh; the others are not cut. Models do not depend on layouts.
This file needs no JAX.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from fnmatch import fnmatchcase


class Axes(Enum):
    """Placeholders for axes of the mesh to which a layout is applied, in the mesh's order."""

    ALL = "all axes"
    FIRST = "the first axis"
    REST = "all axes but the first"


ALL, FIRST, REST = Axes.ALL, Axes.FIRST, Axes.REST

# The axis of a mesh without named axes.
DEFAULT_AXIS = "tp"
# One axis of the mesh or those above, or several of them as one; the first is the outer one.
Place = str | Axes | tuple[str | Axes, ...]
# For each logical axis, its place.
Places = Mapping[str, Place]

# Logical axes of the activations that models name; S are the rows to sample from.
ACTIVATIONS = {
    "residual": "TD",
    "attention_inputs": "TD",
    "queries": "TNH",
    "new_kv": "TKH",
    "heads": "TNH",
    "kv": "TKH",
    "attention_outputs": "TNH",
    "ffn_inputs": "TD",
    "ffn": "TF",
    "ffn_outputs": "TF",
    "experts": "TEF",
    "logits": "SV",
}


@dataclass(frozen=True)
class Rule:
    """The placement of parameters whose path matches ``pattern`` (as in file names).

    Attributes:
        axes: logical axis -> axes of the mesh; other logical axes are not cut.
    """

    pattern: str
    axes: Places = field(hash=False)


@dataclass(frozen=True)
class Layout:
    """Three tables of places, and the axes over which weights are gathered.

    Attributes:
        parameters: rules for parameters; the first one that matches a parameter's path applies.
        activations: places of activations, by name (see ``ACTIVATIONS``). XLA decides for missing
            names. ``residual``: the stream between the parts of a layer. ``attention_inputs`` and
            ``ffn_inputs``: after the norms. ``queries`` and ``new_kv``: as computed. ``heads`` of
            queries and of results, and ``kv``: as used in attention and stored. ``ffn``: between
            its products. ``attention_outputs`` and ``ffn_outputs``: as multiplied. ``experts``: if
            all compute all tokens. ``logits``.
        kv: places of KV pages: K, heads; S, sequences; C, tokens of each.
        gathered: axes of the mesh over which a layer's weights are gathered before they are used.
    """

    parameters: tuple[Rule, ...]
    activations: Mapping[str, Places] = field(default_factory=dict, hash=False)
    kv: Places = field(default_factory=dict, hash=False)
    gathered: Place = ()


# Heads and feed-forward columns are cut: two all-reduces per layer (Shoeybi et al., 2019).
_COLUMNS = (Rule("*", {"N": ALL, "K": ALL, "F": ALL}),)
_BY_HEADS = {"K": ALL}
# Scales of norms are small, and those of single heads are not longer than a head.
_NORMS = Rule("*norm.*", {})

LAYOUTS: dict[str, Layout] = {
    "megatron": Layout(_COLUMNS, kv=_BY_HEADS),
    # Tokens are cut where megatron's are whole: each all-reduce becomes a reduce-scatter and an
    # all-gather (Korthikanti et al., 2022).
    "sequence_parallel": Layout(
        _COLUMNS,
        {
            "residual": {"T": ALL},
            "attention_inputs": {},
            "heads": {"N": ALL},
            "kv": {"K": ALL},
            "ffn_inputs": {},
            "ffn": {"F": ALL},
        },
        kv=_BY_HEADS,
    ),
    # Rows are on one axis, columns on the others (Pope et al., 2022, section 3.2.2). Partial sums
    # over rows are scattered over the axis that they come from, and gathered where they are
    # multiplied.
    "weight_stationary_2d": Layout(
        (_NORMS, Rule("layers.*", {"D": FIRST, "N": REST, "K": REST, "F": REST})),
        {
            "residual": {"D": ALL},
            "attention_inputs": {"D": FIRST},
            "heads": {"N": (REST, FIRST)},
            "attention_outputs": {"N": REST},
            "kv": {"K": (REST, FIRST)},
            "ffn_inputs": {"D": FIRST},
            "ffn": {"F": (REST, FIRST)},
            "ffn_outputs": {"F": REST},
        },
        kv={"K": (REST, FIRST)},
    ),
    # Tokens and rows are on one axis, columns on the others; rows are gathered (section 3.2.3).
    "weight_gathered": Layout(
        (_NORMS, Rule("layers.*", {"D": FIRST, "N": REST, "K": REST, "F": REST})),
        {
            "residual": {"T": FIRST},
            "attention_inputs": {"T": FIRST},
            "queries": {"T": FIRST, "N": REST},
            "new_kv": {"T": FIRST, "K": REST},
            "heads": {"N": (REST, FIRST)},
            "attention_outputs": {"T": FIRST, "N": REST},
            "kv": {"K": (REST, FIRST)},
            "ffn_inputs": {"T": FIRST},
            "ffn": {"T": FIRST, "F": REST},
        },
        kv={"K": (REST, FIRST)},
        gathered=FIRST,
    ),
    # Each device attends for its tokens, and has the KV of all tokens; the feed-forward part is
    # megatron's.
    "attention_dp": Layout(
        (Rule("layers.*", {"F": ALL}),),
        {
            "residual": {"T": ALL},
            "attention_inputs": {"T": ALL},
            "queries": {"T": ALL},
            "new_kv": {"T": ALL},
            "heads": {"T": ALL},
            "kv": {},
            "ffn_inputs": {},
            "ffn": {"F": ALL},
        },
    ),
    # Weights are whole, and tokens are cut; each device has the KV of all tokens here, too.
    "context_parallel": Layout(
        (),
        {
            "residual": {"T": ALL},
            "attention_inputs": {"T": ALL},
            "queries": {"T": ALL},
            "new_kv": {"T": ALL},
            "heads": {"T": ALL},
            "kv": {},
            "ffn_inputs": {"T": ALL},
            "ffn": {"T": ALL},
            "experts": {"T": ALL},
        },
    ),
    # Experts are whole; attention, and layers without experts, are megatron's.
    "expert_parallel": Layout((Rule("*_E??", {"E": ALL}), *_COLUMNS), kv=_BY_HEADS),
    # The same, with tokens cut as in sequence_parallel. They are sent to their experts and back
    # (Lepikhin et al., 2021).
    "expert_all_to_all": Layout(
        (Rule("*_E??", {"E": ALL}), *_COLUMNS),
        {
            "residual": {"T": ALL},
            "attention_inputs": {},
            "heads": {"N": ALL},
            "kv": {"K": ALL},
            "ffn_inputs": {"T": ALL},
            "ffn": {"F": ALL},
            "experts": {"E": ALL},
        },
        kv=_BY_HEADS,
    ),
    # Parameters are cut by rows, and gathered where they are used; tokens are cut (Zhao et al.,
    # 2023).
    "fsdp": Layout(
        (_NORMS, Rule("layers.*", {"D": ALL})),
        {
            "residual": {"T": ALL},
            "attention_inputs": {"T": ALL},
            "queries": {"T": ALL},
            "new_kv": {"T": ALL},
            "heads": {"N": ALL},
            "attention_outputs": {"T": ALL},
            "kv": {"K": ALL},
            "ffn_inputs": {"T": ALL},
            "ffn": {"T": ALL},
            "experts": {"T": ALL},
        },
        kv=_BY_HEADS,
        gathered=ALL,
    ),
}


# Layouts that are only priced: their KV is cut by more than heads, unlike the pages of engines.
PRICED: dict[str, Layout] = {
    # Each device attends for the sequences whose KV it keeps (Pope et al., 2022, section 3.3).
    # Queries are exchanged, heads for sequences, and results are sent back. All else is megatron's.
    "attention_by_sequences": Layout(
        (Rule("*", {"N": ALL, "F": ALL}),),
        {
            "queries": {"N": ALL},
            "new_kv": {},
            "heads": {"T": ALL},
            "kv": {"T": ALL},
            "attention_outputs": {"N": ALL},
        },
        kv={"S": ALL},
    ),
    # Each device attends with all heads to its part of each sequence; the parts of the softmax are
    # combined (Bhatia et al., 2025).
    "attention_by_tokens": Layout(
        (Rule("*", {"N": ALL, "F": ALL}),),
        {
            "queries": {"N": ALL},
            "new_kv": {},
            "heads": {},
            "kv": {},
            "attention_outputs": {"N": ALL},
        },
        kv={"C": ALL},
    ),
}


def in_use(layout: Layout, axes: Sequence[str]) -> Layout:
    """Return the layout with each place written as a tuple of this mesh's axes."""

    def places(table: Places) -> dict[str, tuple[str, ...]]:
        return {letter: named(place, axes) for letter, place in table.items()}

    return replace(
        layout,
        parameters=tuple(Rule(rule.pattern, places(rule.axes)) for rule in layout.parameters),
        activations={name: places(table) for name, table in layout.activations.items()},
        kv=places(layout.kv),
        gathered=named(layout.gathered, axes),
    )


def named(place: Place, axes: Sequence[str]) -> tuple[str, ...]:
    """Return the names of this mesh's axes that a place stands for."""
    if place is ALL:
        return tuple(axes)
    if place is FIRST:
        return tuple(axes[:1])
    if place is REST:
        return tuple(axes[1:])
    if isinstance(place, str):
        return (place,)
    assert isinstance(place, tuple)
    return tuple(name for each in place for name in named(each, axes))


def letters_of(path: str) -> str:
    """Return the logical axes of a parameter: ``layers.0.attn.q_DNH`` has D, N and H."""
    return path.rpartition("_")[2]


def table_of(path: str, layout: Layout) -> Places:
    """Return the places of a parameter, by the first rule that matches its path."""
    return next((rule.axes for rule in layout.parameters if fnmatchcase(path, rule.pattern)), {})


def table_in_use(path: str, layout: Layout, axes: Sequence[str]) -> Places:
    """Return the places of a parameter as it is multiplied, after gathering."""
    gathered = named(layout.gathered, axes)
    return {
        letter: tuple(axis for axis in named(place, axes) if axis not in gathered)
        for letter, place in table_of(path, layout).items()
    }


def ways(place: Place, mesh: Mapping[str, int]) -> int:
    """Return into how many pieces a place cuts an axis, on a mesh whose axes have these sizes."""
    return math.prod(mesh[axis] for axis in named(place, list(mesh)))


def most_ways(letters: str, layout: Layout, mesh: Mapping[str, int]) -> int:
    """Return the least common multiple of the numbers of pieces of these logical axes."""
    tables = [rule.axes for rule in layout.parameters]
    tables += [*layout.activations.values(), layout.kv]
    cuts = (ways(table[letter], mesh) for table in tables for letter in letters if letter in table)
    return math.lcm(*cuts)
