"""Processes of device groups on hosts that Ray chooses."""

import secrets
import threading
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

from jaxinfer.config.groups import GroupConfig
from jaxinfer.errors import JaxinferError
from jaxinfer.runtime.processes.peers import Peer, RemotePeer
from jaxinfer.runtime.processes.ray_client import connect
from jaxinfer.runtime.processes.worker_server import WorkerServer

# An existing node may be busy now, and become free later.
PLACE_S = 300.0


class ListeningWorker:
    """A Ray actor: a listening worker on its node, with the devices that Ray gives it.

    Args:
        key: key that the job must have.
    """

    def __init__(self, key: str) -> None:
        import ray

        host = ray.util.get_node_ip_address()
        self._server = WorkerServer(host, 0, key, print)
        threading.Thread(target=self._server.serve, daemon=True).start()

    def address(self) -> str:
        """Return the worker's address as ``HOST:PORT``."""
        return self._server.address


def place(address: str, groups: Mapping[str, GroupConfig]) -> Iterator[tuple[str, Peer]]:
    """Yield a process for each group; each ends with its actor, and with this process.

    Args:
        address: address of Ray's cluster.

    Raises:
        JaxinferError: there is no cluster, or no node has what a group asks for.
    """
    ray = connect(address)
    key = secrets.token_hex(16)
    demands = {name: _demands(group) for name, group in groups.items()}
    for name, demanded in demands.items():
        _check(name, demanded, ray.nodes())
    actor = ray.remote(ListeningWorker)
    actors = {
        name: actor.options(
            num_cpus=demanded.get("CPU", 0),
            num_gpus=demanded.get("GPU", 0),
            resources={n: x for n, x in demanded.items() if n not in ("CPU", "GPU")},
            max_restarts=0,
        ).remote(key)
        for name, demanded in demands.items()
    }
    try:
        for name, group in groups.items():
            kill = partial(_end, ray, actors[name])
            try:
                there = ray.get(actors[name].address.remote(), timeout=PLACE_S)
                peer = RemotePeer(there, key, group.environment, kill)
            except ray.exceptions.GetTimeoutError:
                raise JaxinferError(
                    f"groups.{name}.ray: no node has {_words(demands[name])} free after "
                    f"{PLACE_S:g} s"
                ) from None
            except (ray.exceptions.RayError, JaxinferError) as error:
                # Ray's errors have a traceback before the message.
                why = str(error).strip().splitlines()[-1]
                raise JaxinferError(f"groups.{name}.ray: {why}") from None
            del actors[name]
            yield name, peer
    finally:
        for left in actors.values():
            _end(ray, left)


def _end(ray: Any, actor: Any) -> None:
    """End an actor and its process, if the cluster can still be reached."""
    # A connection that is left open would be used again, or another one started.
    if ray.is_initialized():
        # The caller has more to do, and the actor ends with this connection.
        with suppress(Exception):
            ray.kill(actor)


def _demands(group: GroupConfig) -> dict[str, float]:
    assert group.ray
    gpus = group.ray.num_gpus
    if gpus is None:
        gpus = group.devices if group.platform == "gpu" else 0
    return {"CPU": group.ray.num_cpus, "GPU": gpus, **group.ray.resources}


def _check(name: str, demanded: Mapping[str, float], nodes: list[dict[str, Any]]) -> None:
    """Refuse demands that no node can meet; Ray would wait for them."""
    there = [node["Resources"] for node in nodes if node["Alive"]]
    if not any(all(has.get(n, 0) >= x for n, x in demanded.items()) for has in there):
        known = "; ".join(_words({n: x for n, x in has.items() if _is_told(n)}) for has in there)
        raise JaxinferError(
            f"groups.{name}.ray: no node has {_words(demanded)}; those that are there have {known}"
        )


def _is_told(resource: str) -> bool:
    return not resource.startswith(("node:", "memory", "object_store_memory"))


def _words(resources: Mapping[str, float]) -> str:
    return ", ".join(f"{n} {x:g}" for n, x in resources.items() if x) or "nothing"
