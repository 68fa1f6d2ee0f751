"""Steps that write their results over those of the step before."""

import json
from pathlib import Path

import jax
import pytest

from jaxinfer import LLM
from jaxinfer.runtime.stage.sampler import SamplerShape
from jaxinfer.runtime.stage.sampling_inputs import empty_sampling
from jaxinfer.runtime.stage.stage import Stage
from jaxinfer.runtime.stage.step import Key
from scripts.bench.engine import REHEARSAL
from scripts.bench.launching import in_place, launch_in_place


@pytest.mark.slow
def test_results_stay_at_their_addresses(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(REHEARSAL.model))
    stage = LLM(str(tmp_path), progress=False, **REHEARSAL.engine).engine.worker.stages[0]
    assert isinstance(stage, Stage)
    shape = next(shape for shape in stage.step.limits.shapes() if not shape.chunks)
    key = Key(shape, SamplerShape())
    inputs = next(stage.padding(shape)), empty_sampling(shape.rows, key.sampler)
    step = in_place(stage, key, *jax.device_put(inputs, stage.plan.whole))

    def addresses() -> list[int]:
        return [x.unsafe_buffer_pointer() for x in jax.tree.leaves((step(), stage.kv))]

    first = addresses()
    assert len(set(first)) == len(first)
    assert first == addresses() == addresses()
    assert launch_in_place(step, 2) > 0
