"""Vidur-Search's claims: 450 configurations of LLaMA2-70B on A100s and H100s."""

import gzip
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from scripts.reproduce.reproduction import Inputs, Part, Reproduction
from scripts.reproduce.vidur_search import searches
from scripts.reproduce.vidur_search.runs import ARXIV, BWB, CHAT, Searches
from scripts.reproduce.vidur_search.tables import GPUS, make_tables

VIDUR, OWN, TRACE = "vidur", "aiconfigurator", "arxiv.csv.gz"
DRAWN = {CHAT: "chat_1m_4k", BWB: "bwb_4k"}
REQUESTS = 16_000


def made(inputs: Inputs) -> Searches:
    """Searches, each of which is made once."""
    profiles = inputs.path(VIDUR), inputs.path(OWN)
    tables = {gpu: make_tables(*profiles, gpu, inputs.kept / "tables") for gpu in GPUS}
    works: dict[str, Mapping[str, Any]] = {
        name: {"synthetic": {"lengths": lengths, "count": REQUESTS, "seed": 0}}
        for name, lengths in DRAWN.items()
    }
    trace = unpack(inputs.path(TRACE), inputs.kept / "arxiv.csv")
    works[ARXIV] = {"trace": str(trace), "limit": REQUESTS}
    code = inputs.code(VIDUR, OWN, TRACE)
    return Searches(inputs.kept / "searches", tables, works, inputs.jobs or 2, code)


def unpack(path: Path, to: Path) -> Path:
    """A trace as plain CSV."""
    to.write_bytes(gzip.decompress(path.read_bytes()))
    return to


def chat(inputs: Inputs) -> Part:
    """LLaMA2-70B on Chat-1M: the best, and the paper's best."""
    return Part(*searches.chat(inputs.shared(made)))


def longer(inputs: Inputs) -> Part:
    """The same two with more requests."""
    return Part(searches.longer(inputs.shared(made)))


def cliff(inputs: Inputs) -> Part:
    """The best by the limit of the time between tokens."""
    rows, claims, figure = searches.cliff(inputs.shared(made))
    return Part(rows, claims, {"cliff": figure})


def workloads(inputs: Inputs) -> Part:
    """Other traces."""
    return Part(*searches.workloads(inputs.shared(made)))


def costs(inputs: Inputs) -> Part:
    """What the searches took."""
    return Part(searches.costs(inputs.shared(made)))


def own_best(inputs: Inputs) -> Part:
    """The best of each kind of GPU by itself: hours of CPU."""
    return Part(searches.own_best(inputs.shared(made)))


REPRODUCTION = Reproduction(
    paper="Vidur-Search",
    inputs={
        VIDUR: "folder with compute/ and network/ (microsoft/vidur's profiles)",
        OWN: "folder with *_{context,generation}_attention_perf.csv.gz (NVIDIA's aiconfigurator)",
        TRACE: "Vidur's trace of Arxiv summaries, packed CSV",
    },
    parts={
        "chat": chat,
        "longer": longer,
        "cliff": cliff,
        "workloads": workloads,
        "costs": costs,
        "own_best": own_best,
    },
    timed=("chat", "costs"),
    by_name=("own_best",),
)
