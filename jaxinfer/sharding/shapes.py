"""A layer's parameters and activations by their logical axes, and what a layout makes of them."""

import math
from collections.abc import Mapping
from fnmatch import fnmatchcase

from jaxinfer.hardware.catalogue import ModelShape
from jaxinfer.models.layouts import Layout, Place, Places, named

# Logical axes of the activations that layouts name; S are the rows that are sampled from.
ACTIVATIONS = {
    "residual": "TD",
    "attention_inputs": "TD",
    "heads": "TNH",
    "kv": "TKH",
    "ffn_inputs": "TD",
    "ffn": "TF",
    "experts": "TEF",
    "logits": "SV",
}
# Axis of the mesh -> its devices.
Sizes = Mapping[str, int]


def layer_parameters(model: ModelShape) -> dict[str, tuple[int, ...]]:
    """Matrices of the first layer, path -> shape, with the names that models give them."""
    D, F, E = model.hidden_size, model.intermediate_size, model.num_experts
    N, K, H = model.num_attention_heads, model.num_key_value_heads, model.head_size
    attn, mlp = ("attn.", "mlp.") if model.gated else ("", "")
    found: dict[str, tuple[int, ...]] = {
        f"{attn}q_DNH": (D, N, H),
        f"{attn}k_DKH": (D, K, H),
        f"{attn}v_DKH": (D, K, H),
        f"{attn}o_NHD": (N, H, D),
    }
    if E:
        found |= {
            f"{mlp}router_DE": (D, E),
            f"{mlp}gate_EDF": (E, D, F),
            f"{mlp}up_EDF": (E, D, F),
            f"{mlp}down_EFD": (E, F, D),
        }
    else:
        found |= {f"{mlp}gate_DF": (D, F)} if model.gated else {}
        found |= {f"{mlp}up_DF": (D, F), f"{mlp}down_FD": (F, D)}
    return {f"layers.0.{name}": shape for name, shape in found.items()}


def letters_of(path: str) -> str:
    """Logical axes of a parameter: ``layers.0.attn.q_DNH`` has D, N and H."""
    return path.rpartition("_")[2]


def table_of(path: str, layout: Layout) -> Places:
    """Where a parameter lies: by the first rule that matches."""
    return next((rule.axes for rule in layout.parameters if fnmatchcase(path, rule.pattern)), {})


def ways(place: Place, mesh: Sizes) -> int:
    """Pieces that an axis is cut into."""
    return math.prod(mesh[axis] for axis in named(place, list(mesh)))


def padded(model: ModelShape, layout: Layout, mesh: Sizes) -> ModelShape:
    """The model with KV groups and columns that divide by what they are cut into, as engines pad.

    The added ones are zeros, which are multiplied and kept like others.
    """
    groups = _up(model.num_key_value_heads, _most_ways("NK", layout, mesh))
    queries = model.num_attention_heads // model.num_key_value_heads
    return model.model_copy(
        update={
            "num_key_value_heads": groups,
            "num_attention_heads": groups * queries,
            "intermediate_size": _up(model.intermediate_size, _most_ways("F", layout, mesh)),
            "head_dim": model.head_size,
        }
    )


def _most_ways(letters: str, layout: Layout, mesh: Sizes) -> int:
    tables = [rule.axes for rule in layout.parameters]
    tables += [*layout.activations.values(), layout.kv]
    cuts = (ways(table[letter], mesh) for table in tables for letter in letters if letter in table)
    return math.lcm(*cuts)


def _up(count: int, pieces: int) -> int:
    return math.ceil(count / pieces) * pieces
