"""Links along axes of meshes, and where these leave a domain."""

import math
from itertools import pairwise, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxinfer.hardware.catalogue import find_gpu, find_model, gpu_names
from jaxinfer.models.layouts import LAYOUTS
from jaxinfer.sharding.costs import LayoutCosts, LayoutFlow
from jaxinfer.sharding.links import Link, axes_between_domains, described, links_of, stated_links

MESH = {"x": 8, "y": 8}


@given(st.lists(st.integers(1, 6), min_size=1, max_size=3), st.integers(1, 40))
def test_axes_leave_domains_where_neighbours_on_them_do(sizes: list[int], domain: int) -> None:
    """Devices are in the mesh's order, and the first ones are in the first domain."""
    mesh = dict(zip("xyz", sizes, strict=False))
    at = dict(enumerate(product(*map(range, sizes))))
    number = {place: n for n, place in at.items()}
    found = []
    for i, axis in enumerate(mesh):
        rings = ([number[*p[:i], k, *p[i + 1 :]] for k in range(sizes[i])] for p in at.values())
        if any(one // domain != two // domain for ring in rings for one, two in pairwise(ring)):
            found.append(axis)
    assert axes_between_domains(mesh, domain) == found
    assert axes_between_domains(mesh, math.prod(sizes)) == axes_between_domains(mesh, None) == []


def test_the_slower_of_link_and_network() -> None:
    h100 = find_gpu("H100-SXM")
    assert links_of(h100, MESH) == {"x": Link(50, 12e-6), "y": Link(225, 12e-6)}
    assert stated_links(h100, MESH) == {"x": Link(50), "y": Link(450)}
    assert described(links_of(h100, MESH), h100, MESH) == (
        "x 50 GB/s (between domains of 8), y 225 GB/s (NVLink4)"
    )
    slow = h100.model_copy(update={"link_gb_s": 40})
    assert stated_links(slow, MESH) == {"x": Link(40), "y": Link(40)}


def test_cards_with_domains() -> None:
    """Those that a link joins beside PCIe; tori and what goes through the host have none."""
    for name in gpu_names():
        gpu = find_gpu(name)
        assert (gpu.domain is not None) == gpu.link.startswith(("NVLink", "Infinity")), name
    for name, gb_s in (("L40S", 17.0), ("TPU-v5e", 45.0)):
        assert {link.gb_s for link in links_of(find_gpu(name), MESH).values()} == {gb_s}


@pytest.mark.parametrize(("layout", "share"), [("megatron", 9.0), ("weight_stationary_2d", None)])
def test_seconds_are_of_the_network_where_collectives_leave_a_domain(
    layout: str, share: float | None
) -> None:
    h100 = find_gpu("H100-SXM")
    flow = LayoutFlow(find_model("llama-3-70b"), LAYOUTS[layout], MESH)
    one = h100.model_copy(update={"domain": 64})
    here, across = (
        LayoutCosts(flow, gpu, stated_links(gpu, MESH)).dense(4096).links for gpu in (one, h100)
    )
    # All that megatron sends goes over both axes: 450 GB/s, or 50.
    assert across == pytest.approx(9 * here) if share else here < across < 9 * here
