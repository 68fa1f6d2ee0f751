"""DistServe: its requests, Table 2, goodput, queueing forms, transfers and placements."""

from scripts.reproduce.distserve import goodput as rates
from scripts.reproduce.distserve import requests as authors
from scripts.reproduce.distserve.forms import queueing as forms
from scripts.reproduce.distserve.forms import transfers as sent
from scripts.reproduce.distserve.model import Data
from scripts.reproduce.distserve.placement import placements
from scripts.reproduce.reproduction import Inputs, Part, Reproduction
from scripts.tables import CONFIGS

PROFILES, TRACE = "distserve", "sharegpt.csv"
# The authors' own requests of Table 2.
REQUESTS = CONFIGS / "distserve" / "table2_requests.csv"


def data(inputs: Inputs) -> Data:
    """What the authors measured."""
    return Data.read(inputs.path(PROFILES))


def attainments(inputs: Inputs) -> rates.Attainments:
    """Simulations that goodput and attainment share."""
    return rates.Attainments(data(inputs))


def requests(inputs: Inputs) -> Part:
    """Attainment (%) on the authors' requests: 13B, 0.2 and 0.1 s."""
    measured = data(inputs)
    pools = authors.draw_pools(measured, REQUESTS)
    return Part(*authors.parity(measured, REQUESTS), {"pools": pools})


def measured(inputs: Inputs) -> Part:
    """The same requests measured on A100s, and simulated."""
    return Part(*authors.measured(data(inputs), REQUESTS))


def table2(inputs: Inputs) -> Part:
    """Table 2 with conversations joined from another trace."""
    _, rows, claims = rates.table_2(data(inputs), inputs.work(TRACE))
    return Part(rows, claims)


def queueing(inputs: Inputs) -> Part:
    """Mean TTFT by equations 1 to 3, and simulated."""
    return Part(*forms())


def transfers(inputs: Inputs) -> Part:
    """Transfers of OPT-175B between nodes."""
    return Part(*sent(inputs.work(TRACE)))


def goodput(inputs: Inputs) -> Part:
    """Goodput per GPU, with the published kernels and with equal ones."""
    compared = rates.cases(inputs.work(TRACE))
    return Part(*rates.ratios(inputs.shared(attainments), compared))


def attainment(inputs: Inputs) -> Part:
    """Attainment over rates, for 13B."""
    first, *_ = rates.cases(inputs.work(TRACE))
    rows, figure = rates.curves(inputs.shared(attainments), first)
    return Part(rows, pictures={"attainment": figure})


def placement(inputs: Inputs) -> Part:
    """Placements that the planner finds."""
    return Part(*placements(inputs.pool))


REPRODUCTION = Reproduction(
    paper="DistServe",
    inputs={
        PROFILES: "folder with profiler-a100-80g.{distserve,vllm}.json and max_num_tokens.csv "
        "(LLMServe/DistServe)",
        TRACE: "prompt and output lengths of ShareGPT's first turns, CSV in Vidur's columns",
    },
    parts={
        "requests": requests,
        "measured": measured,
        "table2": table2,
        "queueing": queueing,
        "transfers": transfers,
        "goodput": goodput,
        "attainment": attainment,
        "placement": placement,
    },
    timed=("placement",),
)
