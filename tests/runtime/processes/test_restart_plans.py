"""Plans of what is started again: of pipelines as a whole, as they were, and no others."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from fake_restarts import FakeProcess
from waiting import wait_until

from jaxinfer import JaxinferError
from jaxinfer.config.cluster import ClusterConfig, InstanceConfig
from jaxinfer.config.groups import GroupConfig
from jaxinfer.config.stages import StageConfig
from jaxinfer.models.stage import Layers
from jaxinfer.runtime.kv.kv_messages import Drop, OpenEnd
from jaxinfer.runtime.kv.outcome import ProcessLost
from jaxinfer.runtime.processes import restart_groups as module
from jaxinfer.runtime.processes.messages import FollowOn, Launch, Loaded, Prepare
from jaxinfer.runtime.processes.pipeline_endpoint import PipelineEndpoint
from jaxinfer.runtime.processes.pipeline_worker import PipelineWorker
from jaxinfer.runtime.processes.process_group import RemoteEndpoint
from jaxinfer.runtime.processes.restart_groups import Restarted, RestartResult, check_same
from jaxinfer.runtime.processes.restarts import Restarts, _as_planned
from jaxinfer.runtime.stage.sampler import PLAIN_SAMPLER
from jaxinfer.serving.batch import Batch


class Limits(NamedTuple):
    token_buckets: Sequence[int]


LIMITS = Limits((8,))


@dataclass(frozen=True)
class Facts:
    """The part of StageFacts that matters here."""

    options: str
    layers: Layers
    num_pages: int = 40
    kv_bytes: int = 400
    memory_bytes: int = 10**6
    devices: tuple[str, ...] = ("H100",)
    pool_pages: tuple[int, ...] = (40,)
    attention: tuple[Any, ...] = ()
    ffn: None = None
    limits: Limits = LIMITS


def test_a_pipeline_is_started_again_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stage that has lost its neighbour ends, too; both get what the lost ones had."""
    layers = {"s0": Layers(0, 3, 8), "s1": Layers(3, 8, 8)}
    loaded = {
        name: Loaded({"x": [Facts("", piece)]}, {"x": [[0]]}, {"x": f"address of {name}"})  # type: ignore[list-item]
        for name, piece in layers.items()
    }
    old: dict[str, Any] = {name: FakeProcess(name=name) for name in layers}
    new: dict[str, Any] = {}
    parts: dict[str, Any] = {}

    def begin(group: str, part: Any) -> Any:
        assert group not in new
        parts[group], new[group] = part, FakeProcess(name=group)
        return new[group]

    monkeypatch.setattr(module, "wait_until_loaded", lambda process: loaded[process.name])
    groups = {name: GroupConfig(process="own", restart=1) for name in layers}
    stages = tuple(StageConfig(group=name, layers=p.stop - p.start) for name, p in layers.items())
    config = ClusterConfig(groups=groups, instances={"x": InstanceConfig(stages=stages)})
    worker = PipelineWorker("x", [(old[name], loaded[name]) for name in layers], [None])
    side = PipelineEndpoint(
        [RemoteEndpoint(process) for process in old.values()], worker.first_stages
    )
    form: Any = "form"
    for stage in (0, 1):
        side.open(OpenEnd(7 + stage, "x", stage, form, True, False), print)
    others: Any = SimpleNamespace(
        begin_again=begin,
        side_of=lambda name: side,
        lend=lambda instance, group, process, loaded: (process, loaded),
    )
    restarts = Restarts(config, others, {"x": worker})
    heard: list[Any] = []
    restarts.listen(heard.append)
    posted: list[Any] = []
    worker.launch(Batch("x", [], 0, 0, 0), 0.0, posted.append)
    worker.sampler = PLAIN_SAMPLER._replace(top=3)
    old["s1"].die("killed")
    assert {str(failed.error) for failed in posted} == {"killed"}
    assert old["s0"].given_up
    assert restarts.expect("x", "killed")
    wait_until(lambda: Restarted("s0 and s1") in heard)
    with pytest.raises(ProcessLost, match="killed"):
        worker.launch(Batch("x", [], 0, 0, 0), 0.0, posted.append)
    told = restarts.take("s0 and s1")
    assert told
    assert told == RestartResult("s0 and s1", ["x"], "killed", told.seconds)
    assert [part.instances["x"].stages[0].layers for part in parts.values()] == [3, 5]
    ahead = [Prepare("x", worker.sampler)]
    ends = [OpenEnd(7 + stage, "x", 0, form, True, False) for stage in (0, 1)]
    assert new["s0"].sent == [*ahead, ends[0]]
    assert new["s1"].sent == [FollowOn("x", "address of s0", None), *ahead, ends[1]]
    worker.launch(Batch("x", [], 0, 0, 0), 0.0, posted.append)
    assert [type(process.sent[-1]) for process in new.values()] == [Launch] * 2
    side.do(Drop(8, 1, "host"))
    assert new["s1"].sent[-1] == Drop(8, 1, "host")
    old["s0"].die("late")
    assert worker.pieces[0].process is new["s0"]
    new["s0"].die("killed again")
    assert not restarts.expect("x", "killed again")


# Plans.


def test_what_went_by_memory_and_speed_is_as_it_was() -> None:
    """Two stages of two segments each, of three and five layers."""
    bounds = [0, 2, 3, 6, 8]
    facts = [Facts("", Layers(a, b, 8)) for a, b in pairwise(bounds)]
    group = GroupConfig(devices=2, tensor_parallel_size=1)
    stages = (StageConfig(group="g"), StageConfig(group="g"))
    config = ClusterConfig(
        groups={"g": group}, instances={"x": InstanceConfig(stages=stages, segments=2)}
    )
    worker: Any = SimpleNamespace(stages=[SimpleNamespace(plan=plan) for plan in facts])
    planned = _as_planned(config, {"x": worker}).instances["x"]
    assert planned.num_pages == 40
    assert [stage.layers for stage in planned.stages] == [3, 5]
    worker.stages[0].plan = Facts("", Layers(0, 2, 8), num_pages=41)
    assert _as_planned(config, {"x": worker}).instances["x"].num_pages is None


def test_another_plan_is_refused() -> None:
    """More pages and other memory do not matter: the loop goes by what it knows."""
    layers = Layers(0, 8, 8)
    before: Any = Facts("auto", layers)
    more: Any = Facts("40", layers, num_pages=41, kv_bytes=410, memory_bytes=1)
    check_same("x", before, more)
    for other in (
        Facts("", layers, num_pages=39),
        Facts("", Layers(0, 7, 8)),
        Facts("", layers, devices=("A10",)),
    ):
        now: Any = other
        with pytest.raises(JaxinferError, match=r"^instances\.x has another plan than before"):
            check_same("x", before, now)
