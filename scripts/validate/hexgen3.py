"""HexGen-3's published plans, by its authors' simulator and by our rooflines of the same inputs.

    python -m scripts.validate.hexgen3 SCHEDULER --reference ENV/bin/python

SCHEDULER is the folder ``scheduler`` of Relaxed-System-Lab/HexGen-3. ENV is an environment of its
own with that folder's requirements. The shapes, cards, workloads and plans are asked of their
code; all figures are estimates by simulators.

Their estimate of a plan is the least rate of three pools: prefill, attention and FFN. A pool's rate
is the sum over its replicas, each with a fixed batch. Where plans have attention and FFN together
("PD"), the decode pool does the work of both, one after the other on each kind of card. Three of
its assumptions differ from our model of a replica, and are taken here one by one:

- ``experts``: expert parallelism divides the time of an FFN by its degree, on no more GPUs. The
  model's FFN is dense.
- ``attention``: attention takes as long on the GPUs of a replica as on one of them.
- ``scores``: attention writes and reads the scores of all heads.

``allocate`` finds the best plan of such pools exactly, by the rates of replicas.
"""

import json
import os
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import click

from jaxinfer.hardware.catalogue import Gpu, ModelShape
from jaxinfer.serving.batch import Work
from jaxinfer.simulate.costs.roofline import KernelEfficiency
from jaxinfer.simulate.ffn import Side
from scripts.tables import Row, show_table

WORKERS = ("pre", "attn", "ffn")
PARTS = WORKERS[1:]
# Requests of a replica for each of its GPUs, and bytes per second of its links, as theirs.
REQUESTS, LINK = 4, 100e9
DEGREES = (1, 2, 4, 8)
CODE = """
import json, sys
from pathlib import Path
sys.path[:0] = [".", "cli"]
import run_hexgen3_paper_experiments as paper
from simulator.configs.hardware import hardware_params
from simulator.scheduling import ParallelismStrategy, SimulatorEstimator, WorkloadProfile
asked = json.load(sys.stdin)
rows = paper.load_trace(Path("traces/wildgpt_trace.jsonl"), 512)
loads = {kind: paper.workload_from_trace(rows, 4.0, 8, kind) for kind in (1, 2, 3, 4)}
estimator = SimulatorEstimator(model_id=asked["model"])
found = []
for worker, card, tp, ep, kind in asked["replicas"]:
    strategy = ParallelismStrategy(dp=1, tp=tp, ep=ep)
    found.append(estimator.estimate_slice_throughput(worker, card, strategy, loads[kind]))
shape = estimator._model_params()
print(json.dumps({
    "rates": found,
    "loads": {kind: [load.mean_input, load.mean_output] for kind, load in loads.items()},
    "shape": {name: getattr(shape, name) for name in asked["shape"]},
    "cards": {name: [card["FP16"], card["bandwidth"]] for name, card in hardware_params.items()},
}))
"""
SHAPE = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
)


class Replica(NamedTuple):
    """A replica of a pool: its role, card, and degrees of tensor and expert parallelism."""

    worker: str
    card: str
    tp: int
    ep: int


# Rates of replicas in requests per second.
Rates = Mapping[Replica, float]


@dataclass(frozen=True)
class Case:
    """A published plan.

    Attributes:
        usd: dollars an hour of the cards.
        kind: number of its workload.
        capacity: number of cards, by name.
        published: requests per second that they state.
    """

    name: str
    kind: int
    capacity: Mapping[str, int]
    replicas: Sequence[Replica]
    published: float
    usd: float


@dataclass(frozen=True)
class Assumptions:
    """The assumptions of their model that ours takes as well; see the module."""

    experts: bool = False
    attention: bool = False
    scores: bool = False


@dataclass(frozen=True)
class Inputs:
    """The model, the cards' FLOPs and bandwidths, and the lengths that set a replica's rate."""

    shape: ModelShape
    cards: Mapping[str, tuple[float, float]]
    loads: Mapping[int, tuple[int, int]]

    def rate(self, replica: Replica, kind: int, given: Assumptions) -> float:
        """Return the requests per second of a replica, by rooflines at the cards' peaks."""
        prompt, output = self.loads[kind]
        batch, shape = REQUESTS * replica.tp, self.shape
        side, one = self._side(replica.card, replica.tp), self._side(replica.card, 1)
        bandwidth = self.cards[replica.card][1]
        scores = 2 * batch * shape.num_attention_heads * 2 / bandwidth * given.scores
        if not given.attention:
            one, scores = side, scores / replica.tp
        exchange = batch * shape.hidden_size * 2 / LINK
        if replica.worker == "pre":
            chunks = Work(batch * prompt, 0, batch, batch, 0, [(0, prompt)] * batch)
            layer = side.dense(chunks.tokens) + one._attention(chunks) + scores * prompt**2
            return batch / (shape.num_hidden_layers * layer)
        seen = batch * (prompt + max(1, output // 2))
        decodes = Work(batch, batch, batch, batch, seen, [], batch)
        if replica.worker == "attn":
            layer = side.projections(batch) + one._attention(decodes) + scores * seen / batch
            sent = shape.kv_bytes(shape.num_hidden_layers, 2) * prompt * batch / LINK
            return batch / (sent + output * shape.num_hidden_layers * (layer + exchange))
        layer = side.ffn(batch)
        if given.experts:
            layer = layer / replica.ep + 0.05 * (replica.ep - 1) * exchange
        return batch / (output * shape.num_hidden_layers * (layer + exchange))

    def _side(self, card: str, devices: int) -> Side:
        flops, bandwidth = self.cards[card]
        gpu = Gpu(
            bf16_tflops=flops / 1e12, memory_gb=1, memory_gb_s=bandwidth / 1e9, link="none",
            link_gb_s=1e12,
        )  # fmt: skip
        layers = self.shape.num_hidden_layers
        peak = KernelEfficiency(1.0, 1.0)
        return Side(gpu, self.shape, layers, False, devices, 2, peak, gpu.link_gb_s)


def plan_rate(replicas: Sequence[Replica], rates: Rates) -> float:
    """Return the least rate of the pools of a plan."""

    def rate(worker: str, of: Sequence[Replica]) -> float:
        return sum(rates[each._replace(worker=worker)] for each in of)

    by_worker = {worker: [each for each in replicas if each.worker == worker] for worker in WORKERS}
    pools = [rate(worker, of) for worker, of in by_worker.items()]
    if decoding := [each for each in replicas if each.worker == "decode"]:
        by_card = [[each for each in decoding if each.card == card] for card in cards(decoding)]
        pools = [pools[0], sum(1 / sum(1 / rate(part, of) for part in PARTS) for of in by_card)]
    return min(pools)


def cards(replicas: Sequence[Replica]) -> list[str]:
    """Return the names of the replicas' cards, each once."""
    return list(dict.fromkeys(each.card for each in replicas))


def allocate(rates: Rates, capacity: Mapping[str, int]) -> tuple[float, Sequence[Replica]]:
    """Return the best plan for these cards, and its rate: the largest least rate of the pools.

    For each number of cards in one pool, dynamic programming finds the best replicas; then all
    divisions of the cards among the pools are tried.
    """

    @cache
    def pool(worker: str, card: str, cards: int) -> tuple[float, tuple[Replica, ...]]:
        best: tuple[float, tuple[Replica, ...]] = (0.0, ())
        for replica, rate in rates.items():
            if (replica.worker, replica.card) == (worker, card) and replica.tp <= cards:
                more, others = pool(worker, card, cards - replica.tp)
                if rate and rate + more > best[0]:
                    best = rate + more, (replica, *others)
        return best

    found: tuple[float, tuple[Replica, ...]] = (0.0, ())
    splits = [
        [(a, f, count - a - f) for a in range(count + 1) for f in range(count + 1 - a)]
        for count in capacity.values()
    ]
    for chosen in product(*splits):
        parts = [
            pool(worker, card, counts[number])
            for card, counts in zip(capacity, chosen, strict=True)
            for number, worker in enumerate(("attn", "ffn", "pre"))
        ]
        least = min(sum(rate for rate, _ in parts[number::3]) for number in range(3))
        if least > found[0]:
            found = least, tuple(replica for _, replicas in parts for replica in replicas)
    return found


def published_cases(results: Mapping[str, Any]) -> list[Case]:
    """Return the published plans."""
    given = [(f"static {each['baseline']}", 1, each) for each in results["static_results"]]
    for hour in results["dynamic_results"]:
        for each in hour["baselines"]:
            given.append((f"hour {hour['hour']} {each['baseline']}", hour["workload_type"], each))
    return [
        Case(
            name,
            kind,
            each["capacity"],
            _replicas(each),
            each["system_throughput_req_s"],
            each["cost_per_hour"],
        )
        for name, kind, each in given
    ]


def _replicas(result: Mapping[str, Any]) -> list[Replica]:
    return [
        Replica(worker, card, replica["tp"], replica["ep"])
        for key, found in result["parallelism"].items()
        for worker, card, strategy in (
            [(*key.split("/"), found)] if "/" in key else [(key, *each) for each in found.items()]
        )
        for replica in strategy["replicas"]
    ]


def ask(
    scheduler: Path, python: Path, model: str, asked: Sequence[tuple[Replica, int]]
) -> tuple[Inputs, dict[tuple[Replica, int], float]]:
    """Return their inputs, and their rates of replicas by workload."""
    replicas = [[*replica, kind] for replica, kind in asked]
    done = subprocess.run(
        [python, "-c", CODE],
        input=json.dumps({"replicas": replicas, "model": model, "shape": SHAPE}),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        cwd=scheduler,
        env=os.environ | {"HF_HUB_OFFLINE": "1"},
    )
    said = json.loads(done.stdout.splitlines()[-1])
    loads = {int(kind): tuple(load) for kind, load in said["loads"].items()}
    cards = {name: tuple(card) for name, card in said["cards"].items()}
    inputs = Inputs(ModelShape(**said["shape"]), cards, loads)
    return inputs, dict(zip(asked, said["rates"], strict=True))


def compare(case: Case, inputs: Inputs, theirs: Rates, every: Sequence[Replica]) -> Row:
    """Return a case's rates: as published, by their code, by our model, and of the best plan."""

    def ours(given: Assumptions) -> float:
        needed = [
            each._replace(worker=part)
            for each in case.replicas
            for part in (PARTS if each.worker == "decode" else [each.worker])
        ]
        rates = {each: inputs.rate(each, case.kind, given) for each in needed}
        return plan_rate(case.replicas, rates)

    begin = time.process_time()
    known = {each: theirs[each] for each in every if each.card in case.capacity}
    best, _ = allocate(known, case.capacity)
    seconds = time.process_time() - begin
    alone, _ = allocate({each: r for each, r in known.items() if each.ep == 1}, case.capacity)
    same = ours(Assumptions(experts=True, attention=True, scores=True))
    return {
        "plan": case.name,
        "$/hour": round(case.usd, 2),
        "published": round(case.published, 2),
        "their code": round(plan_rate(case.replicas, theirs), 2),
        "ours, all three": round(same, 2),
        "difference": f"{100 * (same / case.published - 1):+.1f} %",
        "no scores": round(ours(Assumptions(experts=True, attention=True)), 2),
        "nor attention": round(ours(Assumptions(experts=True)), 2),
        "none: ours": round(ours(Assumptions()), 2),
        "best plan, their code": round(best, 2),
        "found in s": round(seconds, 2),
        "best without experts": round(alone, 2),
    }


@click.command(help=__doc__)
@click.argument("scheduler", type=click.Path(exists=True, path_type=Path))
@click.option("--reference", required=True, type=click.Path(path_type=Path))
@click.option("--output", type=click.Path(path_type=Path), help="also write the rows as JSON")
def main(scheduler: Path, reference: Path, output: Path | None) -> None:  # noqa: D103
    published = scheduler / "results/hexgen3_paper_mimic/results.json"
    if not published.is_file():
        raise click.ClickException(f"no file {published}: SCHEDULER must be their folder scheduler")
    text = published.read_text(encoding="utf-8")
    results = json.loads(text)
    cases = published_cases(results)
    names = sorted({card for case in cases for card in case.capacity})
    every = [
        Replica(worker, card, tp, ep)
        for worker, card, tp in product(WORKERS, names, DEGREES)
        for ep in (DEGREES if worker == "ffn" else (1,))
    ]
    kinds = sorted({case.kind for case in cases})
    asked = [(replica, kind) for replica in every for kind in kinds]
    inputs, rates = ask(scheduler, reference, results["model_id"], asked)
    rows = [
        compare(case, inputs, {each: rates[each, case.kind] for each in every}, every)
        for case in cases
    ]
    show_table(rows)
    if output:
        output.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
