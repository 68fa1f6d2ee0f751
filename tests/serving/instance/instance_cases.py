"""Instances, and requests as they stand at one."""

from typing import Any

from serving_checks import make_kv, new_instance

from jaxinfer.serving.batch import Row
from jaxinfer.serving.batch_builder import BatchBuilder
from jaxinfer.serving.instance import Instance
from jaxinfer.serving.instance_options import InstanceOptions
from jaxinfer.serving.request_state import RequestState
from jaxinfer.serving.views import Leg


def make(pages: int = 20, page_size: int = 2, grouped: bool = False, **options: Any) -> Instance:
    opts = InstanceOptions(**({"watermark": 0.0} | options))
    return new_instance("A", make_kv(pages, page_size), opts, groups_decodes=grouped)


def running(
    instance: Instance, name: str, prompt_len: int = 4, computed: int = 4, output: int = 1
) -> Any:
    """A request that runs; by default it is to decode its second token."""
    request = RequestState(name, prompt_len, 9)
    request.legs = [Leg("A")]
    request.output_token_ids = [0] * output
    request.computed = request.launched = computed
    request.hold = instance.kv.reserve(computed)
    assert request.hold
    instance.taking_part.add(request)
    return request


def add(
    instance: Instance, request: RequestState, count: int, rows: list[Row] | None = None
) -> Row | None:
    """The request's row in a batch that has others so far; None where it waits."""
    batch = BatchBuilder(instance)
    batch.rows = rows or []
    return batch.rows[-1] if batch.add(request, count) else None


def group(instance: Instance, budget: int = 99) -> BatchBuilder:
    """A batch that has begun with those that go together."""
    batch = BatchBuilder(instance)
    batch.budget = budget
    batch.add_group()
    assert batch.budget == budget - batch.grouped
    return batch


def remove(instance: Instance, name: str) -> RequestState:
    request = instance.running[name]
    instance.taking_part.remove(request)
    return request


def waiting(instance: Instance, name: str, prompt_len: int = 4, *legs: Leg) -> RequestState:
    request = RequestState(name, prompt_len, 9)
    request.legs = list(legs) or [Leg("A")]
    instance.waiting.append(request)
    return request


def exported_at(place: str, instance: Instance, request: RequestState, computed: int = 4) -> None:
    """A request whose KV waits at another instance, or here."""
    kv = instance.kv if place == "A" else make_kv(20, 2)
    hold = kv.reserve(computed)
    assert hold
    request.exported = place, hold
    request.computed = request.launched = computed
    instance.num_exported += place == "A"


def names(requests: Any) -> list[str]:
    return [request.id for request in requests]


def ahead(instance: Instance, name: str) -> RequestState:
    """Two pages are reserved for it, which is still elsewhere."""
    request = RequestState(name, 4, 9)
    request.incoming = instance.reserve_ahead(request, Leg("A"))
    assert request.incoming
    return request
