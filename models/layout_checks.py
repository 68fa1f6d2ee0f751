"""Checks of layouts before anything is loaded; errors are one line."""

from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase

from jaxinfer.errors import JaxinferError
from jaxinfer.hardware.catalogue import ModelShape
from jaxinfer.models.config import ModelConfig
from jaxinfer.models.layouts import (
    ACTIVATIONS,
    LAYOUTS,
    Axes,
    Layout,
    Place,
    Places,
    Rule,
    letters_of,
    named,
    ways,
)
from jaxinfer.options.validation import did_you_mean, shown


def check_tables(layout: Layout) -> None:
    """Check the tables of a user's file.

    Raises:
        JaxinferError: something is not a table, or names an axis that no model has.
    """
    if not isinstance(layout.parameters, tuple):
        raise JaxinferError(
            f"parameters must be a tuple of jaxinfer.models.layouts.Rule, not "
            f"{shown(layout.parameters)}"
        )
    for rule in layout.parameters:
        if not isinstance(rule, Rule):
            raise JaxinferError(f"{shown(rule)} must be a jaxinfer.models.layouts.Rule")
    if not isinstance(layout.activations, Mapping):
        raise JaxinferError(f"activations must be a table, not {shown(layout.activations)}")
    for name in layout.activations:
        if name not in ACTIVATIONS:
            raise JaxinferError(f"no activation {name!r}: {did_you_mean(name, ACTIVATIONS)}")
    for name, table in _tables(layout):
        known = _letters_of(name)
        if not isinstance(table, Mapping):
            raise JaxinferError(f"{name} must be a table of axes, not {shown(table)}")
        for letter, place in table.items():
            if known and letter not in known:
                raise JaxinferError(f"{name} has no axis {shown(letter)}: known: {known}")
            _check_place(f"{letter} of {name}", place)
    _check_place("gathered", layout.gathered)
    for name in ("heads", "kv"):
        if "H" in layout.activations.get(name, {}):
            raise JaxinferError(f"H of {name} is cut, attention needs each head whole")


def check_names(layout: Layout, mesh: Mapping[str, int]) -> None:
    """Check that the mesh has all axes that the layout names.

    Raises:
        JaxinferError: an axis is missing.
    """
    for name, table in _tables(layout):
        for letter, place in table.items():
            _check_there(f"{letter} of {name}", place, mesh)
    _check_there("gathered", layout.gathered, mesh)


def check_rules(layout: Layout, names: Sequence[str], layers: int) -> None:
    """Check that each rule matches a parameter, and cuts axes that the parameter has.

    Rules of shipped layouts are for all models, and some may match nothing.

    Args:
        names: paths of all parameters of the same model with one layer.
        layers: number of layers of the model.

    Raises:
        JaxinferError: a rule, or an axis of one, cuts nothing.
    """
    first = "layers.0."
    paths = [
        f"layers.{layer}.{name.removeprefix(first)}" if name.startswith(first) else name
        for name in names
        for layer in range(layers if name.startswith(first) else 1)
    ]
    own = own_rules(layout)
    taken: set[str] = set()
    for rule in layout.parameters:
        matched = {path for path in paths if fnmatchcase(path, rule.pattern)}
        held = matched - taken
        taken |= matched
        if rule in own:
            _check_rule(rule, matched, held, [name.replace(".0.", ".*.") for name in names])


def own_rules(layout: Layout) -> list[Rule]:
    """Return the rules that are in no shipped layout."""
    shipped = [rule for each in LAYOUTS.values() for rule in each.parameters]
    return [rule for rule in layout.parameters if rule not in shipped]


def _check_rule(rule: Rule, matched: set[str], held: set[str], names: list[str]) -> None:
    if not matched:
        hint = did_you_mean(rule.pattern, names)
        raise JaxinferError(f"rule {rule.pattern!r} matches no parameter of the model: {hint}")
    if not held:
        raise JaxinferError(
            f"rule {rule.pattern!r} holds for no parameter: rules before it match all that it does"
        )
    known = sorted({letter for path in held for letter in letters_of(path)})
    for letter in rule.axes:
        if letter not in known:
            raise JaxinferError(
                f"rule {rule.pattern!r}: no parameter that it holds for has an axis "
                f"{shown(letter)}: known: {', '.join(known)}"
            )


def check_on_mesh(
    layout: Layout, mesh: Mapping[str, int], config: ModelConfig | ModelShape
) -> None:
    """Check a padded model's layout on a mesh whose axes have these sizes.

    Raises:
        JaxinferError: an axis has two tasks or does not divide what it cuts, or attention would
            need KV of heads on other devices.
    """
    sizes = {
        "D": config.hidden_size,
        "N": config.num_attention_heads,
        "K": config.num_key_value_heads,
        "F": config.intermediate_size,
        "E": config.num_experts,
        "V": config.vocab_size,
    }
    check_places(layout, mesh)
    for name, table in layout.activations.items():
        for letter, place in table.items():
            check_divides(letter, name, sizes.get(letter, 0), ways(place, mesh))


def check_places(layout: Layout, mesh: Mapping[str, int]) -> None:
    """Check that attention finds its KV, and that the mesh has all axes, each with one task.

    Raises:
        JaxinferError: one of these conditions is not met.
    """
    check_names(layout, mesh)
    for name, table in layout.activations.items():
        check_apart(name, table, mesh)
    check_apart("KV pages", layout.kv, mesh)
    _check_attention(layout, mesh)


def check_pages(layout: Layout) -> None:
    """Check that KV is divided as in the pages of engines and modelled stages.

    Raises:
        JaxinferError: KV is cut along another axis than heads.
    """
    for letter, what in (("S", "sequences"), ("C", "tokens")):
        if letter in layout.kv:
            raise JaxinferError(
                f"{letter} of KV pages: an engine's pages, and those of a simulation, are cut by "
                f"heads (K) alone, not by {what}: `jaxinfer shard` prices such layouts"
            )


def check_divides(letter: str, name: str, size: int, pieces: int) -> None:
    """Check that an axis can be cut into this number of pieces.

    Raises:
        JaxinferError: the number of pieces does not divide the axis.
    """
    if size % pieces:
        raise JaxinferError(
            f"axis {letter} of {name} is {size} long, {pieces} pieces do not divide it"
        )


def check_apart(name: str, table: Places, mesh: Mapping[str, int]) -> None:
    """Check that each axis of the mesh cuts at most one axis of an array.

    Raises:
        JaxinferError: an axis of the mesh cuts two axes of the array.
    """
    users: dict[str, str] = {}
    for letter, place in table.items():
        for axis in named(place, list(mesh)):
            if axis in users:
                raise JaxinferError(
                    f"{users[axis]} and {letter} of {name} lie on mesh axis {axis!r}, it has room "
                    "for one"
                )
            users[axis] = letter


def _tables(layout: Layout) -> Iterator[tuple[str, Places]]:
    for rule in layout.parameters:
        yield f"rule {rule.pattern!r}", rule.axes
    yield from layout.activations.items()
    yield "KV pages", layout.kv


def _letters_of(name: str) -> str:
    """Return the axes that a table may name; for parameters, any."""
    return "KSC" if name == "KV pages" else ACTIVATIONS.get(name, "")


def _check_place(what: str, place: object) -> None:
    names = place if isinstance(place, tuple) else (place,)
    if not all(isinstance(name, str | Axes) for name in names):
        raise JaxinferError(
            f"{what} is {shown(place)}, must be a mesh axis, a tuple of them, ALL, FIRST or REST"
        )


def _check_there(what: str, place: Place, mesh: Mapping[str, int]) -> None:
    for axis in named(place, list(mesh)):
        if axis not in mesh:
            raise JaxinferError(f"{what} lies on mesh axis {axis!r}, there is {list(mesh)}")


def _check_attention(layout: Layout, mesh: Mapping[str, int]) -> None:
    heads, axes = layout.activations.get("heads", {}), list(mesh)
    kv = named(layout.kv.get("K", ()), axes)
    if "N" in heads and _cutting(heads["N"], mesh) != _cutting(kv, mesh):
        raise JaxinferError(
            f"N of heads lies on {list(named(heads['N'], axes))}, K of KV pages on {list(kv)}: "
            "attention reaches KV where its heads are"
        )
    rows, own = (_cutting(place, mesh) for place in (heads.get("T", ()), layout.kv.get("S", ())))
    if own and rows != own:
        raise JaxinferError(
            f"T of heads lies on {rows}, S of KV pages on {own}: a device attends for the "
            "sequences that it keeps"
        )
    for axis in rows:
        if axis in _cutting(layout.kv.get("C", ()), mesh):
            raise JaxinferError(
                f"T of heads and C of KV pages lie on mesh axis {axis!r}: all queries go to all "
                "parts of a sequence"
            )
    for axis in named(heads.get("T", ()), axes):
        if axis in kv:
            raise JaxinferError(
                f"T of heads and K of KV pages lie on mesh axis {axis!r}: attention to some tokens "
                "needs KV of all heads"
            )


def _cutting(place: Place, mesh: Mapping[str, int]) -> list[str]:
    """Return the axes that have more than one device."""
    return [axis for axis in named(place, list(mesh)) if mesh[axis] > 1]
