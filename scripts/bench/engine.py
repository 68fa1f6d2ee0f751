"""Measure the engine end to end on one device, and compare it with the machine's limits.

    python -m scripts.bench.engine --trace lengths.csv --json figures.json
    python -m scripts.bench.engine --json figures.json --rehearse   # on a CPU: tiny

The model has Llama 3 8B's shape and random bfloat16 weights. Sampling is greedy, and all requests
are present at the start. Lengths are the first ones of ``--trace`` (as ``jaxinfer bench`` reads
it), or are drawn from the statistics of Azure's conversations.

The roofline is the one of ``jaxinfer simulate`` for the same steps. It uses the rates of copies and
matrix products that are measured just before. A shorter, traced run comes first. It shows the time
that steps with prefill, and steps of decodes, spend on attention, on matrix products, on the rest,
and on waiting for the host. The host's time in a step of decodes is also measured without a trace
(``step_time``), in the long run and in a shorter run that samples with a top_p.
"""

import json
import math
import tempfile
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import click
import jax

from jaxinfer import LLM, SamplingParams
from jaxinfer.checkpoints.modelled import model_shape
from jaxinfer.hardware.catalogue import Catalogue, Gpu
from jaxinfer.lab.measure import measure
from jaxinfer.report.metrics import RunMetrics
from jaxinfer.runtime.stage.machine_speed import copy_rate, product_rate
from jaxinfer.runtime.stage.stage import Stage
from jaxinfer.serving.batch import Work
from jaxinfer.serving.world import StepDone
from jaxinfer.simulate.costs.roofline import KernelEfficiency, RooflineStage
from jaxinfer.workload.lengths import BenchRequest, read_workload
from jaxinfer.workload.synthetic import Synthetic
from scripts.bench.device_time import DeviceTime, StepTracer
from scripts.bench.step_time import StepWatch

LLAMA_3_8B = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "rope_theta": 500000.0,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
TINY = LLAMA_3_8B | {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
LENGTHS = "azure_conversation"
TOP_P = SamplingParams(temperature=1.0, top_p=0.9, seed=1)
ENGINE: dict[str, Any] = {
    "load_format": "dummy",
    "dtype": "bfloat16",
    "enable_prefix_caching": False,
}


@dataclass(frozen=True)
class RunSize:
    """The size of a run.

    Attributes:
        model: the model's shape.
        engine: options of the engine.
        requests: number of requests.
        longest: largest number of tokens of a prompt, and of an output; the rest is cut off.
        copied: number of bytes to copy, to measure the rate of copies.
        multiplied: number of rows of the matrices to multiply, to measure their rate.
        steps: number of steps to trace, for each kind.
    """

    model: dict[str, Any]
    engine: dict[str, Any]
    requests: int
    longest: int
    copied: int
    multiplied: int
    steps: int


FULL = RunSize(
    LLAMA_3_8B,
    ENGINE | {"max_num_seqs": 256, "max_num_batched_tokens": 2048},
    requests=1000,
    longest=8192,
    copied=2**30,
    multiplied=8192,
    steps=24,
)
REHEARSAL = RunSize(
    TINY,
    ENGINE | {"max_num_seqs": 4, "max_num_batched_tokens": 16, "page_size": 16, "num_pages": 40,
              "kernels": "interpret"},
    requests=12, longest=60, copied=2**20, multiplied=256, steps=2,
)  # fmt: skip


def lengths(trace: str | None, size: RunSize, count: int) -> list[BenchRequest]:
    """Return the requests, which all arrive at once."""
    found = read_workload(trace) if trace else Synthetic(lengths=LENGTHS, count=count).requests()
    most = size.longest
    return [
        replace(
            item,
            arrival=0.0,
            prompt_token_ids=None,
            prompt_len=min(item.prompt_len, most),
            max_tokens=min(item.max_tokens, most),
        )
        for item in found[:count]
    ]


def roofline_of(folder: str, rates: dict[str, float], itemsize: int) -> RooflineStage:
    """Return a roofline of the whole model on a GPU with the measured rates."""
    gpu = Gpu(
        bf16_tflops=rates["product_tflops"],
        memory_gb=1,
        memory_gb_s=rates["copy_gb_s"],
        link="none",
        link_gb_s=1,
        watts=1,
        checked=True,
    )
    model = model_shape(folder, Catalogue())
    return RooflineStage(
        gpu, model, model.num_hidden_layers, True, 1, itemsize, KernelEfficiency(1, 1), 1
    )


def seconds(roofline: RooflineStage, steps: Iterable[Work]) -> float:
    """Return the seconds of all these steps by the roofline."""
    return sum(roofline.seconds(work) for work in steps)


def trace_steps(
    llm: LLM, work: list[BenchRequest], size: RunSize, roofline: RooflineStage
) -> dict[str, Any]:
    """Run as many requests as fit at once, and trace some of the steps."""
    most = min(size.engine["max_num_seqs"], len(work))

    def with_prefill(step: Work) -> bool:
        return bool(step.chunks) and step.decodes >= most // 4

    def decodes(step: Work) -> bool:
        return step.tokens == step.decodes >= most // 2

    kinds = {"with prefill": with_prefill, "decodes": decodes}
    tracer = StepTracer(kinds, size.steps)
    measure(llm, work[:most], "traced run", run_dir=None, on_step=tracer.on_step)
    tracer.close()
    found: dict[str, Any] = {}
    for kind, times in tracer.found.items():
        found[kind] = asdict(times) if isinstance(times, DeviceTime) else times
        traced = tracer.work.get(kind)
        if traced and isinstance(times, DeviceTime):
            found[kind] |= {
                "host_share": times.host / times.step_s,
                "roofline_s": seconds(roofline, traced) / len(traced),
                "tokens": sum(step.tokens for step in traced) / len(traced),
                "decodes": sum(step.decodes for step in traced) / len(traced),
                "decode_context": sum(step.single_context for step in traced) / len(traced),
            }
    return found


def long_run(
    llm: LLM, work: list[BenchRequest], source: str, watch: StepWatch, roofline: RooflineStage
) -> dict[str, Any]:
    """Serve all requests at once, with greedy sampling."""
    steps: list[Work] = []
    wrong = 0

    def on_step(done: StepDone) -> None:
        nonlocal wrong
        watch.on_step(done)
        steps.append(done.batch.work)
        wrong += sum(not math.isfinite(logprob) for logprob in done.logprobs)

    metrics = measure(llm, work, source, run_dir=None, on_step=on_step)
    return {"run": run_figures(metrics, steps, roofline), "not_finite": wrong}


def untraced(
    llm: LLM, work: list[BenchRequest], greedy: StepWatch, drawn: StepWatch
) -> dict[str, Any]:
    """Compare steps in the long run, and in a run that samples, with the same steps alone."""
    found = {"greedy": greedy.figures("greedy")}
    measure(llm, work, "drawn run", run_dir=None, on_step=drawn.on_step, sampling=TOP_P)
    return found | {"top_p": drawn.figures("top_p")}


def run_figures(metrics: RunMetrics, steps: list[Work], roofline: RooflineStage) -> dict[str, Any]:
    """Return the figures of the run without a trace."""
    least, wall = seconds(roofline, steps), metrics.wall_s
    tokens = metrics.prompt_tokens + metrics.output_tokens
    return {
        "requests_s": metrics.requests / wall,
        "tokens_s": tokens / wall,
        "output_tokens_s": metrics.output_tok_s,
        "roofline_wall_s": least,
        "roofline_requests_s": metrics.requests / least,
        "roofline_tokens_s": tokens / least,
        "of_the_roofline": least / wall,
        "loop_share": metrics.loop_s / wall,
        "launching_share": metrics.launching_s / wall,
        "metrics": asdict(metrics),
    }


def show_steps(figures: dict[str, Any]) -> None:
    """Print the machine and the traced steps."""
    print(
        f"{figures['device']}: copies {figures['copy_gb_s']:.0f} GB/s, "
        f"bfloat16 products {figures['product_tflops']:.1f} TFLOP/s"
    )
    for kind, found in figures["step_time"].items():
        if isinstance(found, str):
            print(f"step, {kind}: {found}")
            continue
        parts = ", ".join(
            f"{name} {1000 * found[name]:.2f}" for name in ("attention", "matmuls", "rest", "host")
        )
        print(
            f"step, {kind}: {1000 * found['step_s']:.2f} ms: {parts}; "
            f"roofline {1000 * found['roofline_s']:.2f}"
        )


def show_run(run: dict[str, Any]) -> None:
    """Print the run."""
    metrics = run["metrics"]
    print(
        f"{metrics['requests']} requests in {metrics['wall_s']:.2f} s: "
        f"{run['requests_s']:.2f} requests/s, {run['tokens_s']:.0f} tokens/s, "
        f"{run['output_tokens_s']:.0f} of them output"
    )
    print(
        f"roofline: {run['roofline_wall_s']:.2f} s, {run['roofline_tokens_s']:.0f} tokens/s; "
        f"the engine reaches {run['of_the_roofline']:.1%}"
    )
    print(
        f"loop {run['loop_share']:.1%} and launching {run['launching_share']:.1%} of the time, "
        f"{metrics['late_compiles']} late compiles, {metrics['preemptions']} preemptions"
    )


@click.command()
@click.option("--trace", help="CSV of prompt and output lengths.")
@click.option("--requests", type=click.IntRange(min=2), help="The first N lengths; 1000.")
@click.option("--json", "json_path", required=True, help="File for the figures.")
@click.option("--kernels", help="What attends, as of the engine's option.")
@click.option("--rehearse", is_flag=True, help="A tiny model, kernels interpreted: on a CPU.")
def main(
    trace: str | None, requests: int | None, json_path: str, kernels: str | None, rehearse: bool
) -> None:
    """Measure, print and write; exit with 1 if log probabilities are not numbers."""
    size = REHEARSAL if rehearse else FULL
    work = lengths(trace, size, requests or size.requests)
    rates = {
        "copy_gb_s": copy_rate(size.copied) / 1e9,
        "product_tflops": product_rate(size.multiplied) / 1e12,
    }
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(size.model))
        llm = LLM(folder, **size.engine | ({"kernels": kernels} if kernels else {}))
        roofline = roofline_of(folder, rates, llm.engine.plan.dtype.itemsize)
    figures: dict[str, Any] = {
        "jax": jax.__version__,
        "device": jax.devices()[0].device_kind,
        "rehearsed": rehearse,
        "lengths": Path(trace).name if trace else LENGTHS,
        "model": size.model,
        "instances": llm.describe()["instances"],
        **rates,
        "step_time": trace_steps(llm, work, size, roofline),
    }
    # Before the long run, which may be stopped.
    show_steps(figures)
    write(json_path, figures)
    stage = llm.engine.worker.stages[0]
    assert isinstance(stage, Stage)
    most = min(size.engine["max_num_seqs"], len(work))
    greedy, drawn = (StepWatch(stage, most // 2, size.steps) for _ in range(2))
    figures |= long_run(llm, work, trace or LENGTHS, greedy, roofline)
    show_run(figures["run"])
    write(json_path, figures)
    figures["untraced"] = untraced(llm, work[:most], greedy, drawn)
    show_untraced(figures["untraced"])
    write(json_path, figures)
    if figures["not_finite"]:
        raise SystemExit(f"{figures['not_finite']} log probabilities are not finite")


def show_untraced(untraced: dict[str, Any]) -> None:
    """Print steps of decodes in runs and alone."""
    for name, found in untraced.items():
        if isinstance(found, str):
            print(f"untraced decodes, {name}: {found}")
            continue
        print(
            f"untraced decodes, {name}: {1000 * found['step_s']:.2f} ms a step, host "
            f"{found['host_share']:.1%}"
        )
        for sampler, alone in found["alone"].items():
            print(
                f"    alone, {sampler}: device {1000 * alone['device_s']:.2f} ms, "
                f"launched in {1000 * alone['launch_s']:.2f}"
            )


def write(path: str, figures: dict[str, Any]) -> None:
    """Write the figures as JSON."""
    Path(path).write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
