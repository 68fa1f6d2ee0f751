"""Aladdin's figures on the modelled cluster, compared with the paper's.

Searches for the fewest workers take hours of CPU time. Simulation results are kept.
"""

from jaxinfer.files.kept import KeptResults
from scripts.reproduce.aladdin import cpu, fewest, sensitivity, single
from scripts.reproduce.aladdin import unlike as kinds
from scripts.reproduce.aladdin.fewest import CALIBRATION, LEVELS, RATE, SEEDS, THETAS
from scripts.reproduce.aladdin.runs import ATGT_S, JSQ, TWO, Way, WorkerSearch, draw
from scripts.reproduce.aladdin.tables import make_tables
from scripts.reproduce.reproduction import (
    AICONFIGURATOR,
    SHAREGPT,
    VIDUR_PROFILES,
    Inputs,
    Part,
    Reproduction,
    Work,
)

TRACE, VIDUR, OWN, RUNS = "sharegpt.csv", "vidur", "aiconfigurator", "aladdin_runs"


def trace(inputs: Inputs) -> Work:
    """Return pairs of prompt and output lengths."""
    return inputs.work(TRACE)


def search(inputs: Inputs) -> WorkerSearch:
    """Return searches for the fewest workers, with tables of operators."""
    tables = make_tables(inputs.path(VIDUR), inputs.path(OWN), inputs.kept)
    code = inputs.code(TRACE, VIDUR, OWN)
    return WorkerSearch(inputs.shared(trace), tables, inputs.kept, code)


def other(inputs: Inputs) -> WorkerSearch:
    """Return searches that show what figures depend on."""
    return inputs.shared(search).of(inputs.shared(trace), "sensitivity")


def best(inputs: Inputs) -> Way:
    """Return Aladdin with true lengths, as chosen for 99 %."""
    return fewest.chosen(inputs.rows("theta_99"))[0]


def models(inputs: Inputs) -> Part:
    """Errors of equations 2 and 3."""
    return Part(*single.models(inputs.shared(search).tables))


def equation6(inputs: Inputs) -> Part:
    """Equation 6 and Table 3: tokens per second and GPU."""
    work = draw(inputs.shared(trace), CALIBRATION)
    return Part(*single.equation_6(inputs.shared(search).tables, work, ATGT_S))


def theta_99(inputs: Inputs) -> Part:
    """Theta at 99 %."""
    return Part(fewest.thetas(inputs.shared(search), LEVELS[0]))


def workers_99(inputs: Inputs) -> Part:
    """The fewest workers at 25 requests per second and 99 %."""
    chosen = fewest.chosen(inputs.rows("theta_99"))
    return Part(*fewest.fewest_workers(inputs.shared(search), LEVELS[0], chosen))


def equation7(inputs: Inputs) -> Part:
    """Equation 7: the fewest workers at six rates."""
    return Part(*fewest.equation_7(inputs.shared(search), best(inputs)))


def overhead(inputs: Inputs) -> Part:
    """Time to dispatch a request, by the number of workers."""
    tables = inputs.shared(search).tables
    return Part(*single.overhead(tables, inputs.shared(trace), best(inputs)))


def theta_99_5(inputs: Inputs) -> Part:
    """Theta at 99.5 %."""
    return Part(fewest.thetas(inputs.shared(search), LEVELS[1]))


def workers_99_5(inputs: Inputs) -> Part:
    """The fewest workers at 25 requests per second and 99.5 %."""
    chosen = fewest.chosen(inputs.rows("theta_99_5"))
    return Part(*fewest.fewest_workers(inputs.shared(search), LEVELS[1], chosen))


def opened(inputs: Inputs) -> Part:
    """Number of used workers, of 40 available ones."""
    levels = ("theta_99", "theta_99_5")
    ways = [way for level in levels for way in fewest.chosen(inputs.rows(level))]
    work = draw(inputs.shared(trace), 0)
    return Part(single.opened(inputs.shared(search).tables, work, ways, RATE))


def mixes(inputs: Inputs) -> Part:
    """Workers of several kinds: the cheapest mixes."""
    simulated = KeptResults(inputs.kept / "unlike.jsonl", inputs.code(TRACE))
    found = kinds.cheapest(inputs.shared(trace), inputs.kept, SEEDS[:1], simulated)
    simulated.close()
    return Part(*found)


def small_cases(inputs: Inputs) -> Part:
    """Small cases of workers of several kinds, compared with the best packing."""
    rows, claims = [], []
    for ttft, gap in kinds.LEVELS:
        found, more = kinds.small_cases(inputs.shared(trace), (ttft, gap), 100)
        level = {"first token (s)": ttft, "gap (ms)": round(1000 * gap)}
        rows += [level | row for row in found]
        claims += more
    return Part(rows, claims)


def four(inputs: Inputs) -> Part:
    """Figures 9 and 10: four A100s, by rate."""
    ways = {"shortest queue": JSQ, "power of two": TWO, "Aladdin": best(inputs)}
    rows = sensitivity.on_four(inputs.shared(search), ways)
    return Part(rows, sensitivity.of_four(rows), {"four": sensitivity.draw_four(rows)})


def processes(inputs: Inputs) -> Part:
    """Cost of additional processes."""
    return Part(*sensitivity.process_costs(inputs.shared(other), best(inputs)))


def decodes(inputs: Inputs) -> Part:
    """The fewest workers for decodes alone."""
    return Part(*sensitivity.decodes_alone(inputs.shared(other), best(inputs)))


def all_requests(inputs: Inputs) -> Part:
    """The fewest workers for all requests (P100)."""
    return Part(*sensitivity.all_requests(inputs.shared(search), best(inputs)))


def theta_seeds(inputs: Inputs) -> Part:
    """The fewest workers by theta and seed."""
    seeds = [CALIBRATION, CALIBRATION + 1]
    return Part(sensitivity.theta_seeds(inputs.shared(search), THETAS, seeds))


def other_workers(inputs: Inputs) -> Part:
    """Table 2's workers, by the roofline."""
    theta = best(inputs).system["theta"]
    return Part(*sensitivity.other_workers(inputs.shared(other), theta))


def real(inputs: Inputs) -> Part:
    """Real runs on this machine's CPU."""
    rows, roles = cpu.both(inputs.path(RUNS))
    return Part(rows, beside={"real_roles": roles})


REPRODUCTION = Reproduction(
    paper="Aladdin",
    inputs={
        TRACE: SHAREGPT,
        VIDUR: VIDUR_PROFILES,
        OWN: f"{AICONFIGURATOR}: {{context,generation}}_attention_perf of a100_sxm",
        RUNS: "folder of `jaxinfer compare configs/cpu/aladdin.yaml LEAST_LOADED.yaml`, the same "
        "file with `system: least_loaded`",
    },
    parts={
        "figure3": single.figure_3,
        "table2": single.table_2,
        "models": models,
        "equation6": equation6,
        "theta_99": theta_99,
        "workers_99": workers_99,
        "equation7": equation7,
        "overhead": overhead,
        "theta_99_5": theta_99_5,
        "workers_99_5": workers_99_5,
        "opened": opened,
        "unlike": mixes,
        "packing": small_cases,
        "off": sensitivity.off_seconds,
        "four": four,
        "processes": processes,
        "decodes": decodes,
        "all_requests": all_requests,
        "theta_seeds": theta_seeds,
        "other_workers": other_workers,
        "real": real,
    },
    timed=("overhead",),
)
