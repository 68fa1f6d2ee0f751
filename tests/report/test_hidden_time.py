"""Hidden seconds of transfers: by hand, by a search of the whole run, and in bounded memory."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from jaxinfer.config.run_file import load_run_file
from jaxinfer.report import run_folder
from jaxinfer.report.hidden_time import HiddenTime
from jaxinfer.serving.world import StepDone, TransferDone
from jaxinfer.simulate.run import simulate
from jaxinfer.workload.lengths import BenchRequest

CRONUS = Path(__file__).parents[2] / "configs" / "cronus" / "cronus.yaml"
# Of Llama 3 8B: keys and values of 32 layers, 8 heads of 128 numbers of 16 bits.
TOKEN_BYTES = 2 * 32 * 8 * 128 * 2


def settings(rule: str, cut: float, token_s: float, transfer_s: float) -> list[str]:
    """A token takes so long to compute, and so long to send; the PPI takes two in a step."""
    return [
        f"simulate={{linear: {{token_s: {token_s}}}}}",
        f"links=[{{between: [high, low], gb_s: {TOKEN_BYTES / transfer_s / 1e9}}}]",
        f"system.cut_share={cut}",
        f"system.hand_off={rule}",
        "engine.max_num_seqs=2",
        "engine.max_num_batched_tokens=2",
        "instances.ppi.max_num_batched_tokens=2",
        "instances.ppi.num_pages=100",
        "instances.cpi.num_pages=100",
    ]


def lines(folder: Path) -> list[dict[str, Any]]:
    with (folder / "1" / "steps.jsonl").open(encoding="utf-8") as file:
        return [json.loads(line) for line in file]


# A prompt of four tokens: steps from 0 to 2 and from 2 to 4. Two tokens take three seconds to send;
# where the request goes on, the second two follow at 4 and share the link with a second's worth of
# the first, so these land at 6 and all at 8, whereupon the CPI decodes.
@pytest.mark.parametrize(
    ("max_tokens", "transfers"),
    [
        (1, [(2.0, 5.0, 2.0)]),
        (2, [(2.0, 6.0, 2.0), (4.0, 8.0, 0.0)]),
        (3, [(2.0, 6.0, 2.0), (4.0, 8.0, 0.0)]),
    ],
)
def test_the_prompt_s_own_steps_hide_its_transfer_whenever_the_request_ends(
    tmp_path: Path, max_tokens: int, transfers: list[tuple[float, float, float]]
) -> None:
    config = load_run_file(CRONUS, settings("per_chunk", 1.0, 1.0, 1.5))
    simulate(config, [BenchRequest(None, 4, max_tokens, 0.0)], tmp_path)
    found = [
        (line["start"], line["end"], line["hidden_s"])
        for line in lines(tmp_path)
        if "request" in line
    ]
    assert found == [pytest.approx(each, abs=1e-5) for each in transfers]


@pytest.mark.parametrize("rule", ["on_demand", "at_end", "per_chunk", "per_segment"])
@pytest.mark.parametrize("cut", [0.5, 1.0])
def test_hidden_seconds_are_those_of_a_search_of_all_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rule: str, cut: float
) -> None:
    steps: list[StepDone] = []
    made: list[HiddenTime] = []

    class Watched(HiddenTime):
        def __init__(self) -> None:
            super().__init__()
            made.append(self)

        def add_step(self, done: StepDone, moving: Any) -> Any:
            steps.append(done)
            return super().add_step(done, moving)

    monkeypatch.setattr(run_folder, "HiddenTime", Watched)
    lengths = [(9, 1), (4, 2), (13, 3), (2, 8), (7, 2), (30, 1), (5, 5)]
    work = [BenchRequest(None, p, o, 3.0 * i) for i, (p, o) in enumerate(lengths)]
    config = load_run_file(CRONUS, [*settings(rule, cut, 0.7, 1.1), "instances.ppi.segments=4"])
    simulate(config, work, tmp_path)
    prompts = {str(i): p for i, (p, _) in enumerate(lengths)}
    transfers = [line for line in lines(tmp_path) if "request" in line]
    # Each that goes on has one at least.
    handed_on = {str(i) for i, (_, o) in enumerate(lengths) if cut < 1 or o > 1}
    assert {line["request"] for line in transfers} >= handed_on
    for line in transfers:
        hidden, at = 0.0, line["start"]
        for step in sorted(steps, key=lambda step: step.start):
            computes = any(
                row.request.id == line["request"] and row.start < prompts[line["request"]]
                for row in step.rows
            )
            if step.instance == line["dest"] or (step.instance == line["source"] and computes):
                hidden += max(min(step.end, line["end"]) - max(step.start, at), 0.0)
                at = max(at, min(step.end, line["end"]))
        assert line["hidden_s"] == pytest.approx(hidden, abs=1e-5)
    assert any(line["hidden_s"] > 0 for line in transfers)
    # Nothing is waited for at the end.
    (hidden_time,) = made
    assert not hidden_time._landed


def step(instance: str, start: float, end: float, *prompts: str, at: int = 8) -> StepDone:
    """Return a step of requests with prompts of nine tokens, each with a row at KV entry ``at``."""
    rows = [SimpleNamespace(request=SimpleNamespace(id=p, prompt_len=9), start=at) for p in prompts]
    return StepDone(SimpleNamespace(instance=instance, rows=rows), (), start, end)  # type: ignore[arg-type]


def transfer(requested: float) -> Any:
    request = SimpleNamespace(id="r")
    return SimpleNamespace(source="a", dest="b", request=request, requested=requested)


def in_flight(**counts: int) -> Any:
    return {name: SimpleNamespace(in_flight=count) for name, count in counts.items()}


def test_a_step_that_outlasts_the_transfer_and_the_destination_s_counts() -> None:
    """The source's next chunk, from 10 to 30, ends after the destination's next step."""
    hidden, moving = HiddenTime(), [transfer(10.0)]
    assert hidden.add_step(step("a", 0, 10, "r"), moving) == []
    done = TransferDone(moving[0], 10.0, 15.0)
    assert hidden.add_transfer(done, in_flight(a=1, b=1)) == []
    assert hidden.add_step(step("b", 14, 16), []) == []
    assert hidden.add_step(step("a", 10, 30, "r"), []) == [(done, 5.0)]


def test_two_idle_ends_are_not_waited_for() -> None:
    done = TransferDone(transfer(1.0), 1.0, 2.0)
    assert HiddenTime().add_transfer(done, in_flight(a=0, b=0)) == [(done, 0.0)]


def test_all_steps_in_flight_are_waited_for() -> None:
    hidden, moving = HiddenTime(), [transfer(1.0)]
    done = TransferDone(moving[0], 1.0, 4.0)
    assert hidden.add_transfer(done, in_flight(a=0, b=2)) == []
    assert hidden.add_step(step("a", 0, 3, "q"), []) == []
    assert hidden.add_step(step("b", 0, 1.5), []) == []
    assert hidden.add_step(step("b", 3, 5), []) == [(done, 1.5)]


def test_a_step_that_starts_after_the_last_byte_hides_nothing() -> None:
    """The step was launched before, behind one that goes on until then."""
    hidden = HiddenTime()
    done = TransferDone(transfer(1.0), 1.0, 4.0)
    assert hidden.add_transfer(done, in_flight(a=0, b=2)) == []
    assert hidden.add_step(step("b", 2, 6), []) == []
    assert hidden.add_step(step("b", 6, 9), []) == [(done, 2.0)]


@pytest.mark.parametrize(("at", "seconds"), [(8, 2.0), (9, 0.0)])
def test_the_source_s_decodes_of_the_request_hide_nothing(at: int, seconds: float) -> None:
    hidden, moving = HiddenTime(), [transfer(1.0)]
    hidden.add_step(step("a", 0, 3, "r", at=at), moving)
    done = TransferDone(moving[0], 1.0, 4.0)
    assert hidden.add_transfer(done, in_flight(a=0, b=0)) == [(done, seconds)]


@pytest.mark.parametrize("lost", ["a", "b"])
def test_steps_of_a_lost_instance_are_not_waited_for(lost: str) -> None:
    hidden = HiddenTime()
    done = TransferDone(transfer(1.0), 1.0, 4.0)
    (other,) = {"a", "b"} - {lost}
    assert hidden.add_transfer(done, in_flight(a=1, b=1)) == []
    assert hidden.lose(lost) == []
    (settled,) = hidden.add_step(step(other, 2, 5, "r"), [])
    assert settled == (done, 2.0)
    # One that lands after the loss: nobody counts the lost one's steps.
    assert hidden.add_transfer(done, in_flight(**{other: 0})) == [(done, 2.0)]


def test_steps_are_forgotten_when_no_transfer_can_need_them() -> None:
    hidden = HiddenTime()
    kept = hidden._steps["a"]
    for number in range(100):
        hidden.add_step(step("a", number, number + 1, "r"), [])
        assert not kept
    # One that was asked for at 150 keeps those that end later.
    moving = [transfer(170.0), transfer(150.0)]
    for number in range(100, 200):
        hidden.add_step(step("a", number, number + 1, "r"), moving)
    assert [step.end for step in kept] == list(range(151, 201))
    # So does one that has landed and waits, by its first byte.
    hidden.add_transfer(TransferDone(moving[1], 180.0, 205.0), in_flight(a=0, b=1))
    hidden.add_step(step("a", 200, 201, "r"), [])
    assert [step.end for step in kept] == list(range(181, 202))
    ((_, seconds),) = hidden.add_step(step("b", 200, 204), [])
    assert seconds == 24  # Its own prompt's from 180 to 201, and the destination's to 204.
    hidden.add_step(step("a", 201, 202, "r"), [])
    assert not kept
