"""Losses: instances that are lost, that return, or that continue without some shards."""

from collections.abc import Callable, Iterable, Mapping

from jaxinfer.serving.instance import Instance
from jaxinfer.serving.request_state import RequestState
from jaxinfer.serving.transfer import HandOffs
from jaxinfer.serving.views import InstanceView
from jaxinfer.serving.world import GoesWithout, InstanceBack, InstanceLost

Loss = InstanceLost | InstanceBack | GoesWithout


class LostInstance(Exception):
    """A system has looked up a lost instance; ``args[0]`` is its name."""


class AliveInstances(dict[str, InstanceView]):
    """The instances that a system sees; looking up a lost one ends the system's current action."""

    def __init__(self, instances: Mapping[str, InstanceView], lost: Mapping[str, str]) -> None:
        super().__init__(instances)
        self._lost = lost

    def __missing__(self, name: str) -> InstanceView:
        raise (LostInstance if name in self._lost else KeyError)(name)


class Losses:
    """The lost instances and shards of a cluster, and which of them will return.

    Args:
        instances: serving instances by name. Lost ones are removed, and later return to their
            places.
        hand_offs: cancels transfers from or to a lost instance.
        finish: ends a request that no instance can serve, and sets its error.
        renew: makes a fresh instance to replace a returning one, from its name.

    Attributes:
        lost: reason for each lost instance, in the order of loss.
        returning: lost instances that are being restarted.
        regaining: serving instances that will get back lost shards of their KV.
    """

    def __init__(
        self,
        instances: dict[str, Instance],
        hand_offs: HandOffs,
        finish: Callable[[RequestState], None],
        renew: Callable[[str], Instance] | None,
    ) -> None:
        self.lost: dict[str, str] = {}
        self.returning: set[str] = set()
        self.regaining: set[str] = set()
        self._instances, self._order = instances, list(instances)
        self._hand_offs, self._finish, self._renew = hand_offs, finish, renew

    def lose(self, event: InstanceLost, live: Iterable[RequestState]) -> list[RequestState]:
        """Remove an instance; return its requests, which must be routed again."""
        name = event.instance
        self.regaining.discard(name)
        self.lost.pop(name, None)
        self.lost[name] = event.reason
        (self.returning.add if event.returns else self.returning.discard)(name)
        if name not in self._instances:
            return []  # It was going to return.
        adrift = detach(self._instances[name], self._instances, live, self._hand_offs)
        del self._instances[name]
        return adrift

    def take_back(self, event: InstanceBack) -> Instance:
        """Let a lost instance serve again, as a fresh instance in its old place."""
        assert self._renew
        instance = self._renew(event.instance)
        del self.lost[instance.name]
        self.returning.discard(instance.name)
        instances = self._instances | {instance.name: instance}
        self._instances.clear()
        self._instances.update({name: instances[name] for name in self._order if name in instances})
        return instance

    def go_without(self, event: GoesWithout) -> None:
        """Close the shards that an instance has lost, and open those that have returned."""
        self._instances[event.instance].go_without(event.without)
        (self.regaining.add if event.returns else self.regaining.discard)(event.instance)

    def fail_unless_returning(self, requests: Iterable[RequestState], lost: str) -> None:
        """Fail requests for which a system chose a lost instance, unless one will return."""
        if not self.returning:
            self.fail(requests, lost)

    def fail(self, requests: Iterable[RequestState], lost: str | None = None) -> None:
        """Fail requests that only a lost instance could serve, by default the last lost one."""
        lost = next(reversed(self.lost)) if lost is None else lost
        for request in list(requests):
            request.error = (
                f"request {request.id!r}: instance {lost!r} was lost, and the system has no other "
                f"for it: {self.lost[lost]}"
            )
            self._finish(request)


def detach(
    lost: Instance,
    instances: Mapping[str, Instance],
    live: Iterable[RequestState],
    hand_offs: HandOffs,
) -> list[RequestState]:
    """Remove a lost instance from all requests; return the requests that must be routed again.

    Requests keep their tokens, and KV that is on another instance; other KV is recomputed. All
    pages of the lost instance are free afterwards, so that the next run can use them.
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
        # Requests on their way to the lost instance are routed again later.
        names = [leg.instance for leg in request.legs]
        if lost.name in names:
            del request.legs[names.index(lost.name) :]
    lost.kv.clear()
    return adrift


def _leave(
    request: RequestState, here: Instance | None, lost: Instance, hand_offs: HandOffs
) -> None:
    """Take the request out of its instance, and void its KV unless that is on another instance."""
    if here:
        here.remove(request)
    if request.hold:
        request.hold.release()
        request.hold = None
    request.slice_copy = request.slice_move = None
    request.legs.clear()
    hand_offs.leave_tier(request)
    if request.exported and request.exported[0] != lost.name:
        request.sent = 0
    else:
        hand_offs.release_export(request)
        request.void_kv()
