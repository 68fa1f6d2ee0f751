"""TetriInfer's prefill and interference."""

from statistics import fmean

from jaxinfer.workload.lengths import BenchRequest
from scripts.reproduce.claims import by_amount, by_share
from scripts.reproduce.reproduction import Inputs, Part, Work
from scripts.reproduce.tetriinfer.runs import REQUESTS, TRACE, draw, of_class, tetriinfer

# For a V100 pair and prompts in tokens: the additional time of a step, as in configs/tetriinfer.
STEP, TOKEN, CONTEXT = 0.0187, 1.48e-4, 6.9e-7
CHUNK = 512


def chunked(inputs: Inputs) -> Part:
    """The iteration in which a prompt is computed: one of 16 prompts, and one chunk."""
    trace = inputs.work(TRACE)
    rng_works = [draw_whole(trace, 16, seed) for seed in range(400)]
    whole = [STEP + TOKEN * sum(item.prompt_len for item in work) for work in rng_works]
    chunk = 1.1 * (STEP + TOKEN * CHUNK)
    change, without = (100 * (c / fmean(whole) - 1) for c in (chunk, chunk / 1.1))
    rows = [
        {"iteration": "16 prompts (s)", "mean": round(fmean(whole), 3)},
        {"iteration": "one chunk beside the predictor (s)", "mean": round(chunk, 3)},
        {"iteration": "change (%)", "mean": round(change, 1)},
        {"iteration": "change without the predictor (%)", "mean": round(without, 1)},
    ]
    claim = "prefill latency, one chunk by one iteration of 16 prompts (%)"
    return Part(rows, [by_amount(claim, -86.4, change, 4, "points")])


def draw_whole(trace: Work, count: int, seed: int) -> Work:
    """Return ``count`` requests of the whole trace, from a start that the seed picks."""
    start = count * seed % (len(trace) - count)
    return trace[start : start + count]


def sorting(inputs: Inputs) -> Part:
    """Mean TTFT by order and window, simulated and by the closed form."""
    trace = inputs.work(TRACE)
    works = [draw(trace, "Mixed", REQUESTS, seed) for seed in range(20)]
    lengths = [item.prompt_len for item in of_class(trace, "Mixed")]
    ordered, count = sorted(lengths), len(lengths)
    # The sum of min(X, X') over pairs: each length times the number of longer ones.
    pairs = sum(x * (count - 1 - rank) for rank, x in enumerate(ordered))
    mu = pairs / (count * (count - 1) / 2) / fmean(lengths)

    def form(window: int, factor: float) -> float:
        return 1 + (window - 1) / 2 * factor + (REQUESTS - window) / 2

    found, rows = {}, []
    for order, window, factor in (
        ("fcfs", 16, 1.0),
        ("sjf", 16, mu),
        ("ljf", 16, 2 - mu),
        ("sjf", 128, mu),
    ):
        settings = [f"system.order={order}", f"system.prefill_batch={window}"]
        means = [tetriinfer([_short(i) for i in work], settings=settings).ttft for work in works]
        found[order, window] = fmean(means)
        base = found["fcfs", 16], form(16, 1.0)
        rows.append(
            {
                "order": order,
                "window": window,
                "mean TTFT (s)": round(fmean(means), 2),
                "by FCFS (%)": round(100 * (fmean(means) / base[0] - 1), 1),
                "closed form by FCFS (%)": round(100 * (form(window, factor) / base[1] - 1), 1),
            }
        )
    change = 100 * (found["sjf", 16] / found["fcfs", 16] - 1)
    wider = 100 * (found["sjf", 128] / found["sjf", 16] - 1)
    longest = 100 * (found["ljf", 16] / found["fcfs", 16] - 1)
    forms = [100 * (form(w, f) / form(16, 1.0) - 1) for w, f in ((16, mu), (16, 2 - mu))]
    return Part(
        rows,
        [
            by_amount("SJF by FCFS, windows of 16 of 128 (%)", -7.8, change, 3, "points"),
            by_amount("SJF, windows of 128 by 16 (%)", -46.5, wider, 5, "points"),
            by_amount(
                "closed form of SJF by FCFS (%)", forms[0], change, 2, "points", "consistency"
            ),
            by_amount(
                "closed form of LJF by FCFS (%)", forms[1], longest, 2, "points", "consistency"
            ),
        ],
    )


def _short(item: BenchRequest) -> BenchRequest:
    return BenchRequest(None, item.prompt_len, 1, 0.0)


def interference(inputs: Inputs) -> Part:
    """Iterations with others, relative to the same alone; light has 18 tokens, heavy 512."""
    a = STEP / TOKEN
    light, heavy, context, others = 18, 512, 275, 50
    rows_of = {
        "light prefill beside 7 light": ((a + 8 * light) / (a + light), 2, "predicted"),
        "light prefill beside 63 light": ((a + 64 * light) / (a + light), 8, "predicted"),
        "heavy prefill beside 63 light": ((a + heavy + 63 * light) / (a + heavy), 3, "predicted"),
        "light decode beside a heavy prefill": ((a + 1 + heavy) / (a + 1), 5, "calibrated"),
        "128 decodes, half of them heavy": (
            1 + CONTEXT * 64 * (context - others) / (STEP + 128 * (TOKEN + CONTEXT * others)),
            1.23,
            "calibrated",
        ),
    }
    rows = [
        {"iteration": name, "paper": theirs, "ours": round(ours, 2), "kind": kind}
        for name, (ours, theirs, kind) in rows_of.items()
    ]
    return Part(
        rows,
        [
            by_share(f"{name}: times as long", theirs, ours, 0.25, kind)  # type: ignore[arg-type]
            for name, (ours, theirs, kind) in rows_of.items()
        ],
    )
