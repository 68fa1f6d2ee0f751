"""A separate process that compiles layers in many layouts, given jobs as JSON; prints the results.

python -m jaxinfer.lab.sharding.compiling < jobs.json
"""

import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from os import environ
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Any

from jaxinfer.errors import JaxinferError
from jaxinfer.hardware.catalogue import ModelShape
from jaxinfer.lab.sharding.hlo import counts
from jaxinfer.lab.sharding.targets import CompileTarget, devices_of
from jaxinfer.models.layouts import Layout, Rule, in_use

if TYPE_CHECKING:
    from jaxinfer.lab.sharding.layer import Program

PHASES = ("prefill", "decode")


@dataclass(frozen=True)
class LayerJob:
    """A layer, or the head, to compile.

    Attributes:
        name: name of the layout.
        layout: the layout as text, see ``as_text``.
        part: ``prefill``, ``decode`` or ``head``.
        tokens: number of tokens of the step.
        context: number of KV entries that a decode sees, including its own.
    """

    name: str
    layout: str
    part: str
    tokens: int
    context: int


@dataclass(frozen=True)
class Compiled:
    """The compiler's result for a job.

    Attributes:
        collectives: kind -> (number of arrays, numbers that each device sends).
        temporaries: size in numbers, on one device, of everything that is neither argument nor
            result.
        compile_s: seconds to compile.
        ragged: whether experts are multiplied by ``jax.lax.ragged_dot``, which engines never use.
    """

    collectives: dict[str, tuple[int, float]]
    temporaries: float
    compile_s: float
    ragged: bool

    @classmethod
    def of(cls, found: dict[str, Any]) -> "Compiled":
        """Read a result from JSON."""
        kinds = {kind: (int(n), float(size)) for kind, (n, size) in found["collectives"].items()}
        seconds = float(found["compile_s"])
        return cls(kinds, float(found["temporaries"]), seconds, bool(found["ragged"]))


def as_text(layout: Layout, axes: Sequence[str]) -> str:
    """Return a layout as JSON, with the names of this mesh's axes."""
    return json.dumps(asdict(in_use(layout, axes)))


def _read(text: str) -> Layout:
    def places(table: dict[str, list[str]]) -> dict[str, tuple[str, ...]]:
        return {letter: tuple(axes) for letter, axes in table.items()}

    found = json.loads(text)
    return Layout(
        tuple(Rule(rule["pattern"], places(rule["axes"])) for rule in found["parameters"]),
        {name: places(table) for name, table in found["activations"].items()},
        places(found["kv"]),
        tuple(found["gathered"]),
    )


def compile_all(
    target: CompileTarget,
    mesh: dict[str, int],
    model: ModelShape,
    dtype: str,
    jobs: Sequence[LayerJob],
) -> Iterator[Compiled | str]:
    """Compile jobs in a separate process; yield each result, or the reason for a failure.

    If a job ends the process, another one is started for the next job.

    Raises:
        JaxinferError: the target's compiler is not installed, or does not start.
    """
    left = list(jobs)
    while left:
        for found in _compile_while_it_lives(target, mesh, model, dtype, left):
            del left[0]
            yield found


def _compile_while_it_lives(
    target: CompileTarget,
    mesh: dict[str, int],
    model: ModelShape,
    dtype: str,
    jobs: Sequence[LayerJob],
) -> Iterator[Compiled | str]:
    asked = {
        "target": str(target),
        "mesh": mesh,
        "model": model.model_dump(),
        "dtype": dtype,
        "jobs": [asdict(job) for job in jobs],
    }
    with (
        TemporaryFile("w+") as log,
        subprocess.Popen(
            [sys.executable, "-m", __name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            env={**environ, **target.environment()},
            text=True,
        ) as process,
    ):
        assert process.stdin
        assert process.stdout

        def answer() -> dict[str, Any]:
            assert process.stdout
            if line := process.stdout.readline():
                found: dict[str, Any] = json.loads(line)
                return found
            log.seek(0)
            said = log.read().strip().splitlines() or [f"it ended with {process.wait()}"]
            return {"died": f"the compiler for {target} failed: {said[-1]}"}

        try:
            process.stdin.write(json.dumps(asked))
            process.stdin.close()
            if refused := {"error", "died"} & (begins := answer()).keys():
                raise JaxinferError(begins[refused.pop()])
            for _ in jobs:
                found = answer()
                if "died" in found:
                    yield found["died"]
                    return
                yield found["error"] if "error" in found else Compiled.of(found)
        finally:
            process.kill()


def _main() -> None:
    asked = json.load(sys.stdin)
    target = CompileTarget.read(asked["target"])

    def answer(found: dict[str, Any]) -> None:
        print(json.dumps(found), flush=True)

    try:
        devices = devices_of(target)
    except JaxinferError as error:
        answer({"error": str(error)})
        return
    answer({"devices": len(devices)})
    # XLA for CPUs computes and sends 16-bit floats in 32 bits, so numbers are counted, not bytes.
    dtype = "float32" if target.is_cpu else asked["dtype"]
    for job in asked["jobs"]:
        model = ModelShape.model_validate(asked["model"])
        try:
            answer(asdict(_compiled(LayerJob(**job), target, devices, asked["mesh"], model, dtype)))
        except Exception as error:  # Any error that JAX or XLA raises for this one.
            said = (str(error).strip().splitlines() or [type(error).__name__])[0]
            answer({"error": f"the compiler for {target}: {said}"})


def _compiled(
    job: LayerJob,
    target: CompileTarget,
    devices: list[Any],
    mesh: dict[str, int],
    model: ModelShape,
    dtype: str,
) -> Compiled:
    import jax
    import numpy as np
    from jax.sharding import Mesh

    from jaxinfer.lab.sharding.expert_products import RAGGED
    from jaxinfer.lab.sharding.layer import Program
    from jaxinfer.sharding.shapes import padded

    layout = _read(job.layout)
    laid = Mesh(np.array(devices).reshape(*mesh.values()), tuple(mesh))
    wide = padded(model, layout, mesh)
    program = Program(wide, layout, laid, job.context, np.dtype(dtype), target)
    started = time.perf_counter()
    with jax.set_mesh(laid):
        compiled = _lowered(program, job).compile()
    memory = compiled.memory_analysis()
    return Compiled(
        counts(compiled.as_text() or ""),
        memory.temp_size_in_bytes / np.dtype(dtype).itemsize if memory else 0.0,
        time.perf_counter() - started,
        job.part != "head" and program.products is RAGGED,
    )


def _lowered(program: "Program", job: LayerJob) -> Any:
    import jax

    if job.part == "head":
        return jax.jit(program.head).lower(*program.head_arguments(job.tokens))
    arguments = program.layer_arguments(job.tokens, job.part == "decode")
    jitted = partial(jax.jit, donate_argnums=2) if job.part == "decode" else jax.jit
    return jitted(program.layer).lower(*arguments)


if __name__ == "__main__":
    _main()
