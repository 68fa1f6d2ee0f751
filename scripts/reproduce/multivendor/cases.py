"""Runs of the multi-vendor paper's setups in virtual time, and the closed form of their TPOT."""

import statistics
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

from jaxinfer.config.run_file import load_run_file
from jaxinfer.hardware.catalogue import find_model
from jaxinfer.serving.request_state import RequestState
from jaxinfer.simulate.run import simulate
from jaxinfer.workload.arrivals import Arrivals, with_arrivals
from jaxinfer.workload.lengths import BenchRequest
from scripts.tables import CONFIGS

FOLDER = CONFIGS / "multivendor"


@dataclass(frozen=True)
class VendorCase:
    """Requests of one length on some cards.

    Attributes:
        lengths: prompt tokens and output tokens.
        rate: requests per second.
        prefills: number of prefill instances; 0 if everything is on one card that decodes.
        decodes: number of decode instances.
        requests: number of requests.
        seed: seed of the arrivals.
        file: name of the run file.
        b_flops: fraction of the prefill card's peak that it reaches.
        counts_transfer: whether a first token counts only once its KV is where it is decoded.
    """

    lengths: tuple[int, int]
    rate: float
    prefills: int = 1
    decodes: int = 1
    requests: int = 400
    seed: int = 0
    file: str = "disaggregated"
    b_flops: float = 0.6
    counts_transfer: bool = True

    def serve(self) -> "ServedTimes":
        """Serve the requests in virtual time."""
        changes = []
        if self.file == "disaggregated":
            for group, instance, count in (("b", "p", self.prefills), ("a", "d", self.decodes)):
                changes += [
                    f"{kind}.replicas={count}"
                    for kind in (f"groups.{group}", f"instances.{instance}")
                ]
            if self.b_flops != 0.6:
                changes.append(f"simulate.groups={{b0: {{flops: {self.b_flops}}}}}")
            changes.append(f"metrics.ttft_counts_transfer={str(self.counts_transfer).lower()}")
        config = load_run_file(FOLDER / f"{self.file}.yaml", changes)
        prompt, output = self.lengths
        same = [BenchRequest(None, prompt, output, 0.0)] * self.requests
        work = with_arrivals(same, Arrivals(kind="poisson", rate=self.rate, seed=self.seed))
        found: list[tuple[float, Sequence[float]]] = []

        def keep(request: RequestState, times: Sequence[float]) -> None:
            found.append((request.arrival, times))

        metrics = simulate(config, work, on_request=keep)
        return ServedTimes(found, metrics.output_tok_s)


@dataclass(frozen=True)
class ServedTimes:
    """A run's requests.

    Attributes:
        requests: arrival and times of tokens, for each request.
        tokens_s: output tokens per second of the whole run.
    """

    requests: list[tuple[float, Sequence[float]]]
    tokens_s: float

    @property
    def ttft(self) -> float:
        """Mean TTFT, including the transfer."""
        return statistics.fmean(times[0] - arrival for arrival, times in self.requests)

    @property
    def tpot(self) -> float:
        """Mean of the requests' times per token."""
        return _tpot(self.requests)

    @property
    def steady_tpot(self) -> float:
        """TPOT without the first three tenths and the last two tenths of the requests."""
        ordered = sorted(self.requests, key=lambda request: request[0])
        count = len(ordered)
        return _tpot(ordered[3 * count // 10 : 8 * count // 10])

    @property
    def rate(self) -> float:
        """Mean output tokens per second of one request, from its arrival to its end."""
        return statistics.fmean(len(t) / (t[-1] - arrival) for arrival, t in self.requests)


def _tpot(requests: Sequence[tuple[float, Sequence[float]]]) -> float:
    return statistics.fmean((t[-1] - t[0]) / (len(t) - 1) for _, t in requests)


def serve_all(pool: ProcessPoolExecutor, cases: Sequence[VendorCase]) -> list[ServedTimes]:
    """Serve each case in virtual time, many at once."""
    return list(pool.map(VendorCase.serve, cases))


@dataclass(frozen=True)
class DecodeCard:
    """The closed form of a card that decodes.

    There are B = q L_out T sequences in a step, which takes T = w + k B seconds: weights are read
    once, and each sequence's mean context is read. Therefore T = w / (1 - q L_out k).

    Attributes:
        weights_s: w, the seconds to read the weights.
        entry_s: seconds to read one KV entry.
    """

    weights_s: float
    entry_s: float

    @classmethod
    def of_file(cls) -> "DecodeCard":
        """Return the card of ``disaggregated.yaml``."""
        config = load_run_file(FOLDER / "disaggregated.yaml")
        model = find_model(config.require_model())
        bandwidth = config.own.gpu("vendor-a").memory_gb_s * 1e9 * config.simulate.bandwidth
        layers = model.num_hidden_layers
        # The table of embeddings is not read, except for one row each.
        weights = 2 * model.parameters(layers, first=False, last=True)
        return cls(weights / bandwidth, model.kv_bytes(layers, 2) / bandwidth)

    def tpot(self, lengths: tuple[int, int], rate: float) -> float:
        """Return the seconds at ``rate`` requests/s per instance; infinite in an overload."""
        prompt, output = lengths
        k = (prompt + output / 2) * self.entry_s
        share = rate * output * k
        return self.weights_s / (1 - share) if share < 1 else float("inf")
