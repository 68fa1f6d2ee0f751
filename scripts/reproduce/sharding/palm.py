"""PaLM 540B on 64 TPU v4: the phases of Table 2 in Pope et al. (2022)."""

from jaxinfer.hardware.catalogue import Catalogue
from jaxinfer.serving.batch import Work
from scripts.reproduce.claims import Target, by_share, holds
from scripts.reproduce.reproduction import Inputs, Part
from scripts.reproduce.sharding.model import PAPERS, decode, prefill, step
from scripts.tables import Row

MESH = {"x": 4, "y": 4, "z": 4}
CARD = "TPU-v4"
# For each phase: its work, number of steps, bytes of a weight, and the paper's best layout and
# seconds (Table 2).
PHASES: dict[str, tuple[Work, int, int, str, float]] = {
    "prefill, 1 x 2,048": (prefill(1, 2048), 1, 1, "2D", 0.29),
    "decode, 64 rows": (decode(64, 2048), 64, 1, "2D", 1.82),
    "prefill, 512 x 2,048": (prefill(512, 2048), 1, 2, "XYZ gathered", 85.2),
    "decode, 512 rows": (decode(512, 2048), 64, 2, "2D", 6.0),
}


def phases(inputs: Inputs) -> Part:
    """Seconds of each phase under each layout, compared with Table 2."""
    model = Catalogue().model("palm-540b")
    rows: list[Row] = []
    claims: list[Target] = []
    for phase, (work, steps, size, best, seconds) in PHASES.items():
        found = {}
        for name, layout in PAPERS.items():
            parts = step(layout, model, CARD, MESH, work, size)
            found[name] = steps * parts.total
            rows.append(
                {
                    "phase": phase,
                    "layout": name,
                    "seconds": round(found[name], 3),
                    "compute": round(steps * parts.compute, 3),
                    "memory": round(steps * parts.memory, 3),
                    "links": round(steps * parts.links, 3),
                    "paper_s": seconds if name == best else "",
                }
            )
        ours = min(found, key=lambda name: found[name])
        claims.append(holds(f"best layout, {phase}", best, ours, ours == best, "the same"))
        claims.append(by_share(f"{phase} (s)", seconds, found[best], 0.25))
    return Part(rows, claims)
