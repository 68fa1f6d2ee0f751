"""Links along the axes of a mesh, and the seconds of a ring over some of them."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from jaxinfer.hardware.catalogue import Gpu
from jaxinfer.sharding.collectives import Collective
from jaxinfer.sharding.shapes import Sizes


@dataclass(frozen=True)
class Link:
    """The link along one axis of a mesh.

    Attributes:
        gb_s: 10^9 bytes per second that a device sends in a ring.
        each_s: fixed seconds of each collective.
        is_apart: whether it has separate wires, as on a torus, so that collectives over several
            axes use all of them.
    """

    gb_s: float
    each_s: float = 0.0
    is_apart: bool = False


def links_of(gpu: Gpu, mesh: Sizes) -> dict[str, Link]:
    """Return the links of all axes, at the rates of collectives within a domain."""
    return _links(gpu, mesh, gpu.stated_collective if gpu.is_torus else gpu.collective)


def stated_links(gpu: Gpu, mesh: Sizes) -> dict[str, Link]:
    """Return the links of a mesh at the rates that a simulation's roofline uses."""
    return _links(gpu, mesh, gpu.stated_collective)


def _links(gpu: Gpu, mesh: Sizes, within: tuple[float, float]) -> dict[str, Link]:
    """Return links; axes that leave a domain have the slower of the link and a GPU's network."""
    gb_s, each_s = within
    slower = axes_between_domains(mesh, gpu.domain)
    return {
        axis: Link(min(gb_s, gpu.network_gb_s) if axis in slower else gb_s, each_s, gpu.is_torus)
        for axis in mesh
    }


def axes_between_domains(mesh: Sizes, domain: int | None) -> list[str]:
    """Return the axes along which some group of devices spans domains of ``domain``
    devices each.
    """
    found, inner, devices = [], 1, math.prod(mesh.values())
    for axis, size in reversed([*mesh.items()]):
        last = inner * (size - 1)
        firsts = (at for at in range(devices) if at // inner % size == 0)
        if domain and any(first // domain != (first + last) // domain for first in firsts):
            found.append(axis)
        inner *= size
    return found[::-1]


def described(links: Mapping[str, Link], gpu: Gpu, mesh: Sizes) -> str:
    """Describe the rates of all axes, and the kind of link behind each."""
    usual, slower = links_of(gpu, mesh), axes_between_domains(mesh, gpu.domain)

    def what(axis: str) -> str:
        if links[axis] != usual[axis]:
            return "as given"
        return f"between domains of {gpu.domain}" if axis in slower else gpu.link

    return ", ".join(f"{axis} {link.gb_s:g} GB/s ({what(axis)})" for axis, link in links.items())


def ring_seconds(each: Collective, links: Mapping[str, Link]) -> tuple[float, float]:
    """Return seconds per byte of a collective's array in a ring over all its axes, and fixed
    seconds.

    The slowest of their links decides, unless each axis has separate wires.
    """
    used = [links[axis] for axis in each.axes]
    rates = [link.gb_s * 1e9 for link in used]
    rate = sum(rates) if all(link.is_apart for link in used) else min(rates)
    return each.moved / rate, max(link.each_s for link in used)
