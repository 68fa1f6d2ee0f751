"""Runs whose steps take a second each: what comes back, what is written, what systems are told."""

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from jaxinfer import JaxinferError
from jaxinfer.config.resolve import resolve
from jaxinfer.config.run_file import RunFile, as_run_file
from jaxinfer.config.site import model_site
from jaxinfer.ledger.ledger_file import NAME, ledger_hash, read_ledger
from jaxinfer.options.validation import read_json
from jaxinfer.report.metrics import RunMetrics
from jaxinfer.serving.loop import ServingLoop
from jaxinfer.serving.request_state import RequestState
from jaxinfer.serving.step_fit import StepFit
from jaxinfer.simulate import run as module
from jaxinfer.simulate.cluster import ModelledInstance, model_cluster
from jaxinfer.simulate.costs.fit import fit_costs
from jaxinfer.simulate.run import simulate
from jaxinfer.workload.lengths import BenchRequest

ENGINE = {
    "page_size": 4,
    "max_num_seqs": 2,
    "max_num_batched_tokens": 8,
    "num_pages": 9,
    "launch_ahead": False,
    "enable_prefix_caching": False,
}


def seconds(names: str = "a", engine: Mapping[str, object] = {}, **sections: Any) -> RunFile:
    """Instances of these names on a group each, whose steps take a second."""
    return as_run_file(
        {
            "model": "llama-3-8b",
            "engine": ENGINE | engine,
            "groups": {f"g{name}": {"kind": "A10"} for name in names},
            "instances": {name: {"group": f"g{name}"} for name in names},
            "simulate": {"linear": {"step_s": 1.0}},
        }
        | sections
    )


def in_turns(names: str) -> dict[str, object]:
    share = {"weight": 1, "max_waiting": 9}
    return {"name": "data_parallel", "shares": dict.fromkeys(names, share)}


def job(prompt: int, output: int, arrival: float = 0.0, tokens: list[int] | None = None) -> Any:
    return BenchRequest(tokens, prompt, output, arrival)


def served(
    config: RunFile, work: Sequence[BenchRequest], folder: Path | None = None
) -> tuple[RunMetrics, dict[str, list[float]]]:
    """The figures, and when each request's tokens were there, by the order of their ends."""
    times: dict[str, list[float]] = {}

    def note(request: RequestState, at: Sequence[float]) -> None:
        assert len(request.output_token_ids) == len(at) == request.max_tokens
        times[request.id] = list(at)

    return simulate(config, work, folder, note), times


def test_figures_by_hand() -> None:
    """Two at once, of whom one is done at 2 and the other at 3; a third comes at 10.5.

    They are numbered as they stand in the workload, whenever they come.
    """
    started = time.perf_counter()
    found, times = served(seconds(), [job(5, 2, 10.5), job(4, 3), job(3, 2)])
    elapsed = time.perf_counter() - started
    assert times == {"2": [1, 2], "1": [1, 2, 3], "0": [11.5, 12.5]}
    assert list(times) == ["2", "1", "0"]
    assert (found.requests, found.failed, found.steps, found.preemptions) == (3, 0, 5, 0)
    assert (found.prompt_tokens, found.output_tokens, found.cached_tokens) == (12, 7, 0)
    assert found.wall_s == 12.5
    assert (found.prompt_tok_s, found.output_tok_s) == (12 / 12.5, 7 / 12.5)
    assert (found.ttft_p50, found.tbt_p50, found.tbt_p99) == (1, 1, 1)
    # End-to-end 2, 3 and 2; by output tokens 1 for each.
    assert (found.e2e_mean, found.e2e_p90, found.tpot_mean) == pytest.approx((7 / 3, 2.8, 1))
    assert (found.normalised_p99, found.delay_mean) == (1, 0)
    (use,) = found.instances.values()
    assert (use.first_step, use.last_step, use.busy_s, use.role_s) == (0, 12.5, 5, {})
    # From the first one's end, at 2, to the last one's.
    assert found.steady_requests_s == pytest.approx(2 / 10.5)
    # Of the 4 + 3 - 1 entries and the 3 + 2 - 1, in pages of 4: two and one.
    assert (found.peak_pages, found.num_pages) == (3, 8)
    assert (found.compiles, found.late_compiles, found.launching_s) == (0, 0, 0)
    assert 0 < found.loop_s < elapsed


def test_what_opening_a_folder_takes_is_not_of_the_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    describe = module.describe_run
    now = [0.0]

    def slow(*given: Any) -> dict[str, object]:
        now[0] += 3
        return describe(*given)

    def run(loop: ServingLoop) -> None:
        now[0] += 5
        run_loop(loop)

    run_loop = ServingLoop.run
    monkeypatch.setattr(module, "describe_run", slow)
    monkeypatch.setattr(ServingLoop, "run", run)
    monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    found, _ = served(seconds(), [job(5, 2)], tmp_path)
    assert (now, found.loop_s) == ([8], 5)


def test_pages_and_preemptions_are_of_all_instances() -> None:
    """Two instances have 3 pages of 4 each for two requests that grow to 11 entries."""
    engine = {"num_pages": 4}
    config = seconds("ab", engine, system=in_turns("ab"))
    alone, _ = served(seconds("a", engine), [job(4, 8)] * 2)
    both, times = served(config, [job(4, 8)] * 4)
    assert alone.preemptions > 0
    assert both.preemptions == 2 * alone.preemptions
    assert (alone.num_pages, both.num_pages) == (3, 6)
    assert both.peak_pages == 2 * alone.peak_pages
    assert len(times) == 4


def test_what_is_known_of_prompts_is_cached() -> None:
    """The second prompt's first page is the first one's; lengths alone tell nothing of that."""
    tokens = [1, 2, 3, 4, 5, 6]
    linear = {"linear": {"step_s": 1.0, "token_s": 0.125}}
    config = seconds(engine={"enable_prefix_caching": True}, simulate=linear)
    same = [job(6, 1, 0.0, tokens), job(6, 1, 10.0, tokens)]
    found, times = served(config, same)
    assert times == {"0": [1.75], "1": [11.25]}
    assert found.cached_tokens == 4
    found, times = served(config, [job(6, 1), job(6, 1, 10.0)])
    assert times == {"0": [1.75], "1": [11.75]}
    assert found.cached_tokens == 0


def disaggregated(**sections: Any) -> RunFile:
    """1000 tokens' KV of 131,072 bytes each takes 2 s, and half a second until it begins."""
    links = [{"between": ["ga", "gb"], "gb_s": 0.065536, "latency_s": 0.5}]
    system = {"name": "disaggregated", "prefill": "a", "decode": "b"}
    engine = {"max_num_batched_tokens": 1000, "num_pages": 300}
    return seconds("ab", engine, links=links, system=system, **sections)


@pytest.mark.parametrize(("given", "first"), [(None, 3.5), (True, 3.5), (False, 1.0)])
def test_when_a_first_token_counts(given: bool | None, first: float, tmp_path: Path) -> None:
    """Drawn at 1 s where its KV leaves; the steps of the second instance begin at 3.5."""
    config = disaggregated(metrics={"ttft_counts_transfer": given})
    found, times = served(config, [job(1000, 3)], tmp_path)
    assert times == {"0": pytest.approx([first, 4.5, 5.5])}
    assert (found.ttft_p50, found.wall_s) == pytest.approx((first, 5.5))
    described = json.loads((tmp_path / "1" / "run.json").read_text())
    assert described["ttft_counts_transfer"] == (first == 3.5)
    (request,) = map(json.loads, (tmp_path / "1" / "requests.jsonl").open())
    assert request["token_times"] == pytest.approx([first, 4.5, 5.5])
    (transfer,) = (
        line
        for line in map(json.loads, (tmp_path / "1" / "steps.jsonl").open())
        if "request" in line
    )
    assert transfer == {
        "request": "0", "source": "a", "dest": "b", "tokens": 1000, "bytes": 131_072_000,
        "requested": 1.0, "start": 1.0, "end": 3.5, "hidden_s": 0.0,
    }  # fmt: skip


def test_what_runs_where_is_written(tmp_path: Path) -> None:
    config = disaggregated()
    metrics, _ = served(config, [job(1000, 3)], tmp_path)
    found = json.loads((tmp_path / "1" / "run.json").read_text())
    assert found["status"] == "finished"
    assert found["model"] == "llama-3-8b"
    assert found["system"] == config.system
    assert found["emulated"] == ["simulated on ga (A10), gb (A10)"]
    assert found["links"] == [{"between": ["ga", "gb"], "gb_s": 0.065536, "latency_s": 0.5}]
    assert (
        found["instances"]
        == model_cluster(model_site(replace(resolve(config), pairs=()))).describe()
    )
    assert found["simulate"]["linear"]["step_s"] == 1.0
    assert "hardware" not in found["simulate"]
    assert (found["lost"], found["overruns"]) == ({}, {})
    assert {name: found["metrics"][name] for name in ("steps", "wall_s", "loop_s")} == {
        "steps": 3,
        "wall_s": 5.5,
        "loop_s": metrics.loop_s,
    }


def test_a_ledger_has_what_was_decided(tmp_path: Path) -> None:
    """Two requests of one step each way, how many pages the first has, and its own hash."""
    config = disaggregated(ledger=True)
    work = [job(5, 2), job(3, 2, 9.0)]
    hashes = [
        served(config, work, tmp_path) and read_json(tmp_path / n / "run.json")["ledger"]
        for n in "12"
    ]
    entries = read_ledger(tmp_path / "1" / NAME)
    assert hashes == [{"hash": ledger_hash(entries), "entries": len(entries)}] * 2
    assert [kind for kind, *_ in entries] == ["start"] + [
        "legs",
        "batch",
        "send",
        "batch",
        "end",
    ] * 2
    assert entries[2] == ("batch", ["a", 2, 0, 0, [["0", 0, 5, True]], [2]], None)
    assert entries[3] == ("send", ["0", "a", "b", 0, 5, 2, 2], None)
    assert entries[5] == ("end", ["0", "length", 2], None)
    (tmp_path / "1" / NAME).write_bytes(b"\xff")
    with pytest.raises(JaxinferError, match=r"ledger\.jsonl: line 1 is damaged$"):
        read_ledger(tmp_path / "1" / NAME)


def test_what_a_system_reports_is_written(tmp_path: Path) -> None:
    system = {"name": "cronus", "partial": "a", "chunked": "b", "cut_share": 0.5}
    engine = {"max_num_batched_tokens": 64, "num_pages": 300}
    links = [{"between": ["ga", "gb"], "gb_s": 10.0}]
    served(seconds("ab", engine, system=system, links=links), [job(100, 2)], tmp_path)
    found = json.loads((tmp_path / "1" / "run.json").read_text())
    (request,) = map(json.loads, (tmp_path / "1" / "requests.jsonl").open())
    assert found["system_report"]
    assert request["cut"] == 50


@pytest.mark.parametrize("fit", ["relative", "absolute"])
def test_systems_that_predict_are_told_how_long_steps_take(
    fit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fit is the one that the run file names; it is not made for systems that need none."""
    told: list[Mapping[str, StepFit]] = []
    monkeypatch.setattr(module, "serve", lambda cluster, *_, **__: told.append(cluster.fits))
    costs = {"fit": fit, "flops": 0.5}
    links = [{"between": ["ga", "gb"], "gb_s": 10.0}]
    engine = {"max_num_batched_tokens": 64, "num_pages": 300, "max_num_seqs": 16}
    for system in (
        {"name": "cronus", "partial": "a", "chunked": "b"},
        {"name": "disaggregated", "prefill": "a", "decode": "b"},
    ):
        config = seconds("ab", engine, system=system, links=links, simulate=costs)
        simulate(config, [job(4, 2)])
    cost = model_cluster(model_site(replace(resolve(config), pairs=()))).instances["a"].cost
    pool = 299 * 4
    expected = fit_costs(cost, 64, 16, longest=pool, pool=pool, relative=fit == "relative")
    other = fit_costs(cost, 64, 16, longest=pool, pool=pool, relative=fit != "relative")
    assert told == [{"a": expected, "b": expected}, {}]
    assert expected != other


def test_decodes_have_rows_only_where_the_system_looks_at_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: dict[str, tuple[object, ...]] = {}
    new_instance = ModelledInstance.new_instance

    def note(self: ModelledInstance, name: str, *given: Any, **named: Any) -> Any:
        made[name] = given
        return new_instance(self, name, *given, **named)

    monkeypatch.setattr(ModelledInstance, "new_instance", note)
    links = [{"between": ["ga", "gb"], "gb_s": 10.0}]
    engine = {"max_num_batched_tokens": 64, "num_pages": 300}
    system: dict[str, Any] = {"name": "cronus", "partial": "a", "chunked": "b"}
    for more, grouped in (({"cut_share": 0.5}, True), ({"refine": True}, False)):
        served(seconds("ab", engine, system=system | more, links=links), [job(4, 2)])
        assert {name: given[1:3] for name, given in made.items()} == {
            "a": (grouped, False),
            "b": (grouped, False),
        }
        fits = [given[0] for given in made.values()]
        assert all(isinstance(fit, StepFit) for fit in fits) == ("cut_share" not in more)
    served(seconds(), [job(2, 2, 0.0, [5, 6])])
    assert made["a"][:3] == (None, True, True)


def test_lengths_are_checked_against_the_shortest_limit() -> None:
    config = seconds(
        "abc",
        system=in_turns("abc"),
        instances={
            "a": {"group": "ga", "max_model_len": 12},
            "b": {"group": "gb", "max_model_len": 10},
            "c": {"group": "gc"},
        },
    )
    found, _ = served(config, [job(6, 4)] * 3)
    assert found.output_tokens == 12
    with pytest.raises(JaxinferError) as error:
        served(config, [job(6, 4), job(7, 4)])
    assert str(error.value) == "request 1: 7 prompt and 4 output tokens, max_model_len is 10"
    with pytest.raises(JaxinferError, match=r"^no requests$"):
        served(config, [])


def test_what_can_never_be_served_ends_the_run() -> None:
    with pytest.raises(JaxinferError, match="needs 9 pages of 4 tokens"):
        served(seconds(), [job(4, 2), job(30, 4)])


def test_time_in_roles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request's first step sets the role that the instance takes when the request has left."""
    (tmp_path / "roles.py").write_text(
        "from jaxinfer.serving.system import SetRole\n"
        "from jaxinfer.systems.single import Single\n"
        "class Roles(Single):\n"
        "    roles = {0.0: 'on', 10.5: 'off'}\n"
        "    def on_step(self, step, cluster):\n"
        "        role = self.roles.get(step.start)\n"
        "        return [SetRole(step.instance, role)] if role else []\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    config = seconds(system="roles:Roles")
    found, _ = served(config, [job(4, 3), job(5, 2, 10.5), job(5, 1, 14)], tmp_path / "runs")
    (use,) = found.instances.values()
    assert (found.wall_s, use.busy_s) == (15, 6)
    # From 0 to 3 it has none, and off is taken when the second request has left, at 12.5.
    assert use.role_s == {"on": 9.5, "off": 2.5}
    written = json.loads((tmp_path / "runs" / "1" / "run.json").read_text())["metrics"]
    assert written["instances"] == {
        "a": {"first_step": 0, "last_step": 15, "busy_s": 6, "role_s": {"on": 9.5, "off": 2.5}}
    }
    assert (written["e2e_mean"], written["usd_per_request"]) == (2, None)


def predicted(config: RunFile, work: Sequence[BenchRequest]) -> dict[str, tuple[int, int] | None]:
    found = {}

    def note(request: RequestState, at: Sequence[float]) -> None:
        found[request.id] = request.predicted

    simulate(config, work, None, note)
    return found


def test_lengths_are_predicted_as_requests_come_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lengths are predicted in the order of arrival, by the requests' numbers in the workload."""
    work = [job(3, 9, 5.0), job(3, 25), job(3, 11, 1.0)]
    exact = {"granularity": 10, "accuracy": 1}
    assert predicted(seconds(workload={"predictor": exact}), work) == {
        "0": (0, 10),
        "1": (20, 30),
        "2": (10, 20),
    }
    assert set(predicted(seconds(), work).values()) == {None}
    (tmp_path / "predictor_of_arrivals.py").write_text(
        "class Counts:\n    n = 0\n    def __call__(self, request):\n"
        "        self.n += 1\n        return self.n, request.prompt_len + self.n\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    config = seconds(workload={"predictor": "predictor_of_arrivals:Counts"})
    assert predicted(config, work) == {"1": (1, 4), "2": (2, 5), "0": (3, 6)}
    assert predicted(config, work)["1"] == (1, 4)  # A new one in each run.
