"""DistServe: its requests, Table 2, goodput, queueing forms, transfers and placements."""

from scripts.reproduce.distserve import forms, requests
from scripts.reproduce.distserve import goodput as rates
from scripts.reproduce.distserve.model import PROFILES, TRACE, Data
from scripts.reproduce.distserve.placement import placements
from scripts.reproduce.reproduction import SHAREGPT, Inputs, Part, Reproduction


def data(inputs: Inputs) -> Data:
    """Return the measurements of the authors."""
    return Data.read(inputs.path(PROFILES))


def attainments(inputs: Inputs) -> rates.Attainments:
    """Return the simulations that goodput and attainment share."""
    return rates.Attainments(data(inputs))


def table2(inputs: Inputs) -> Part:
    """Table 2 with conversations joined from another trace."""
    _, rows, claims = rates.table_2(data(inputs), inputs.work(TRACE))
    return Part(rows, claims)


def per_gpu(inputs: Inputs) -> Part:
    """Goodput per GPU, with the published kernels and with equal ones."""
    compared = rates.cases(inputs.work(TRACE))
    return Part(*rates.ratios(inputs.shared(attainments), compared))


def attainment(inputs: Inputs) -> Part:
    """Attainment by rate, for 13B."""
    first, *_ = rates.cases(inputs.work(TRACE))
    rows = rates.curves(inputs.shared(attainments), first)
    return Part(rows, pictures={"attainment": rates.draw_curves(rows)})


REPRODUCTION = Reproduction(
    paper="DistServe",
    inputs={
        PROFILES: "folder with profiler-a100-80g.{distserve,vllm}.json and max_num_tokens.csv, of "
        "https://github.com/LLMServe/DistServe, simdistserve/estimators/profile_data",
        TRACE: SHAREGPT,
    },
    parts={
        "requests": requests.parity,
        "measured": requests.measured,
        "table2": table2,
        "queueing": forms.queueing,
        "transfers": forms.transfers,
        "goodput": per_gpu,
        "attainment": attainment,
        "placement": placements,
    },
    timed=("placement",),
)
