"""Estimates a cluster's rate from means, without simulation, only to order candidates."""

from collections.abc import Sequence
from statistics import fmean

from jaxinfer.config.run_file import RunFile
from jaxinfer.serving.batch import Work
from jaxinfer.simulate.cluster import ModelledInstance
from jaxinfer.simulate.run import prepare
from jaxinfer.simulate.targets import Targets, gap_limits
from jaxinfer.workload.lengths import BenchRequest


def guess_rate(config: RunFile, work: Sequence[BenchRequest], targets: Targets) -> float:
    """Estimate the requests per second that all instances serve, if each serves whole requests.

    Each instance runs as many requests of mean length as fit into its seats and pool, all at
    different tokens. A step has one decode for each of these requests, and the prompt tokens of the
    requests that replace those that end. If the largest such step takes longer than the targets
    allow between tokens, steps are smaller.

    Raises:
        JaxinferError: the run file does not describe a valid cluster.
    """
    cluster = prepare(config)
    prompt = fmean(item.prompt_len for item in work)
    output = fmean(item.max_tokens for item in work)
    limit = next((limit.seconds for limit in gap_limits(targets)), None)
    return sum(_rate(each, prompt, output, limit) for each in cluster.instances.values())


def _rate(instance: ModelledInstance, prompt: float, output: float, limit: float | None) -> float:
    config, stages = instance.config, len(instance.groups)
    context = prompt + output / 2
    seats = min(config.max_num_seqs, instance.num_tokens / context)
    budget = config.max_num_batched_tokens
    decodes = max(min(seats / stages, budget * output / (prompt + output)), 1.0)
    gap = _gap(instance, decodes, decodes * prompt / output, prompt, context)
    rate = stages * decodes / (gap * output)
    if limit:
        rate *= min(limit / _gap(instance, decodes, budget - decodes, prompt, context), 1.0)
    return rate


def _gap(
    instance: ModelledInstance, decodes: float, chunk: float, prompt: float, context: float
) -> float:
    """Return the seconds between tokens if all steps have equal numbers of decodes and prompt
    tokens.
    """
    n, c = max(round(decodes), 1), max(round(chunk), 0)
    chunks = [(round(prompt / 2), c)] if c > 1 else []
    tokens = n + c * bool(chunks)
    times = instance.cost.stages(Work(tokens, n, n + len(chunks), n, round(n * context), chunks, n))
    return max(sum(times), len(times) * max(times))
