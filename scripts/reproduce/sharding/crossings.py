"""Numbers that a feed-forward layer sends, and the tokens from which gathering is faster."""

from matplotlib.figure import Figure

from jaxinfer.hardware.catalogue import Catalogue
from jaxinfer.models.layouts import LAYOUTS
from jaxinfer.sharding.costs import LayoutFlow
from scripts.reproduce.claims import Target, by_share, holds
from scripts.reproduce.reproduction import Inputs, Part
from scripts.reproduce.sharding.model import PAPERS, prefill, step
from scripts.reproduce.sharding.palm import CARD, MESH
from scripts.tables import Row

# Where a line's label is: the number of its point, and an offset in points.
_LABELS = {
    "1D": (4, (0, 6)),
    "2D": (2, (-14, -16)),
    "X gathered": (2, (6, 6)),
    "XYZ gathered": (3, (6, 6)),
}
TOKENS = [2**power for power in range(6, 21)]


def volumes(inputs: Inputs) -> Part:
    """Numbers per token that a device sends for a feed-forward layer, 1D and 2D."""
    E, F = 8192, 28672
    heads = {"num_attention_heads": 256, "num_key_value_heads": 256, "head_dim": 32}
    model = Catalogue().model("llama-3-70b").model_copy(update={"gated": False, **heads})
    rows: list[Row] = []
    claims: list[Target] = []
    for devices, X in ((8, 2), (16, 2), (64, 4), (256, 8)):
        YZ = devices // X
        closed = {
            "megatron": 2 * E * (devices - 1) / devices,
            "weight_stationary_2d": 2 * (E / X * (YZ - 1) / YZ + F / YZ * (X - 1) / X),
        }
        for name, expected in closed.items():
            flow = LayoutFlow(model, LAYOUTS[name], {"x": X, "y": YZ})
            names = ("ffn_inputs", "up_DF", "ffn")
            ours = sum(c.moved for c in flow.layer.collectives if c.what in names)
            rows.append({"devices": devices, "layout": name, "paper": expected, "ours": ours})
            claims.append(
                by_share(
                    f"{name} on {devices}: numbers per token", expected, ours, 0.001, "consistency"
                )
            )
    return Part(rows, claims)


def crossings(inputs: Inputs) -> Part:
    """Seconds of a prompt's step by tokens, PaLM 540B on 64 TPU v4."""
    model = Catalogue().model("palm-540b")
    seconds = {
        name: [
            step(layout, model, CARD, MESH, prefill(max(T // 2048, 1), min(T, 2048))).total
            for T in TOKENS
        ]
        for name, layout in PAPERS.items()
    }
    rows: list[Row] = [
        {"tokens": T} | {name: round(found[i], 4) for name, found in seconds.items()}
        for i, T in enumerate(TOKENS)
    ]
    best = [min(seconds, key=lambda name: seconds[name][i]) for i in range(len(TOKENS))]
    order = list(dict.fromkeys(best))
    claims = [
        holds(
            "layouts of prefill as tokens grow (section 4.1)",
            "2D, then weights gathered over ever more axes",
            ", ".join(order),
            order[0] == "2D" and order[-1] == "XYZ gathered",
            "2D first, XYZ gathered last",
        )
    ]
    return Part(rows, claims, {"crossings": _draw(seconds, best)})


def _draw(seconds: dict[str, list[float]], best: list[str]) -> Figure:
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for name, found in seconds.items():
        each = [s / T * 1e6 for s, T in zip(found, TOKENS, strict=True)]
        (line,) = axes.plot(TOKENS, each)
        # 1D and 2D are close at the left, and all lines except XYZ gathered at the right.
        at, offset = _LABELS[name]
        axes.annotate(
            name, (TOKENS[at], each[at]), offset, textcoords="offset points", color=line.get_color()
        )
    for i in range(1, len(TOKENS)):
        if best[i] != best[i - 1]:
            before, after = (seconds[best[i]][j] - seconds[best[i - 1]][j] for j in (i - 1, i))
            share = before / (before - after)  # Seconds are nearly proportional to tokens here.
            at = TOKENS[i - 1] + share * (TOKENS[i] - TOKENS[i - 1])
            axes.axvline(at, color="grey", linestyle=":")
            axes.text(at, 5e4, f" {best[i]}\n fastest", color="grey")
    axes.set(xscale="log", yscale="log", xlabel="tokens of a step", ylabel="microseconds per token")
    axes.set_title("The more tokens a step has, the more it pays to gather weights", loc="left")
    return figure
