"""Hidden states of a model as it begins to answer: at a prompt's last position.

The engine computes them in any case, because its head samples the answer's first token from them.

Shape suffixes: N prompts, S rows sampled from, D model dim.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxinfer.llm import LLM
from jaxinfer.request import SamplingParams
from jaxinfer.serving.world import StepDone


def prompt_states(llm: LLM, prompts: Sequence[Sequence[int]], *, progress: bool = True) -> Any:
    """Return the last layer's output [N, D] at each prompt's last token, before the final norm.

    The function serves each prompt with one output token, and keeps the input of the head.

    Args:
        llm: one instance; its prefix cache stays as it is.
    """
    stage: Any = llm.engine.stages[-1]
    sample, states, found = stage.sample, [], {}

    def keep(key: Any, hidden: Any, *rest: Any) -> Any:
        states.append(hidden[0])
        return sample(key, hidden, *rest)

    def take(done: StepDone) -> None:
        x_SD = np.asarray(states.pop(0))
        sampled = [row.request.id for row in done.batch.rows if row.samples]
        found.update({name: x_SD[at].copy() for at, name in enumerate(sampled)})

    params = SamplingParams(temperature=0, max_tokens=1)
    requests = [
        request
        for number, prompt in enumerate(prompts)
        for request in llm.make_requests(str(number), prompt, params)
    ]
    stage.sample = keep
    try:
        llm.run(requests, lambda output: None, progress=progress, on_step=take)
    finally:
        del stage.sample
    return np.stack([found[request.id] for request in requests])
