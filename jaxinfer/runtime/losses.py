"""Losses and returns of instances, as the real world reports them to a run."""

from collections.abc import Callable, Collection, Iterator, Sequence

from jaxinfer.errors import OnlyInstanceLost
from jaxinfer.runtime.kv.outcome import Failed
from jaxinfer.runtime.processes.restart_groups import Restarted, RestartResult
from jaxinfer.runtime.processes.restarts import Restarts
from jaxinfer.serving.world import Event, GoesWithout, InstanceBack, InstanceLost

ALL: tuple[Sequence[int], bool] = (), False


class LossEvents:
    """Makes the events that tell a run of lost and returned instances, and records the outcomes.

    Args:
        restarts: restarts lost processes; None if none is restarted.
        names: names of all instances.
        forget: called with the name of each lost instance.

    Attributes:
        lost: reason for each instance that has failed.
        returning: failed instances that are being restarted.
        restarted: results of the restarts so far.
    """

    def __init__(
        self,
        restarts: Restarts | None,
        names: Collection[str],
        forget: Callable[[str], None],
    ) -> None:
        self.lost: dict[str, str] = {}
        self.returning: set[str] = set()
        self.restarted: list[RestartResult] = []
        self._restarts, self._forget = restarts, forget
        # For each instance, the shards of its KV that it continues without, and whether some will
        # return.
        self._without = dict.fromkeys(names, ALL)
        if restarts:
            self._without = {name: (restarts.goes_without(name)[0], False) for name in names}

    def listen(self, hear: Callable[[Restarted | Failed], object]) -> None:
        """Call ``hear`` whenever there is news of a restart; see ``Restarts.listen``."""
        if self._restarts:
            self._restarts.listen(hear)

    @property
    def awaits(self) -> bool:
        """True if an instance or a shard is expected to return."""
        return bool(self.returning) or any(returns for _, returns in self._without.values())

    def lose(self, instance: str, reason: str) -> InstanceLost:
        """Record that an instance has failed."""
        returns = self._restarts is not None and self._restarts.expect(instance, reason)
        return self._note(instance, reason, returns)

    def _note(self, instance: str, reason: str, returns: bool) -> InstanceLost:
        self.lost[instance] = reason
        if returns:
            self.returning.add(instance)
        else:
            self.returning.discard(instance)
        self._without[instance] = ALL
        self._forget(instance)
        return InstanceLost(instance, reason, returns)

    def learn(self, group: str) -> Iterator[Event]:
        """Return the events that follow from restarting a group's process.

        Raises:
            OnlyInstanceLost: the only instance is lost, and its process cannot be started.
        """
        assert self._restarts
        if outcome := self._restarts.take(group):
            self.restarted.append(outcome)
            for name in outcome.instances:
                yield from self._return(name, outcome)
            if outcome.error and outcome.instances and len(self._without) == 1:
                raise OnlyInstanceLost(outcome.error)
        for name, told in self._without.items():
            now = self._restarts.goes_without(name)
            if name not in self.lost and now != told:
                self._without[name] = now
                yield GoesWithout(name, *now)

    def _return(self, name: str, outcome: RestartResult) -> Iterator[Event]:
        if outcome.error:
            yield self._note(name, outcome.error, False)
            return
        if name not in self.lost:  # It had no work to do.
            yield self._note(name, outcome.why, True)
        del self.lost[name]
        self.returning.discard(name)
        yield InstanceBack(name)
