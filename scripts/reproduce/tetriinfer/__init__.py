"""TetriInfer on the modelled cluster: its figures, and what they depend on."""

from scripts.reproduce.reproduction import Inputs, Part, Reproduction, Work
from scripts.reproduce.tetriinfer import decode, prefill
from scripts.reproduce.tetriinfer import workloads as five

TRACE = "sharegpt.csv"


def trace(inputs: Inputs) -> Work:
    """Pairs of prompt and output lengths."""
    return inputs.work(TRACE)


def caps(inputs: Inputs) -> Part:
    """128 requests at once, by the cap of vLLM's batch."""
    rows, found = five.workloads(trace(inputs))
    return Part(rows, five.paper_cells(found), {"caps": five.draw_caps(found)})


def prices(inputs: Inputs) -> Part:
    """The paper's perf/$ from its own changes, by two forms."""
    return Part(*five.prices())


def interference(inputs: Inputs) -> Part:
    """Iterations beside others by the same alone."""
    return Part(*prefill.interference())


def chunks(inputs: Inputs) -> Part:
    """A chunk's iteration by one of 16 whole prompts."""
    return Part(*prefill.chunked(trace(inputs)))


def sorting(inputs: Inputs) -> Part:
    """Mean TTFT by order and window of the sorted queue."""
    return Part(*prefill.sorting(trace(inputs)))


def admission(inputs: Inputs) -> Part:
    """JCT by that of greedy admission, over the pool's size."""
    return Part(*decode.admissions(trace(inputs)))


def dispatch(inputs: Inputs) -> Part:
    """Makespans by the dispatch to decode instances."""
    return Part(*decode.dispatches(trace(inputs)))


def flips(inputs: Inputs) -> Part:
    """JCT and flips, by the seconds for which an instance has to be idle."""
    work = trace(inputs)
    return Part(*decode.flips(work), {"flips": decode.draw_flips(work)})


def predictions(inputs: Inputs) -> Part:
    """What the accuracy of predicted lengths is worth."""
    return Part(decode.predictions(trace(inputs)))


def links(inputs: Inputs) -> Part:
    """JCT by the link between the roles."""
    return Part(decode.links(trace(inputs)))


REPRODUCTION = Reproduction(
    paper="TetriInfer",
    inputs={TRACE: "prompt and output lengths of ShareGPT's first turns, CSV in Vidur's columns"},
    parts={
        "caps": caps,
        "prices": prices,
        "interference": interference,
        "chunks": chunks,
        "sorting": sorting,
        "admission": admission,
        "dispatch": dispatch,
        "flips": flips,
        "predictions": predictions,
        "links": links,
    },
)
