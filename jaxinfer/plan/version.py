"""A digest of all that real runs depend on besides what is asked."""

import hashlib
import os

from jaxinfer.made_from import PACKAGE, cpu_name, digest_of, version_of


def real_version() -> str:
    """A digest of all that real runs depend on: the package, processor, devices, JAX and Numba.

    The host's name does not count, since each container has another. It initialises JAX.
    """
    import jax

    devices = sorted({f"{each.platform} {each.device_kind}" for each in jax.devices()})
    packages = [f"{name} {version_of(name)}" for name in ("jax", "jaxlib", "numba")]
    machine = [cpu_name(), str(os.cpu_count())]
    text = "\n".join([digest_of(PACKAGE), *machine, *devices, *packages])
    return hashlib.sha256(text.encode()).hexdigest()
