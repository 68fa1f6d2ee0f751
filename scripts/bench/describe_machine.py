"""Describe the machine of a measurement as JSON: devices, driver, versions and date.

python -m scripts.bench.describe_machine device.json
"""

import json
import os
import platform
import subprocess
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import click
import jax
import psutil

PACKAGES = (
    "jax",
    "jaxlib",
    "jax-cuda12-plugin",
    "jax-cuda13-plugin",
    "flax",
    "numpy",
    "transformers",
)
SMI = "name,driver_version,memory.total,power.limit,clocks.max.sm,clocks.max.memory"


def output_of(*command: str) -> str | None:
    """Return the output of a command; None if it cannot be run."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


def versions() -> dict[str, str]:
    """Return the versions of the installed packages."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def describe(device: jax.Device) -> dict[str, object]:
    """Describe one of JAX's devices."""
    memory = device.memory_stats() or {}
    return {
        "kind": device.device_kind,
        "platform": device.platform,
        "compute_capability": getattr(device, "compute_capability", None),
        "bytes_limit": memory.get("bytes_limit"),
    }


@click.command()
@click.argument("path", type=click.Path(path_type=Path))
@click.option("--rehearse", is_flag=True, help="A machine without a GPU will do.")
def main(path: Path, rehearse: bool) -> None:
    """Write the file; fail if JAX has no GPU."""
    repository = str(Path(__file__).parent)
    found = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "rehearsed": rehearse,
        "commit": output_of("git", "-C", repository, "rev-parse", "HEAD"),
        "devices": [describe(device) for device in jax.devices()],
        "nvidia_smi": output_of("nvidia-smi", f"--query-gpu={SMI}", "--format=csv,noheader"),
        "versions": versions(),
        "system": platform.platform(),
        "cores": os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
    }
    text = json.dumps(found, indent=2)
    path.write_text(text + "\n", encoding="utf-8")
    print(text)
    if jax.default_backend() != "gpu" and not rehearse:
        raise SystemExit(f"JAX runs on {jax.default_backend()} here, must be a GPU (or --rehearse)")


if __name__ == "__main__":
    main()
