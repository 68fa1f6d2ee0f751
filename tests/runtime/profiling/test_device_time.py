"""Device time by kind of kernel, from traces of JAX's profiler."""

from pathlib import Path
from typing import Any

import pytest
from jax.profiler import ProfileData

from jaxinfer import LLM, SamplingParams
from jaxinfer.serving.batch import Work
from scripts.bench.device_time import Kernel, StepTracer, device_time, read_trace

KERNELS = [
    Kernel("paged_decode", 0.5, 1.5),  # Before the first mark in part.
    Kernel("nvjet_tst_128x8", 2.0, 2.5),
    Kernel("gemm_fusion_dot_7", 2.5, 3.0),
    Kernel("loop_add_fusion", 3.0, 3.2),
    Kernel("MemcpyH2D", 3.1, 3.4),  # On another stream.
    Kernel("paged_write", 4.0, 4.1),
    Kernel("nvjet_tst_128x8", 6.0, 7.0),  # After the last.
]


def test_shares_of_a_step() -> None:
    found = device_time(KERNELS, [1.0, 3.0, 5.0])
    assert found.steps == 2
    assert found.step_s == pytest.approx(2)
    assert found.attention == pytest.approx((0.5 + 0.1) / 2)
    assert found.matmuls == pytest.approx(1.0 / 2)
    assert found.rest == pytest.approx(0.4 / 2)
    parts = found.attention + found.matmuls + found.rest + found.host
    assert parts == pytest.approx(found.step_s)
    assert list(found.kernels)[:2] == ["paged_decode", "nvjet_tst_128x8"]
    assert found.kernels["nvjet_tst_128x8"] == pytest.approx((0.25, 0.5))


TRACE = """
planes {
  name: "/device:GPU:0"
  event_metadata { key: 1 value { id: 1 name: "paged_chunk" } }
  event_metadata { key: 2 value { id: 2 name: "jit_forward" } }
  lines { name: "Stream #13(Compute)" timestamp_ns: 1000
          events { metadata_id: 1 offset_ps: 500000 duration_ps: 2000000 } }
  lines { name: "XLA Modules" timestamp_ns: 1000
          events { metadata_id: 2 offset_ps: 0 duration_ps: 9000000 } }
}
planes {
  name: "/host:CPU"
  event_metadata { key: 1 value { id: 1 name: "jaxinfer step done" } }
  event_metadata { key: 2 value { id: 2 name: "something else" } }
  lines { name: "python" timestamp_ns: 1000
          events { metadata_id: 1 offset_ps: 0 duration_ps: 10 }
          events { metadata_id: 2 offset_ps: 5 duration_ps: 10 }
          events { metadata_id: 1 offset_ps: 4000000 duration_ps: 10 } }
}
"""


def test_a_gpus_trace() -> None:
    kernels, marks = read_trace(ProfileData.from_text_proto(TRACE))
    assert [kernel.name for kernel in kernels] == ["paged_chunk"]
    found = device_time(kernels, marks)
    assert found.step_s == pytest.approx(4e-6)
    assert found.attention == pytest.approx(2e-6)
    assert found.host == pytest.approx(2e-6)


def serve(tiny: LLM, tracer: StepTracer, tokens: int) -> None:
    params: Any = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    requests = [r for i in range(3) for r in tiny.make_requests(str(i), [1, 2, 3, i], params)]
    tiny.run(requests, lambda output: None, progress=False, on_step=tracer.on_step)
    tracer.close()


def is_decodes(work: Work) -> bool:
    return not work.chunks


def test_steps_of_a_run_on_cpu(tiny: LLM) -> None:
    tracer = StepTracer({"chunks": lambda work: len(work.chunks) > 9, "decodes": is_decodes}, 4)
    serve(tiny, tracer, 30)
    assert tracer.found == {
        "chunks": "no such steps in the run",
        "decodes": "not available on cpu",
    }
    assert [work.decodes for work in tracer.work["decodes"]] == [3] * 4


def test_a_run_that_ends_too_early(tiny: LLM, tmp_path: Path) -> None:
    for _ in range(2):
        tracer = StepTracer({"decodes": is_decodes}, 100)
        serve(tiny, tracer, 20)
        assert tracer.found == {"decodes": "no such steps in the run"}
