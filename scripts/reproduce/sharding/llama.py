"""Llama 3 70B on eight and sixteen H100: all layouts in both phases."""

from jaxinfer.hardware.catalogue import Catalogue
from jaxinfer.models.layouts import LAYOUTS
from jaxinfer.serving.batch import Work
from jaxinfer.sharding.costs import LayoutFlow
from scripts.reproduce.reproduction import Inputs, Part
from scripts.reproduce.sharding.model import decode, prefill, step
from scripts.tables import Row

PHASES: dict[str, Work] = {
    "prefill, 2,048 tokens": prefill(1, 2048),
    "prefill, 32,768 tokens": prefill(16, 2048),
    "decode, 64 rows": decode(64, 2048),
    "decode, 512 rows": decode(512, 2048),
}


def rankings(inputs: Inputs) -> Part:
    """Milliseconds of a step under each layout, the fastest first."""
    model = Catalogue().model("llama-3-70b")
    rows: list[Row] = []
    for mesh in ({"x": 2, "y": 4}, {"x": 4, "y": 4}):
        for phase, work in PHASES.items():
            found = {}
            for name, layout in LAYOUTS.items():
                parts = step(layout, model, "H100-SXM", mesh, work)
                weights = LayoutFlow(model, layout, mesh).parameters(80, True, True) * 2
                found[name] = (parts, weights)
            for name in sorted(found, key=lambda name: found[name][0].total):
                parts, weights = found[name]
                rows.append(
                    {
                        "mesh": "x".join(map(str, mesh.values())),
                        "phase": phase,
                        "layout": name,
                        "ms": round(1e3 * parts.total, 2),
                        "compute_ms": round(1e3 * parts.compute, 2),
                        "memory_ms": round(1e3 * parts.memory, 2),
                        "links_ms": round(1e3 * parts.links, 2),
                        "weights_gb": round(weights / 1e9, 1),
                    }
                )
    return Part(rows)
