"""Serves requests one at a time, each on an empty modelled cluster."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from jaxinfer.config.run_file import RunFile
from jaxinfer.serving.request_state import RequestState
from jaxinfer.simulate.run import OnRequest, prepare, serve
from jaxinfer.simulate.targets import LATENCIES, Reference
from jaxinfer.workload.lengths import BenchRequest


def serve_alone(config: RunFile, work: Iterable[BenchRequest], on_request: OnRequest) -> None:
    """Serve each request on its own empty copy of the cluster.

    Args:
        on_request: called with each request that has ended, and the times of its tokens.

    Raises:
        JaxinferError: the run file does not describe a valid cluster, or a request can never fit.
    """
    cluster = prepare(config)
    for item in work:
        serve(cluster, [replace(item, arrival=0.0, after_ends=0, follows=None)], None, on_request)


def reference_latencies(config: RunFile, work: Sequence[BenchRequest]) -> Reference:
    """Return each request's latencies alone on a reference machine.

    Latencies depend only on lengths; each pair of lengths is simulated once.

    Raises:
        JaxinferError: the run file does not describe a valid machine, or a request does not fit.
    """
    seconds: dict[tuple[int, int], dict[str, float]] = {}

    def on_request(request: RequestState, times: Sequence[float]) -> None:
        found = {metric: latency(request, times) for metric, latency in LATENCIES.items()}
        seconds[request.prompt_len, len(times)] = {
            metric: value for metric, value in found.items() if value is not None
        }

    pairs = dict.fromkeys((item.prompt_len, item.max_tokens) for item in work)
    serve_alone(config, (BenchRequest(None, p, n, 0.0) for p, n in pairs), on_request)
    return Reference(seconds)
