"""The simulator decides as real runs did, by the times that these have measured."""

import json
import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cluster_cases import free_executables
from failure_cases import break_device
from process_cases import pid_of
from waiting import wait_until

from jaxinfer import LLM, JaxinferError, SamplingParams
from jaxinfer.config.run_file import as_run_file
from jaxinfer.ledger.ledger_file import NAME, ledger_hash, read_ledger
from jaxinfer.options.validation import read_json
from jaxinfer.serving.world import StepDone
from jaxinfer.simulate.same_decisions import check_decisions
from jaxinfer.steps import profile as stored

FLOWS = {"p": {"d": 3.0, "e": 1.0}, "q": {"e": 2.0}}
SHARES = {name: {"weight": number + 1, "max_waiting": 2} for number, name in enumerate("pqde")}
UNITS = [{"prefill": ["p"], "decode": ["d"]}, {"prefill": ["q"], "decode": ["e"]}]
# By name: the system's options, and its instances.
SYSTEMS: dict[str, tuple[dict[str, Any], str]] = {
    "single": ({}, "p"),
    "pipeline_parallel": ({}, "x"),
    "data_parallel": ({"shares": SHARES}, "pqde"),
    "least_loaded": ({"choose": "power_of_two", "load": "tokens"}, "pqde"),
    "disaggregated": ({"prefill": ["p", "q"], "decode": ["d", "e"], "hand_off": "per_chunk"},
                      "pqde"),
    "cronus": ({"partial": "p", "chunked": "d", "cut_share": 0.6}, "pd"),
    "distserve": ({"units": UNITS}, "pqde"),
    "splitwise": ({"prompt": ["p", "q"], "token": ["d", "e"], "max_pending_tokens": 60,
                   "layerwise_from": 33}, "pqde"),
    "tetriinfer": ({"prefill": ["p", "q"], "decode": ["d", "e"], "prefill_batch": 3,
                    "heavy_decode": 30, "report_s": 0.002, "flip_after_s": 0.004}, "pqde"),
    "hexgen2": ({"flows": FLOWS, "max_in_prefill": 100}, "pqde"),
    "takeover": ({}, "pqde"),
    "aladdin": ({"ttft_s": 60.0, "atgt_s": 2.0, "heartbeat_s": 0.002}, "pqde"),
}  # fmt: skip
INSTANCE: dict[str, Any] = {
    "max_num_seqs": 4,
    "max_num_batched_tokens": 32,
    "page_size": 8,
    "num_pages": 65,
    "enable_prefix_caching": False,
}
GREEDY = {"temperature": 0}
DRAWN = {"temperature": 0.9, "top_p": 0.9}


def sections(model: Path, system: str, **more: Any) -> dict[str, Any]:
    options, names = SYSTEMS[system]
    if system in ("aladdin", "takeover"):  # It goes by fits, which take so many to be measured.
        more |= {"max_num_seqs": 16}
    groups: dict[str, Any] = {name: {} for name in names}
    instances: dict[str, Any] = {name: {"group": name, **INSTANCE, **more} for name in names}
    if names == "x":
        groups = {"p": {}, "q": {}}
        stages = [{"group": "p", "layers": 1}, {"group": "q", "layers": 1}]
        instances = {"x": {"stages": stages, **INSTANCE, **more}}
    return {
        "model": str(model),
        "groups": groups,
        "instances": instances,
        "system": {"name": system, **options},
        "ledger": True,
    }


def prompts(seed: int, count: int = 9) -> list[dict[str, list[int]]]:
    """Prompts that begin alike from 40 tokens on."""
    rng = random.Random(seed)
    shared = [rng.randrange(256) for _ in range(200)]
    found = []
    for _ in range(count):
        length = rng.randint(3, 110)
        own = [rng.randrange(256) for _ in range(length)]
        found.append({"prompt_token_ids": shared[: length - 4] + own[:4] if length > 40 else own})
    return found


def params(seed: int, options: dict[str, Any], count: int = 9) -> list[SamplingParams]:
    rng = random.Random(seed)
    return [
        SamplingParams(max_tokens=rng.randint(1, 40), seed=number, **options)
        for number in range(count)
    ]


class Runs:
    """Runs of one loaded model, each of which is decided upon again."""

    def __init__(self, config: dict[str, Any], folder: Path) -> None:
        self.llm = LLM.from_config(as_run_file(config), progress=False)
        self.folder, self.count = folder, 0

    def check(self, seed: int, **options: Any) -> None:
        self.llm.reset_prefix_cache()
        given = prompts(seed), params(seed, options)
        self.llm.generate(*given, progress=False, run_dir=self.folder)
        self.same()

    def same(self) -> None:
        self.count += 1
        folder = self.folder / str(self.count)
        difference, entries, found, finished = check_decisions(folder)
        assert finished
        assert difference is None, difference
        kept = read_json(folder / "run.json")["ledger"]
        assert kept == {"hash": found, "entries": entries}
        assert entries > 20


@pytest.fixture(autouse=True)
def own_profiles(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Profiles of the tiny model are made once for all tests of a process."""
    before = stored.FOLDER
    stored.FOLDER = tmp_path_factory.getbasetemp() / "profiles"
    yield
    stored.FOLDER = before


def test_a_run_is_decided_alike_again(tiny_folder: Path, tmp_path: Path) -> None:
    """The run has preemption, a prefix cache, and drawn tokens whose texts end some requests."""
    config = sections(tiny_folder, "single", num_pages=20, enable_prefix_caching=True)
    runs = Runs(config, tmp_path)
    runs.check(0, **DRAWN)
    kinds = [kind for kind, *_ in read_ledger(tmp_path / "1" / NAME)]
    assert kinds.count("victim") > 0
    assert kinds.count("end") == kinds.count("arrival") == 9
    assert read_json(tmp_path / "1" / "run.json")["metrics"]["cached_tokens"] > 0
    ledger = tmp_path / "1" / NAME
    ledger.write_text("".join(ledger.read_text().splitlines(keepends=True)[:-1]))
    with pytest.raises(JaxinferError, match=r"ledger\.jsonl: not what the run wrote: \{'hash': "):
        check_decisions(tmp_path / "1")
    run = read_json(tmp_path / "1" / "run.json") | {"status": "running"}
    (tmp_path / "1" / "run.json").write_text(json.dumps(run))
    with pytest.raises(JaxinferError, match=r"ledger\.jsonl: no entries; the run was killed befor"):
        check_decisions(tmp_path / "1")


@pytest.mark.slow
@pytest.mark.parametrize("system", SYSTEMS)
@pytest.mark.parametrize(
    "more",
    [
        {"num_pages": 20},
        {"enable_prefix_caching": True, "num_pages": 40},
        pytest.param({}, marks=pytest.mark.long),
        pytest.param({"page_size": 16}, marks=pytest.mark.long),
    ],
    ids=["small", "cached", "roomy", "pages"],
)
def test_every_system(system: str, more: dict[str, Any], tiny_folder: Path, tmp_path: Path) -> None:
    runs = Runs(sections(tiny_folder, system, **more), tmp_path)
    runs.check(1, **GREEDY)
    runs.check(3, **DRAWN, n=3)
    del runs
    free_executables()


@pytest.mark.slow
def test_meshes_and_stages(tiny_folder: Path, tmp_path: Path) -> None:
    config = sections(tiny_folder, "disaggregated")
    config["groups"]["p"] = {"devices": 2, "tensor_parallel_size": 2}
    config["groups"]["d2"] = {}
    stages = [{"group": "d", "layers": 1}, {"group": "d2", "layers": 1}]
    config["instances"]["d"] = {"stages": stages, **INSTANCE, "page_size": 16}
    runs = Runs(config, tmp_path)
    runs.check(1, **GREEDY)
    runs.check(2, **DRAWN)


@pytest.mark.slow
@pytest.mark.parametrize(("system", "lost"), [("cronus", "d"), ("least_loaded", "q")])
def test_an_instance_is_lost(system: str, lost: str, tiny_folder: Path, tmp_path: Path) -> None:
    runs = Runs(sections(tiny_folder, system), tmp_path)
    break_device(runs.llm, lost, 3)
    runs.check(1, **GREEDY)
    assert [d[0] for kind, d, _ in read_ledger(tmp_path / "1" / NAME) if kind == "lost"] == [lost]


@pytest.mark.slow
@pytest.mark.parametrize("system", ["disaggregated", "least_loaded"])
def test_an_instance_in_a_process_is_lost_and_back(
    system: str, tiny_folder: Path, tmp_path: Path
) -> None:
    config = sections(tiny_folder, system)
    config["groups"]["d"] = {"process": "own", "restart": 1}
    runs = Runs(config, tmp_path)
    steps = iter(range(10**6))

    def kill(done: StepDone) -> None:
        if next(steps) == 9:
            os.kill(pid_of(runs.llm, "d"), signal.SIGKILL)
            restarts = runs.llm.cluster.restarts
            wait_until(lambda: restarts._homes["d"].news is not None)

    made = [
        request
        for number, prompt in enumerate(prompts(1))
        for request in runs.llm.make_requests(
            str(number), prompt["prompt_token_ids"], SamplingParams(temperature=0, max_tokens=30)
        )
    ]
    runs.llm.run(made, lambda output: None, progress=False, run_dir=tmp_path, on_step=kill)
    runs.same()
    kinds = [kind for kind, *_ in read_ledger(tmp_path / "1" / NAME)]
    assert kinds.count("lost") == kinds.count("back") == 1


@pytest.mark.slow
def test_a_run_that_is_given_up(tiny_folder: Path, tmp_path: Path) -> None:
    runs = Runs(sections(tiny_folder, "cronus"), tmp_path)
    given = prompts(1), params(1, GREEDY)
    outputs = runs.llm.generate_iter(*given, progress=False, run_dir=tmp_path)
    next(outputs)
    outputs.close()
    assert read_json(tmp_path / "1" / "run.json")["status"] == "running"
    difference, entries, _, finished = check_decisions(tmp_path / "1")
    assert not finished
    assert difference is None
    assert entries > 20


def test_ledgers_of_unlike_runs_differ(tiny_folder: Path, tmp_path: Path) -> None:
    runs = Runs(sections(tiny_folder, "single"), tmp_path)
    runs.check(1, **GREEDY)
    runs.check(4, **GREEDY)
    hashes = [ledger_hash(read_ledger(tmp_path / number / NAME)) for number in "12"]
    assert hashes[0] != hashes[1]
