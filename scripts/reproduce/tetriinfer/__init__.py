"""TetriInfer on the modelled cluster: its figures, and what they depend on."""

from scripts.reproduce.reproduction import SHAREGPT, Inputs, Part, Reproduction
from scripts.reproduce.tetriinfer import decode, prefill
from scripts.reproduce.tetriinfer import workloads as five
from scripts.reproduce.tetriinfer.runs import TRACE


def caps(inputs: Inputs) -> Part:
    """128 requests at once, by the cap of vLLM's batch."""
    rows, found = five.workloads(inputs.work(TRACE))
    return Part(rows, five.paper_cells(found), {"caps": five.draw_caps(rows)})


REPRODUCTION = Reproduction(
    paper="TetriInfer",
    inputs={TRACE: SHAREGPT},
    parts={
        "caps": caps,
        "prices": five.prices,
        "interference": prefill.interference,
        "chunks": prefill.chunked,
        "sorting": prefill.sorting,
        "admission": decode.admissions,
        "dispatch": decode.dispatches,
        "flips": decode.flips,
        "predictions": decode.predictions,
        "links": decode.links,
    },
)
