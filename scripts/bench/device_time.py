"""Times of a GPU in the steps of a run, by kind of kernel, from a trace of JAX's profiler."""

import re
import shutil
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import jax
from jax.profiler import ProfileData, ProfileOptions, TraceAnnotation

from jaxinfer.serving.batch import Work
from jaxinfer.serving.world import StepDone

_MARK = "jaxinfer step done"
# Searched in this order, because a name may contain several of these.
_KINDS = {
    "attention": re.compile(r"paged_|attention|flash|fmha", re.I),
    "matmuls": re.compile(r"gemm|cublas|cutlass|nvjet|xmma|splitk|matmul|dot", re.I),
}
# Number of steps in flight when a trace starts; one may have been computed in part.
_SKIPPED = 3
_LONGEST = 12

Span = tuple[float, float]


@dataclass(frozen=True)
class Kernel:
    """A launched kernel; its times are in seconds, by the same clock as the steps' times."""

    name: str
    start: float
    end: float


@dataclass(frozen=True)
class DeviceTime:
    """Seconds per step by cause; they add up to ``step_s``.

    Attributes:
        attention: seconds of attention kernels, including KV writes.
        matmuls: seconds of matrix products.
        rest: seconds of all other kernels.
        host: seconds in which no kernel ran.
        kernels: seconds and launches per step of the kernels that take longest, by name.
    """

    steps: int
    step_s: float
    attention: float
    matmuls: float
    rest: float
    host: float
    kernels: Mapping[str, tuple[float, float]]


def device_time(kernels: Iterable[Kernel], marks: Sequence[float]) -> DeviceTime:
    """Return the mean device time of the steps between the marks; each mark ends a step."""
    first, last, steps = marks[0], marks[-1], len(marks) - 1
    inside = [
        Kernel(k.name, max(k.start, first), min(k.end, last))
        for k in kernels
        if k.end > first and k.start < last
    ]
    seconds: defaultdict[str, float] = defaultdict(float)
    for kernel in inside:
        seconds[kernel.name] += (kernel.end - kernel.start) / steps
    launches = Counter(kernel.name for kernel in inside)
    kinds = dict.fromkeys(_KINDS, 0.0)
    for name, spent in seconds.items():
        if kind := _kind(name):
            kinds[kind] += spent
    longest = sorted(seconds, key=lambda name: seconds[name], reverse=True)[:_LONGEST]
    busy = _covered((k.start, k.end) for k in inside) / steps
    step_s = (last - first) / steps
    return DeviceTime(
        steps,
        step_s,
        **kinds,
        rest=max(busy - sum(kinds.values()), 0.0),
        host=step_s - busy,
        kernels={name: (seconds[name], launches[name] / steps) for name in longest},
    )


def _kind(name: str) -> str | None:
    return next((kind for kind, pattern in _KINDS.items() if pattern.search(name)), None)


def _covered(spans: Iterable[Span]) -> float:
    """Return the seconds that at least one of the spans covers."""
    total, until = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(end - max(start, until), 0.0)
        until = max(until, end)
    return total


def read_trace(data: ProfileData) -> tuple[list[Kernel], list[float]]:
    """Return the kernels of all GPUs, and the marks."""
    kernels, marks = [], []
    for plane in data.planes:
        on_gpu = plane.name.startswith("/device:GPU")
        for line in plane.lines:
            # Other lines of a GPU show the same time again, by operator or by module.
            if on_gpu and line.name.startswith("Stream"):
                for event in line.events:
                    start, seconds = event.start_ns / 1e9, event.duration_ns / 1e9
                    kernels.append(Kernel(event.name, start, start + seconds))
            elif not on_gpu:
                marks += [e.start_ns / 1e9 for e in line.events if e.name == _MARK]
    return kernels, sorted(marks)


@dataclass
class _Window:
    """A running trace of steps of one kind."""

    name: str
    folder: Path
    left: int
    work: list[Work]


class StepTracer:
    """Traces some successive steps of each kind in a run, once; ``on_step`` is for ``LLM.run``.

    Args:
        kinds: functions that tell whether a step is of a kind, by the kind's name.
        steps: number of steps to trace, for each kind.

    Attributes:
        found: device times by kind, or the reason why there are none.
        work: the work of the traced steps, by kind.
    """

    def __init__(self, kinds: Mapping[str, Callable[[Work], bool]], steps: int) -> None:
        self.found: dict[str, DeviceTime | str] = dict.fromkeys(kinds, "no such steps in the run")
        self.work: dict[str, list[Work]] = {}
        self._waiting = dict(kinds)
        self._kinds, self._steps = kinds, steps
        self._window: _Window | None = None

    def on_step(self, done: StepDone) -> None:
        """Take note of an ended step."""
        work, window = done.batch.work, self._window
        if window is None:
            self._start(work)
        elif not self._kinds[window.name](work):
            # There were too few in a row, so wait for the next ones.
            self._waiting[window.name] = self._kinds[window.name]
            self.close()
        else:
            with TraceAnnotation(_MARK):
                window.left -= 1
            window.work.append(work)
            if not window.left:
                self._read(window)

    def _start(self, work: Work) -> None:
        name = next((name for name, is_of in self._waiting.items() if is_of(work)), None)
        if name is None:
            return
        del self._waiting[name]
        folder = Path(tempfile.mkdtemp())
        options = ProfileOptions()
        options.host_tracer_level, options.python_tracer_level = 1, 0
        jax.profiler.start_trace(folder, profiler_options=options)
        self._window = _Window(name, folder, _SKIPPED + 1 + self._steps, [])

    def close(self) -> None:
        """Give up a running trace."""
        if self._window:
            jax.profiler.stop_trace()
            shutil.rmtree(self._window.folder)
            self._window = None

    def _read(self, window: _Window) -> None:
        jax.profiler.stop_trace()
        (path,) = window.folder.rglob("*.xplane.pb")
        kernels, marks = read_trace(ProfileData.from_file(str(path)))
        shutil.rmtree(window.folder)
        self._window = None
        self.work[window.name] = window.work[_SKIPPED + 1 :]
        platform = jax.default_backend()
        if kernels:
            self.found[window.name] = device_time(kernels, marks[_SKIPPED:])
        elif platform == "cpu":
            self.found[window.name] = "not available on cpu"
        else:
            self.found[window.name] = f"not available: the trace has no kernels of the {platform}"
