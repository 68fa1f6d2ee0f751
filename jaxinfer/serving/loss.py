"""Loss of an instance: what becomes of its requests, and of what was on the way."""

from collections.abc import Iterable, Mapping

from jaxinfer.serving.instance import Instance
from jaxinfer.serving.request_state import RequestState
from jaxinfer.serving.system import InstanceView
from jaxinfer.serving.transfer import HandOffs


class LostInstance(Exception):
    """A system has asked for an instance that was lost; ``args[0]`` is its name."""


class AliveInstances(dict[str, InstanceView]):
    """The instances that a system sees; asking for a lost one ends what it was about to do."""

    def __init__(self, instances: Mapping[str, InstanceView], lost: Mapping[str, str]) -> None:
        super().__init__(instances)
        self._lost = lost

    def __missing__(self, name: str) -> InstanceView:
        raise (LostInstance if name in self._lost else KeyError)(name)


def detach(
    lost: Instance,
    instances: Mapping[str, Instance],
    live: Iterable[RequestState],
    hand_offs: HandOffs,
) -> list[RequestState]:
    """Take a lost instance out of all requests; returns those that are to be routed anew.

    They keep their tokens, and their KV where it lies elsewhere; other KV is recomputed. The lost
    instance's pages are all free afterwards: the next run may have them.
    """
    hand_offs.forget(lost.name)
    adrift = []
    for request in live:
        if request.incoming and request.incoming.kv is lost.kv:
            request.drop_incoming()
        here = instances[request.legs[0].instance] if request.legs else None
        exported_there = request.exported and request.exported[0] == lost.name
        if here is lost or exported_there:
            _leave(request, here, lost, hand_offs)
            adrift.append(request)
        # What would have led to the lost instance is routed anew when its turn comes.
        names = [leg.instance for leg in request.legs]
        if lost.name in names:
            del request.legs[names.index(lost.name) :]
    lost.kv.clear()
    return adrift


def _leave(
    request: RequestState, here: Instance | None, lost: Instance, hand_offs: HandOffs
) -> None:
    """Take the request out of its instance, and void its KV unless that lies elsewhere."""
    if here:
        here.remove(request)
    if request.hold:
        request.hold.release()
        request.hold = None
    request.slice_copy = request.slice_move = None
    request.legs.clear()
    if request.exported and request.exported[0] != lost.name:
        request.sent = 0
    else:
        hand_offs.release_export(request)
        request.void_kv()
