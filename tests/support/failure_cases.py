"""Prompts and instances of the tests in which some of them fail."""

from pathlib import Path
from typing import Any

from jaxinfer import LLM, SamplingParams
from jaxinfer.config.cluster import InstanceConfig
from jaxinfer.config.groups import GroupConfig
from jaxinfer.config.run_file import RunFile
from jaxinfer.request import RequestOutput

PROMPTS = [{"prompt_token_ids": [7 * i % 256 for i in range(1, n)]} for n in (40, 60, 25, 90, 33)]
PARAMS = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
INSTANCE: dict[str, Any] = {
    "max_num_seqs": 4,
    "max_num_batched_tokens": 32,
    "page_size": 8,
    "num_pages": 65,
}


def cluster(folder: Path, system: dict[str, Any], *names: str, **more: Any) -> LLM:
    config = RunFile(
        model=str(folder),
        groups={name: GroupConfig() for name in names},
        instances={name: InstanceConfig(group=name, **INSTANCE) for name in names},
        system=system,
        **more,
    )
    return LLM.from_config(config, progress=False)


CRONUS = {"name": "cronus", "cut_share": 0.6, "partial": "a", "chunked": "b"}


def break_device(llm: LLM, name: str, after: int) -> None:
    """The step was launched; what waits for it finds that it has failed."""
    stage, calls = llm.cluster.engines[name].worker.stages[-1], iter(range(10**6))
    end_of = stage.end_of

    def failing(*args: Any) -> float:
        if next(calls) >= after:
            raise RuntimeError("injected")
        return end_of(*args)

    stage.end_of = failing  # type: ignore[method-assign]


def tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def break_gathers(llm: LLM, source: str, after: int) -> None:
    """KV waits to be fetched from an instance; copying it out of its pages fails, whoever asks."""
    calls = iter(range(10**6))

    def failing(take: Any) -> Any:
        def take_or_fail(*args: Any) -> Any:
            if next(calls) >= after:
                raise RuntimeError("injected")
            return take(*args)

        return take_or_fail

    for (name, _), channel in llm.cluster.channels.items():
        for pair in channel.pairs if name == source else ():
            end = channel.sides[0].endpoint._ends[pair.source_end]  # type: ignore[attr-defined]
            end.source.take = failing(end.source.take)
