"""Measures runs: a model on a workload, or several layouts in turn."""

import json
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path

from jaxinfer.config.run_file import RunFile
from jaxinfer.errors import JaxinferError
from jaxinfer.llm import LLM
from jaxinfer.models.layout_files import load_layout
from jaxinfer.report.metrics import RunMetrics
from jaxinfer.report.origin import asked_for
from jaxinfer.report.run_folder import run_folders
from jaxinfer.request import RequestOutput, SamplingParams
from jaxinfer.runtime.explain import step_costs, weight_bytes_per_device
from jaxinfer.runtime.stage.stage_plan import StagePlan
from jaxinfer.serving.request_state import RequestState
from jaxinfer.serving.world import StepDone
from jaxinfer.workload.bench_request import BenchRequest, real_tokens

Record = dict[str, object]
GREEDY = SamplingParams(temperature=0)


def measure(
    llm: LLM,
    work: Sequence[BenchRequest],
    source: str,
    run_dir: str | None,
    on_step: Callable[[StepDone], None] = lambda done: None,
    progress: bool = True,
    sampling: SamplingParams = GREEDY,
    on_output: Callable[[RequestOutput], None] = lambda output: None,
) -> RunMetrics:
    """Run a workload and measure it; EOS is ignored, and the prefix cache is empty at the start.

    Args:
        source: file that ``work`` comes from, for errors.
        on_step: called with each step when it ends.
        sampling: parameters of all requests; lengths come from ``work``.
        on_output: called with each answer.

    Raises:
        JaxinferError: a request cannot be run; the message gives its index.
    """
    requests: list[RequestState] = []
    firsts: list[RequestState] = []
    for index, item in enumerate(work):
        lengths = {"max_tokens": item.max_tokens, "ignore_eos": True}
        params = sampling.model_copy(update=lengths)
        tokens = real_tokens(item, llm.vocab_size, index)
        try:
            made = llm.make_requests(str(index), tokens, params)
        except JaxinferError as error:
            raise JaxinferError(f"{source}: request {index}: {error}") from None
        for request in made:
            request.arrival = request.metrics.arrival = item.arrival
            request.after_ends = item.after_ends
            request.session = None if item.session is None else str(item.session)
            if item.follows is not None:
                request.follows = firsts[item.follows]
        firsts.append(made[0])
        requests += made
    llm.reset_prefix_cache()

    def take(output: RequestOutput) -> None:
        if output.error:
            raise JaxinferError(output.error)
        on_output(output)

    return llm.run(
        requests,
        take,
        run_dir=run_dir,
        on_step=on_step,
        progress=progress,
        about=asked_for(llm.config, work) if run_dir else None,
    )


def compare_layouts(
    config: RunFile,
    layouts: Sequence[str],
    work: Sequence[BenchRequest],
    source: str,
    run_dir: str,
    rounds: int,
) -> list[Record]:
    """Measure each layout on the same workload, in turn.

    Args:
        layouts: names of layouts and Python files; ``default`` is ``megatron``.
        run_dir: folder for the runs; each layout's runs get a numbered folder in a new numbered
            folder.

    Returns:
        One record per layout. Times are medians: of the rounds, and over the steps of all rounds.

    Raises:
        JaxinferError: a group has its own process.
    """
    for name, group in config.cluster().groups.items():
        if group.is_apart:
            raise JaxinferError(
                f"groups.{name} has a process of its own: layouts are compared in one"
            )
    for layout in layouts:
        load_layout(_named(layout))  # This comes before a model is loaded, which takes time.
    engines = [_load(config, layout) for layout in layouts]
    runs: list[list[RunMetrics]] = [[] for _ in layouts]
    for _ in range(rounds):
        for number, llm in enumerate(engines):
            runs[number].append(measure(llm, work, source, f"{run_dir}/{number + 1}"))
    records = []
    for number, (layout, llm) in enumerate(zip(layouts, engines, strict=True)):
        steps = _last_steps(Path(run_dir) / str(number + 1), rounds)
        plan = llm.engine.plan
        assert isinstance(plan, StagePlan)
        mixed, decodes = step_costs(plan)
        records.append(
            llm.describe()
            | {
                "layout": layout,
                "workload": source,
                "weight_bytes_per_device": weight_bytes_per_device(plan),
                "wall_s": [metrics.wall_s for metrics in runs[number]],
                "wall_s_median": statistics.median(metrics.wall_s for metrics in runs[number]),
                "prefill_step_s": _median(s for s in steps if s["prefill_tokens"]),
                "decode_step_s": _median(s for s in steps if not s["prefill_tokens"]),
                "largest_step": asdict(mixed),
                "largest_decode_step": asdict(decodes),
            }
        )
    return records


def _named(layout: str) -> str:
    return "megatron" if layout == "default" else layout


def _load(config: RunFile, layout: str) -> LLM:
    changed = {"layout": _named(layout)}
    engine = config.engine.model_copy(update=changed)
    instances = {n: i.model_copy(update=changed) for n, i in config.instances.items()}
    return LLM.from_config(config.model_copy(update={"engine": engine, "instances": instances}))


def _last_steps(folder: Path, runs: int) -> list[dict[str, float]]:
    newest = run_folders(folder)[-runs:]
    return [json.loads(line) for path in newest for line in (path / "steps.jsonl").open()]


def _median(steps: Iterable[dict[str, float]]) -> float | None:
    times = [step["end"] - step["start"] for step in steps]
    return statistics.median(times) if times else None
