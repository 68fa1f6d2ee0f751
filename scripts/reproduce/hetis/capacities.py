"""KV that fits on Hetis' cluster, compared with sums of memories."""

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from jaxinfer.hardware.catalogue import find_gpu, find_model
from scripts.reproduce.claims import Target, by_share, holds
from scripts.reproduce.hetis.cases import (
    LARGE,
    NODES,
    OTHERS,
    PRIMARIES,
    SEVENTY,
    THIRTEEN,
    THIRTY,
    TWO,
    cluster,
    hardware,
    modelled,
)
from scripts.reproduce.hetis.pictures import draw_capacities
from scripts.reproduce.reproduction import Inputs, Part
from scripts.tables import Row

KINDS = {"a100": "A100-80G-PCIe", "rtx3090": "RTX-3090", "p100": "P100-PCIe-12G"}

# Stages as in the sums, with the four 3090 as one, which no host of the paper has; and possible
# stages for 70B.
AS_ONE: dict[str, tuple[str, Any, Any]] = {
    "70B, Hetis": (SEVENTY, (("a", 58), ("bc", 22)), ("p",)),
    "70B, primaries alone": (SEVENTY, (("a", 57), ("bc", 23)), ()),
    "70B, pipeline by prefill speeds": (SEVENTY, (("a", 55), ("bc", 23), ("p", 2)), ()),
    "70B, pipeline by decode speeds": (SEVENTY, (("a", 44), ("bc", 30), ("p", 6)), ()),
    "70B, pipeline by memory": (SEVENTY, (("a", 55), ("bc", 17), ("p", 8)), ()),
    "13B, Hetis": (THIRTEEN, (("a", None),), OTHERS),
    "13B, pipeline by prefill speeds": (THIRTEEN, (("a", 28), ("bc", 11), ("p", 1)), ()),
    "13B, pipeline by decode speeds": (THIRTEEN, (("a", 22), ("bc", 15), ("p", 3)), ()),
    "13B, Splitwise's decodes on 3090 and P100": (THIRTEEN, (("bc", 27), ("p", 13)), ()),
    "OPT-30B, Hetis": (THIRTY, (("a", None),), OTHERS),
    "OPT-30B, pipeline by prefill speeds": (THIRTY, (("a", 33), ("bc", 14), ("p", 1)), ()),
    "OPT-30B, pipeline by decode speeds": (THIRTY, (("a", 27), ("bc", 18), ("p", 3)), ()),
    "OPT-30B, Splitwise's decodes on 3090 and P100": (THIRTY, (("bc", 32), ("p", 16)), ()),
    "13B, one A100 and two 3090 (Fig. 14)": (THIRTEEN, (("one", None),), TWO),
    "13B, one A100": (THIRTEEN, (("one", None),), ()),
}
BY_HOST: dict[str, tuple[Any, Any]] = {
    "70B, Hetis": (PRIMARIES, ("p",)),
    "70B, primaries alone": (PRIMARIES, ()),
    "70B, pipeline by prefill speeds": ((("a", 55), ("b", 12), ("c", 11), ("p", 2)), ()),
    "70B, pipeline by decode speeds": ((("a", 44), ("b", 15), ("c", 15), ("p", 6)), ()),
    "70B, pipeline by memory": ((("a", 55), ("b", 9), ("c", 8), ("p", 8)), ()),
}


def sum_of_memories(
    model: str, layers: Sequence[tuple[str, int | None]], attention: Sequence[str]
) -> int:
    """Return the tokens whose KV fits into nine tenths of all memory, next to the weights.

    With attention groups, KV may be anywhere. Otherwise, each stage has the KV of its own layers.
    """
    shape = find_model(model)
    rooms, kv_bytes = [], []
    for number, (group, of_stage) in enumerate(layers):
        count = of_stage or shape.num_hidden_layers
        weights = 2 * shape.parameters(count, number == 0, number == len(layers) - 1)
        rooms.append(_memory(group) - weights)
        kv_bytes.append(shape.kv_bytes(count, 2))
    if attention:
        return round((sum(rooms) + sum(map(_memory, attention))) / sum(kv_bytes))
    return round(min(room / each for room, each in zip(rooms, kv_bytes, strict=True)))


def _memory(group: str) -> float:
    """Return nine tenths of a group's bytes."""
    node, gpus = NODES[group]
    return 0.9 * gpus * find_gpu(KINDS[node.partition("_")[0]]).memory_gb * 1e9


def capacities(inputs: Inputs) -> Part:
    """Tokens of KV that fit, in engines with default options and as in the runs of 70B."""
    rows, targets = list[Row](), list[Target]()
    with TemporaryDirectory() as folder:
        file = hardware(Path(folder))
        for name, (model, layers, attention) in AS_ONE.items():
            expected = sum_of_memories(model, layers, attention)
            tokens = modelled(cluster(model, layers, attention, file=file)).num_tokens
            hosts, workers = BY_HOST.get(name, (layers, attention))
            by_host = {
                engine: modelled(cluster(model, hosts, workers, None, options, file=file))
                for engine, options in (("usual", {}), ("large", LARGE))
            }
            rows.append(
                {
                    "cluster": name,
                    "sum of memories": expected,
                    "ours": tokens,
                    "by host": by_host["usual"].num_tokens,
                    "by host, 1,024 sequences, 2,048 tokens": by_host["large"].num_tokens,
                }
            )
            targets.append(by_share(f"tokens of KV: {name}", expected, tokens, 0.05, "consistency"))
    by = {row["cluster"]: row["by host"] for row in rows}
    more = {
        way: by["70B, Hetis"] / by[f"70B, {way}"]
        for way in ("primaries alone", "pipeline by prefill speeds", "pipeline by decode speeds")
    }
    says = ", ".join(f"{ratio:.2f} times {way}" for way, ratio in more.items())
    targets.append(
        holds(
            "Hetis has the most KV (Fig. 11)",
            "most",
            says,
            min(more.values()) > 1,
            "more than each",
        )
    )
    return Part(rows, targets, {"capacities": draw_capacities(rows)})


def idle_memory(inputs: Inputs) -> Part:
    """Fig. 1b: OPT-2.7b on an A100 and a 3090, with layers 60 to 40 by their decode times."""
    instance = modelled(cluster("opt-2.7b", (("one", 19), ("near", 13))))
    tokens = instance.num_tokens
    gb = [
        (pages - 1) * instance.config.page_size * layers * instance.token_bytes / 1e9
        for pages, layers in zip(instance.num_pages, instance.layers, strict=True)
    ]
    full, idle = gb[1], gb[0] - tokens * instance.layers[0] * instance.token_bytes / 1e9
    row = {"KV on the 3090 (GB)": round(full, 1), "idle on the A100 (GB)": round(idle, 1)}
    return Part(
        [row],
        [
            by_share("Fig. 1b: KV (GB) with which the 3090 is full", 18.6, full, 0.1),
            by_share("Fig. 1b: memory (GB) that then lies idle on the A100", 44.1, idle, 0.1),
        ],
    )
