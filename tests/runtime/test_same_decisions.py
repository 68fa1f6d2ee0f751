"""The simulator decides as real runs did, by the times that these have measured."""

import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from failure_cases import break_device

from jaxinfer import LLM, JaxinferError, SamplingParams
from jaxinfer.config.run_file import as_run_file
from jaxinfer.lab.validate.same_decisions import check_decisions
from jaxinfer.ledger.ledger_file import NAME, ledger_hash, read_ledger
from jaxinfer.options.validation import read_json
from jaxinfer.steps import profile as stored
from scripts.validate.decision_cases import SYSTEMS, WORKLOADS
from scripts.validate.decisions import ledgers

# By name: the system's options, and its instances.
OPTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "single": ({}, "p"),
    "least_loaded": ({"choose": "power_of_two", "load": "tokens"}, "pqde"),
    "cronus": ({"partial": "p", "chunked": "d", "cut_share": 0.6}, "pd"),
}
INSTANCE: dict[str, Any] = {
    "max_num_seqs": 4,
    "max_num_batched_tokens": 32,
    "page_size": 8,
    "num_pages": 65,
    "enable_prefix_caching": False,
}
# Those that decide unlike the others: cuts, pipelines, pools, heads and decodes that move, packing.
FEW = ("single", "cronus", "pipeline_parallel", "splitwise", "hetis", "aladdin", "takeover")
GREEDY = {"temperature": 0}
DRAWN = {"temperature": 0.9, "top_p": 0.9}


def sections(model: Path, system: str, **more: Any) -> dict[str, Any]:
    options, names = OPTIONS[system]
    return {
        "model": str(model),
        "groups": {name: {} for name in names},
        "instances": {name: {"group": name, **INSTANCE, **more} for name in names},
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
    del run["status"]
    (tmp_path / "1" / "run.json").write_text(json.dumps(run))
    with pytest.raises(JaxinferError, match=r"run\.json: status is missing: give the folder as t"):
        check_decisions(tmp_path / "1")


@pytest.mark.parametrize(
    "system",
    [
        pytest.param(name, marks=pytest.mark.slow if name in FEW else pytest.mark.long)
        for name in SYSTEMS
    ],
)
@pytest.mark.parametrize(
    "clusters",
    [
        pytest.param(("small", "cached"), id="small, cached"),
        pytest.param(("roomy", "meshes"), id="roomy, meshes", marks=pytest.mark.long),
        pytest.param(("processes",), id="processes", marks=pytest.mark.long),
    ],
)
def test_every_system(system: str, clusters: Sequence[str], tmp_path: Path) -> None:
    """Runs are of one seed; ``python -m scripts.validate.decisions`` takes any."""
    names = [name for name, (cluster, *_) in WORKLOADS.items() if cluster in clusters]
    rows = list(ledgers(system, names, 1, tmp_path))
    assert [(row["workload"], row["difference"]) for row in rows] == [(name, "") for name in names]
    for row in rows:
        assert row["entries"] > 20
        assert (row["cached_tokens"] > 0) == (row["workload"] == "prefix cache")
        assert row["finished"] == (row["workload"] != "cancelled")
        assert row["lost"] == row["back"] == (row["workload"] == "lost and back")


@pytest.mark.slow
@pytest.mark.parametrize(("system", "lost"), [("cronus", "d"), ("least_loaded", "q")])
def test_an_instance_is_lost(system: str, lost: str, tiny_folder: Path, tmp_path: Path) -> None:
    runs = Runs(sections(tiny_folder, system), tmp_path)
    break_device(runs.llm, lost, 3)
    runs.check(1, **GREEDY)
    assert [d[0] for kind, d, _ in read_ledger(tmp_path / "1" / NAME) if kind == "lost"] == [lost]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("system", "workload"), [("disaggregated", "lost and back"), ("cronus", "cancelled")]
)
def test_what_happens_to_a_run(system: str, workload: str, tmp_path: Path) -> None:
    (row,) = ledgers(system, [workload], 1, tmp_path)
    assert row["difference"] == ""
    assert row["lost"] == row["back"] == (workload == "lost and back")
    assert row["finished"] == (workload != "cancelled")


def test_ledgers_of_unlike_runs_differ(tiny_folder: Path, tmp_path: Path) -> None:
    runs = Runs(sections(tiny_folder, "single"), tmp_path)
    runs.check(1, **GREEDY)
    runs.check(4, **GREEDY)
    hashes = [ledger_hash(read_ledger(tmp_path / number / NAME)) for number in "12"]
    assert hashes[0] != hashes[1]


@pytest.mark.slow
def test_a_folder_alone_has_what_its_check_needs(tiny_folder: Path, tmp_path: Path) -> None:
    """Cronus cuts by a profile, of which the run keeps a copy."""
    config = sections(tiny_folder, "cronus")
    del config["system"]["cut_share"]
    runs = Runs(config, tmp_path)
    runs.check(1, **GREEDY)
    stored.FOLDER = tmp_path / "nothing"  # Until the test has ended: see ``own_profiles``.
    runs.count -= 1
    runs.same()
    for copy in (tmp_path / "1").glob("?" * 20 + ".json"):
        copy.unlink()
    with pytest.raises(JaxinferError, match=r"instance p: no profile .*, by which its run went"):
        check_decisions(tmp_path / "1")


def test_damage_and_other_versions_are_told_from_other_decisions(
    tiny_folder: Path, tmp_path: Path
) -> None:
    runs = Runs(sections(tiny_folder, "single"), tmp_path)
    runs.check(1, **GREEDY)
    folder, run = tmp_path / "1", read_json(tmp_path / "1" / "run.json")
    whole = read_ledger(folder / NAME)

    def refusal(change: Any, run: dict[str, Any] = run) -> str:
        entries = [[kind, decided, given] for kind, decided, given in whole]
        change(entries)
        lines = {"decided": [e[:2] for e in entries], "measured": [e[2] for e in entries]}
        (folder / NAME).write_text(json.dumps(lines))
        kept = {"hash": ledger_hash(read_ledger(folder / NAME)), "entries": len(entries)}
        (folder / "run.json").write_text(json.dumps(run | {"ledger": kept}))
        try:
            return check_decisions(folder).difference or ""
        except JaxinferError as error:
            return f"refused: {error}"

    def of_kind(kind: str, place: int, value: Any) -> Any:
        def change(entries: list[list[Any]]) -> None:
            next(each for each in entries if each[0] == kind)[place] = value

        return change

    assert refusal(lambda entries: None) == ""
    assert "is of kind 'other', which this version does not know" in refusal(
        of_kind("tick" if any(e[0] == "tick" for e in whole) else "round", 0, "other")
    )
    for kind in ("start", "round", "arrival", "step"):
        for value in ("soon", None, [1], float("nan")):
            found = refusal(of_kind(kind, 2, value))
            assert found.startswith(f"refused: {folder / NAME}: damaged, entry "), (kind, value)
    for instances in ({}, {"y": run["instances"]["p"]}, {"p": {}}):
        found = refusal(lambda entries: None, run | {"instances": instances})
        assert found.startswith(f"refused: {folder / 'run.json'}: "), found
    # Another decision is told with who made the run, where that is not this code.
    longer = of_kind("end", 1, [*next(e for e in whole if e[0] == "end")[1][:2], 1000])
    assert not refusal(longer).endswith("this is 0.1.0")
    assert refusal(longer, run | {"versions": {"jaxinfer": "9"}}).endswith(
        "; the run was made by version 9, this is 0.1.0"
    )
