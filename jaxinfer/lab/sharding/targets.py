"""Devices to compile for without having them: forced host devices, TPUs, and described GPUs.

Use this module in a separate process: JAX must not have been started.
"""

import os
import re
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, NamedTuple

from jaxinfer.errors import JaxinferError

_FORM = re.compile(r"(\w+):(\d+(?:x\d+)*)")


@dataclass(frozen=True)
class CompileTarget:
    """A kind of device for which programs are compiled.

    Attributes:
        kind: ``cpu``, one of ``GPUS``, or a kind of TPU such as ``v5e``.
        shape: number of devices, or the axes of a TPU's torus.
    """

    kind: str
    shape: tuple[int, ...]

    @classmethod
    def read(cls, text: str) -> "CompileTarget":
        """Read ``cpu:8``, ``h100:8`` or ``v5e:2x4``.

        Raises:
            JaxinferError: the text has another form.
        """
        found = _FORM.fullmatch(text.lower())
        if not found:
            raise JaxinferError(f"--for {text}: must be such as cpu:8, h100:8 or v5e:2x4")
        kind, shape = found[1], tuple(int(size) for size in found[2].split("x"))
        if kind != "cpu" and kind not in GPUS and not kind.startswith("v"):
            known = ", ".join(["cpu", *GPUS])
            raise JaxinferError(f"--for {text}: no kind {kind!r}: known: {known}, TPUs as v5e")
        return cls(kind, shape)

    @property
    def devices(self) -> int:
        """Number of devices."""
        count = 1
        for size in self.shape:
            count *= size
        return count

    @property
    def card(self) -> str:
        """Name of the card in ``configs/gpus.yaml``; for a CPU's programs, an H100's."""
        cards = {"a100": "A100-80G-SXM", "l4": "L4"}
        return f"TPU-{self.kind}" if self._is_tpu else cards.get(self.kind, "H100-SXM")

    @property
    def _is_tpu(self) -> bool:
        return not self.is_cpu and not self.is_gpu

    @property
    def is_gpu(self) -> bool:
        """True if XLA for CUDA compiles the programs."""
        return self.kind in GPUS

    @property
    def is_cpu(self) -> bool:
        """True if XLA for CPUs compiles the programs, without 16-bit floats and reduce-scatters."""
        return self.kind == "cpu"

    def __str__(self) -> str:
        return f"{self.kind}:{'x'.join(map(str, self.shape))}"

    def environment(self) -> dict[str, str]:
        """Return environment variables with which a process compiles without local devices."""
        flags = os.environ.get("XLA_FLAGS", "")
        if self.is_cpu:
            flags += f" --xla_force_host_platform_device_count={self.devices}"
        return {
            "JAX_NUM_CPU_DEVICES": str(self.devices if self.is_cpu else 1),
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": flags.strip(),
            "TPU_SKIP_MDS_QUERY": "1",
            # An error's last line is the error, and not a note about its traceback.
            "JAX_TRACEBACK_FILTERING": "off",
            # XLA warns of arrays that it copies whole; the counts include them.
            "TF_CPP_MIN_LOG_LEVEL": "2",
        }


class GpuTarget(NamedTuple):
    """The figures of a GPU that XLA asks for: memory in bytes, and the rate in bytes per second."""

    name: str
    capability: tuple[int, int]
    cores: int
    shared_memory: int
    threads: int
    rate: int
    memory: int


GPUS = {
    "h100": GpuTarget("NVIDIA H100 80GB HBM3", (9, 0), 132, 233472, 2048, 3352 * 10**9, 80 * 2**30),
    "a100": GpuTarget("NVIDIA A100-SXM4-80GB", (8, 0), 108, 167936, 2048, 2039 * 10**9, 80 * 2**30),
    "l4": GpuTarget("NVIDIA L4", (8, 9), 58, 102400, 1536, 300 * 10**9, 24 * 2**30),
}


def description(gpu: GpuTarget) -> str:
    """Return XLA's description of a GPU, a GpuTargetConfigProto.

    Without a driver's version, XLA leaves calls, branches and loops out of command buffers.
    """
    major, minor = gpu.capability
    # sm_90a, which has wgmma.
    extension = "feature_extension: ACCELERATED_FEATURES" if major == 9 else ""
    return f"""gpu_device_info {{
        threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
        shared_memory_per_core: {gpu.shared_memory}
        shared_memory_per_block_optin: {gpu.shared_memory - 1024}
        threads_per_core_limit: {gpu.threads} core_count: {gpu.cores} fpus_per_core: 128
        block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
        memory_bandwidth: {gpu.rate} l2_cache_size: 41943040 clock_rate_ghz: 1.5
        device_memory_size: {gpu.memory}
        cuda_compute_capability {{ major: {major} minor: {minor} {extension} }}
        registers_per_core_limit: 65536 registers_per_block_limit: 65536 name: "{gpu.name}"
        driver_version: "12.9.0"
    }}
    platform_name: "CUDA"
    dnn_version_info {{ major: 9 minor: 10 }}
    runtime_version {{ major: 12 minor: 9 }}
    device_description_str: "{gpu.name}" """


def check_installed(target: CompileTarget) -> None:
    """Check that there is a compiler for a target, without starting JAX.

    Raises:
        JaxinferError: the compiler is not installed.
    """
    plugins = ("jax_plugins.xla_cuda12", "jax_plugins.xla_cuda13")
    if target.is_gpu and not (find_spec("jax_plugins") and any(map(find_spec, plugins))):
        raise JaxinferError(f"--for {target}: needs XLA for CUDA: pip install 'jax[cuda12]'")
    if not target.is_cpu and not target.is_gpu and find_spec("libtpu") is None:
        raise JaxinferError(f"--for {target}: needs XLA for TPUs: pip install libtpu")


def devices_of(target: CompileTarget) -> list[Any]:
    """Return the target's devices, in the process that compiles.

    Raises:
        JaxinferError: the plugin for them is not installed, or has no such devices.
    """
    import jax
    from jax.experimental import topologies

    check_installed(target)
    if target.is_cpu:
        return list(jax.devices("cpu"))
    if target.is_gpu:
        options = {
            "platform": "cuda",
            "topology_name": target.kind,
            "target_config": description(GPUS[target.kind]),
            "topology": f"1x1x{target.devices}",
        }
    else:
        options = {"platform": "tpu", "topology_name": str(target)}
    try:
        return list(topologies.get_topology_desc(**options).devices)
    except Exception as error:  # Any error that the plugin raises for the name.
        said = str(error).splitlines()[0]
        raise JaxinferError(f"--for {target}: {said}") from None
