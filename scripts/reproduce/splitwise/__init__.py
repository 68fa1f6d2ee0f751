"""Splitwise on the modelled cluster, compared with the paper and its public simulator.

All parts together take some hours of CPU time.
"""

from collections.abc import Mapping
from pathlib import Path

from jaxinfer.files.kept import KeptResults
from scripts.reproduce.reproduction import CODE, CONVERSATIONS, Inputs, Part, Reproduction, Work
from scripts.reproduce.splitwise import alone, pictures, targets
from scripts.reproduce.splitwise import capacities as rates
from scripts.reproduce.splitwise import placement as provisioning
from scripts.reproduce.splitwise.public import Public

PERF_MODEL, SUMMARIES = "splitwise_perf_model.csv", "splitwise_sim"
TRACES = {"conv": "azure_conversation.csv", "code": "azure_code.csv"}


def files(inputs: Inputs) -> Public:
    """Return files made from the authors' measurements."""
    return Public(inputs.path(PERF_MODEL), inputs.kept / "public")


def traces(inputs: Inputs) -> Mapping[str, Work]:
    """Return the traces of conversations and coding."""
    return {name: inputs.work(file) for name, file in TRACES.items()}


def setting(inputs: Inputs) -> rates.Setting:
    """Return the setting of searches for the largest rates."""
    return rates.Setting(inputs.shared(files), inputs.shared(traces), inputs.pool)


def at_home(inputs: Inputs) -> Mapping[str, int]:
    """Return the largest rates of conversations at equal power, by cluster."""
    return targets.by_cluster(inputs.rows("capacities"), "public")["conv", "power"]


def anchors(inputs: Inputs) -> Part:
    """The public simulator's own runs."""
    trace, folder = inputs.shared(traces)["conv"], inputs.path(SUMMARIES)
    rows = alone.anchors(inputs.shared(files), trace, folder)
    shown = [{name: value for name, value in row.items() if name != "share"} for row in rows]
    return Part(shown, alone.anchor_targets(rows))


def transfers(inputs: Inputs) -> Part:
    """Transfers of a median coding prompt, and Table IV's lone requests."""
    rows, claims = alone.transfers(inputs.shared(files))
    left_out = ("share", "e2e")
    shown = [{name: row[name] for name in row if name not in left_out} for row in rows]
    drawn = {"decodes": pictures.draw_decodes(inputs.shared(files))}
    return Part(shown, claims + alone.table_iv(inputs.shared(files)), drawn)


def pools(inputs: Inputs) -> Part:
    """Machines in each pool as the load grows."""
    cluster = rates.design("HA", "code", "power")
    figure = pictures.draw_pools(inputs.shared(files), cluster, inputs.shared(traces)["code"])
    return Part(pictures={"pools": figure})


def largest_rates(inputs: Inputs) -> Part:
    """Largest rates of all clusters, under both readings of decode times."""
    rows = rates.capacities(inputs.shared(setting))
    return Part(rows, pictures={"capacities": pictures.draw_capacities(rows)})


def headline(inputs: Inputs) -> Part:
    """The clusters of the paper's ratios, with 600 s of conversations."""
    rows = rates.headline(inputs.shared(setting), at_home(inputs))
    by_cluster = {row["cluster"]: row["rps"] for row in rows}
    return Part(rows, targets.ratios(inputs.rows("capacities"), by_cluster))


def batch_jobs(inputs: Inputs) -> Part:
    """Section VI-E: requests per second of batch jobs, by dollars."""
    rows = rates.batch_jobs(inputs.shared(setting))
    return Part(rows, targets.batch_targets(rows))


def others(inputs: Inputs) -> Part:
    """Clusters with other work than they are made for, and with slower links."""
    near = at_home(inputs)
    rows = rates.others(inputs.shared(setting), near)
    return Part(rows, targets.other_targets(rows, near))


def sensitivities(inputs: Inputs) -> Part:
    """Effect of the public simulator's rules on two ratios."""
    return Part(rates.sensitivities(inputs.shared(setting), at_home(inputs)))


def llama(inputs: Inputs) -> Part:
    """Llama 2 70B on BLOOM's clusters."""
    rows = rates.of_llama(inputs.shared(setting))
    return Part(rows, [targets.llama_target(rows)])


def provisioned(inputs: Inputs) -> Part:
    """Provisioning by the planner; each search takes minutes of CPU time."""
    asked = provisioning.PlacementSetting(inputs.shared(files), inputs.shared(traces))
    known = KeptResults(
        Path(inputs.kept, "placement.jsonl"), inputs.code(PERF_MODEL, *TRACES.values())
    )
    rows = provisioning.found(asked, inputs.pool, known)
    known.close()
    return Part(rows, list(provisioning.claims(rows)))


REPRODUCTION = Reproduction(
    paper="Splitwise",
    inputs={
        PERF_MODEL: "the authors' measurements: data/perf_model.csv of "
        "https://github.com/Mutinifni/splitwise-sim",
        TRACES["conv"]: CONVERSATIONS,
        TRACES["code"]: CODE,
        SUMMARIES: "folder with splitwise_sim_*_summary.csv, which that simulator has written",
    },
    parts={
        "anchors": anchors,
        "transfers": transfers,
        "pools": pools,
        "capacities": largest_rates,
        "headline": headline,
        "batch_jobs": batch_jobs,
        "others": others,
        "sensitivities": sensitivities,
        "llama": llama,
        "placement": provisioned,
    },
    timed=("placement",),
)
