"""Processes that die or stop at any moment of a run: the other ends it, and nothing is left."""

import gc
import os
import random
import signal
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
from cluster_cases import Pair, Side, free_executables, load, set_system
from cluster_checks import Done
from process_cases import SYSTEMS, apart, children, pid_of, serve_once, wait_until

from jaxinfer import LLM
from jaxinfer.runtime import remote
from jaxinfer.runtime.carrier import HostCarrier
from jaxinfer.runtime.messages import Launch, Offer, Place, Pull
from jaxinfer.runtime.port import Port
from jaxinfer.runtime.processes import ThisProcess
from jaxinfer.runtime.remote import Process
from jaxinfer.runtime.remote_channel import RemoteChannel

KINDS = (Launch, Offer, Pull, Place)
RULES = ("on_demand", "at_end", "per_chunk", "per_segment")


@dataclass(frozen=True)
class Moment:
    """Right after so large a share of the messages of one kind that a run takes."""

    apart: str
    rule: str
    kind: type
    share: float
    by: signal.Signals


def moments(victim: str, count: int) -> list[Moment]:
    """Each kind, rule and signal; now the other instance is in a process too, now it is here."""
    rng = random.Random(victim + str(count))
    return [
        Moment(
            "ab" if number % 5 < 3 else victim,
            RULES[number % len(RULES)],
            rng.choice(KINDS),
            rng.uniform(0, 0.8),
            signal.SIGSTOP if number % 3 == 2 else signal.SIGKILL,
        )
        for number in range(count)
    ]


@contextmanager
def told(hear: Callable[[type], None]) -> Iterator[None]:
    """Whatever is sent to a process, or done in this one."""
    send, do = Process.send, Port.do

    def send_and_tell(process: Process, message: Any) -> None:
        send(process, message)
        hear(type(message))

    def do_and_tell(port: Port, message: Any, *after: Any) -> None:
        do(port, message, *after)
        hear(type(message))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Process, "send", send_and_tell)
        patch.setattr(Port, "do", do_and_tell)
        yield


def check_nothing_left(llm: LLM, lost: Collection[str] = ()) -> None:
    """No page, where steps that use it may still end; no slab on its way, no offer."""
    for name, kv in llm._runs.kv.items():
        for shard in kv.shards if name not in lost else ():
            assert shard.pool.num_free == shard.pool.num_usable
            assert shard.pool.num_pinned == 0
    for channel in llm.cluster.channels.values():
        assert isinstance(channel, RemoteChannel)
        wait_until(lambda channel=channel: not channel._slabs)
        assert not channel._probing
        for side in (channel._source, channel._dest):
            if isinstance(side, ThisProcess):
                wait_until(lambda port=side.port: is_empty(port))


def is_empty(port: Port) -> bool:
    carriers = [c for c in port._carriers.values() if isinstance(c, HostCarrier)]
    return not any(c._offers for c in carriers) and not any(
        end.arrived for end in port._ends.values()
    )


def die(llm: LLM, victim: str, moment: Moment, expected: list[Done], folder: Path) -> bool:
    """Whether the run has noticed."""
    set_system(llm, SYSTEMS[llm.config.system["name"]] | {"hand_off": moment.rule})
    counts: Counter[type] = Counter()
    with told(lambda kind: counts.update([kind])):
        found, run = serve_once(llm, folder)
    assert (found, run["lost"]) == (expected, {})
    check_nothing_left(llm)

    pid = pid_of(llm, victim)
    left = 1 + int(moment.share * counts[moment.kind])

    def strike(kind: type) -> None:
        nonlocal left
        left -= kind is moment.kind
        if left == 0:
            left = -1
            os.kill(pid, moment.by)

    with told(strike):
        found, run = serve_once(llm, folder)
    assert left < 0
    assert found == expected
    assert set(run["lost"]) <= {victim}
    why = "has said nothing for 3 s"
    if moment.by == signal.SIGKILL:
        why = "was ended by signal 9"
    for line in run["lost"].values():
        assert line == f"ProcessLost: process of group {victim} (pid {pid}) {why}"
    check_nothing_left(llm, run["lost"])
    return bool(run["lost"])


def open_files() -> int:
    return psutil.Process().num_fds()


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["a", "b"])
@pytest.mark.parametrize("system", ["cronus", "disaggregated"])
def test_at_any_moment(
    system: str,
    victim: str,
    models: dict[str, Path],
    expected: dict[str, list[Done]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(remote, "SILENCE_S", 3.0)
    noticed = 0
    for number, moment in enumerate(moments(victim, 10)):
        gc.collect()
        before = children(), threading.active_count(), open_files()
        pair = Pair("two", Side(1, 8), Side(2, 16), apart=moment.apart)
        sections = apart(pair, system) | {"verify_transfers": number % 2 == 0}
        llm = load(models["two"], tmp_path, **sections)
        noticed += die(llm, victim, moment, expected["two"], tmp_path / str(number))
        del llm
        gc.collect()
        wait_until(lambda before=before: children() <= before[0])
        wait_until(lambda before=before: threading.active_count() <= before[1])
        wait_until(lambda before=before: gc.collect() >= 0 and open_files() <= before[2])
    free_executables()
    # The others came when the victim had done all that it had to.
    assert noticed >= 6
