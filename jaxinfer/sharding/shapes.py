"""A layer's parameters by their logical axes, and models padded for a layout."""

import math
from collections.abc import Mapping

from jaxinfer.errors import JaxinferError
from jaxinfer.hardware.catalogue import ModelShape
from jaxinfer.models.layout_checks import check_rules, own_rules
from jaxinfer.models.layouts import Layout, most_ways, table_of

# Number of devices of each axis of the mesh.
Sizes = Mapping[str, int]


def layer_parameters(model: ModelShape) -> dict[str, tuple[int, ...]]:
    """Return the matrices of the first layer, path -> shape, with the models' names."""
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


def parameter_names(model: ModelShape) -> list[str]:
    """Return the names of all parameters that a model of this shape with one layer may have.

    The set includes all norms, biases and 8-bit scales that any architecture has.
    """
    found = ["embed_VD", "norm.scale_D"] + ["head_VD"] * (not model.tie_word_embeddings)
    norms = ["attn_norm", "mlp_norm"]
    if model.gated:
        norms += ["attn_out_norm", "mlp_out_norm"]
    else:
        found += ["position_XD", "norm.bias_D", *(f"layers.0.{name}.bias_D" for name in norms)]
    if model.qk_norm:
        norms += ["attn.q_norm", "attn.k_norm"]
    found += [f"layers.0.{name}.scale_D" for name in norms]
    for path in layer_parameters(model):
        stem, _, letters = path.rpartition("_")
        out = letters[1:] if letters[0] == "D" else "D"
        found += [path, *([] if "E" in letters else [f"{stem}_bias_{out}", f"{stem}_scale_{out}"])]
    return found


def check_layout(layout: Layout, model: ModelShape) -> None:
    """Check that a layout's rules cut the model's parameters, and cut all layers alike.

    Closed forms and modelled stages assume that all layers lie as the first one does.

    Raises:
        JaxinferError: a rule cuts nothing, or layers differ.
    """
    if not own_rules(layout):
        return
    check_rules(layout, parameter_names(model), model.num_hidden_layers)
    for path in layer_parameters(model):
        for layer in range(1, model.num_hidden_layers):
            other = path.replace(".0.", f".{layer}.", 1)
            if table_of(other, layout) != table_of(path, layout):
                raise JaxinferError(
                    f"{other} lies otherwise than {path}: closed forms and modelled stages have "
                    "layers alike"
                )


def padded(model: ModelShape, layout: Layout, mesh: Sizes) -> ModelShape:
    """Return the model with heads and columns that divide by their numbers of pieces.

    If there are fewer KV heads than pieces, several pieces have the same head. Otherwise added
    heads and columns are zeros, which are multiplied and kept like others.
    """
    N, K = model.num_attention_heads, model.num_key_value_heads
    of_N, of_K = (most_ways(letter, layout, mesh) for letter in "NK")
    groups = K if K % of_K == 0 else of_K
    if N % of_N or groups % K or N % groups:
        groups = up(K, math.lcm(of_N, of_K))
        N = groups * (N // K)
    return model.model_copy(
        update={
            "num_key_value_heads": groups,
            "num_attention_heads": N,
            "intermediate_size": up(model.intermediate_size, most_ways("F", layout, mesh)),
            "head_dim": model.head_size,
        }
    )


def up(count: float, pieces: int) -> int:
    """Round ``count`` up to a multiple of ``pieces``."""
    return math.ceil(count / pieces) * pieces
