"""Step times by phase: sums by hand, DistServe's published profile, stages, what is refused."""

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxinfer import JaxinferError
from jaxinfer.config.costs import SimulateOptions
from jaxinfer.config.nodes import place_groups
from jaxinfer.config.resolve import resolve
from jaxinfer.config.run_file import RunFile, as_run_file, load_run_file
from jaxinfer.config.site import model_site
from jaxinfer.config.step_costs import DecodeCosts, PrefillCosts
from jaxinfer.serving.batch import Work
from jaxinfer.serving.request_state import RequestState
from jaxinfer.serving.step_fit import StepFit
from jaxinfer.serving.system import Assignment, System
from jaxinfer.serving.views import ClusterView, Leg, RequestView
from jaxinfer.simulate.cluster import model_cluster
from jaxinfer.simulate.costs.phases import PhaseCosts, PhaseStage, prompt_pairs
from jaxinfer.simulate.run import simulate
from jaxinfer.workload.lengths import BenchRequest

# DistServe's artefact, profiler-a100-80g.distserve.json, OPT-13B on one GPU, in milliseconds.
OPT_13B = {
    "prefill": (18.10254647486372, 0.1019122572698738, 7.122264314252114e-06),
    "small": (19.934702624895458, 0.0006269356524350583, 0.03850697740828398),
    "large": (7.1661889468253595, 0.0005798000403396046, 0.15831096191764046),
}


def opt_13b(**more: Any) -> PhaseCosts:
    """The profile in seconds."""
    a, b, c = (value / 1e3 for value in OPT_13B["prefill"])
    names = "step_s", "context_s", "sequence_s"
    regimes = [
        {name: value / 1e3 for name, value in zip(names, OPT_13B[size], strict=True)}
        for size in ("small", "large")
    ]
    return PhaseCosts.model_validate(
        {
            "prefill": {"step_s": a, "token_s": b, "pair_s": c},
            "decode": [regimes[0] | {"below": 95}, regimes[1]],
        }
        | more
    )


def prompts(*lengths: int) -> Work:
    """Whole ones in one step."""
    n = len(lengths)
    return Work(sum(lengths), 0, n, n, 0, [(0, length) for length in lengths])


def decodes(rows: int, entries: int) -> Work:
    return Work(rows, rows, rows, rows, entries, [], rows)


def test_a_prefill_is_distserve_s() -> None:
    a, b, c = OPT_13B["prefill"]
    stage = PhaseStage(opt_13b())
    assert stage.seconds(prompts(512)) == pytest.approx(0.07215, abs=5e-6)
    lengths = (512, 100, 1300)
    expected = a + b * sum(lengths) + c * sum(length**2 for length in lengths)
    assert stage.seconds(prompts(*lengths)) == pytest.approx(expected / 1e3, rel=1e-12)


def test_a_decode_is_distserve_s_by_its_regime() -> None:
    """Time falls at the seam of 94 and 95 rows at 80,000 entries, as in the published fits."""
    stage = PhaseStage(opt_13b())
    for rows, regime, rounded in ((94, "small", 73.7), (95, "large", 68.6)):
        a, b, c = OPT_13B[regime]
        found = stage.seconds(decodes(rows, 80_000)) * 1e3
        assert found == pytest.approx(a + b * 80_000 + c * rows, rel=1e-12)
        assert found == pytest.approx(rounded, abs=0.05)


@given(st.lists(st.integers(1, 900), min_size=1, max_size=8))
def test_chunks_of_a_prompt_add_up_to_its_square(counts: list[int]) -> None:
    starts = [sum(counts[:i]) for i in range(len(counts))]
    each = [prompt_pairs([chunk]) for chunk in zip(starts, counts, strict=True)]
    assert sum(each) == sum(counts) ** 2
    assert prompt_pairs(list(zip(starts, counts, strict=True))) == sum(each)


# Units apart by powers of ten, so that each term is seen in the sum.
PLAIN: dict[str, Any] = {
    "prefill": {"step_s": 1e9, "token_s": 1e6, "pair_s": 1.0},
    "decode": [
        {"below": 3, "step_s": 0.1, "context_s": 2e-3, "sequence_s": 1e-6},
        {"below": 6, "step_s": 0.2, "context_s": 3e-3, "sequence_s": 2e-6},
        {"step_s": 0.3, "context_s": 5e-3, "sequence_s": 3e-6},
    ],
}


@pytest.mark.parametrize(
    ("rows", "context_s", "sequence_s"), [(2, 2e-3, 1e-6), (3, 3e-3, 2e-6), (7, 5e-3, 3e-6)]
)
def test_a_mixed_step_has_the_constant_of_its_prefill(
    rows: int, context_s: float, sequence_s: float
) -> None:
    """Chunks of 16 tokens after 40 and 20 after 10, beside decodes that see 280 entries in all."""
    work = Work(36 + rows, rows, rows + 2, rows, 280, [(40, 16), (10, 20)], rows)
    pairs = (56**2 - 40**2) + (30**2 - 10**2)
    expected = 1e9 + 36 * 1e6 + pairs + context_s * 280 + sequence_s * rows
    found = PhaseStage(PhaseCosts.model_validate(PLAIN)).seconds(work)
    assert found - 1e9 - 36e6 == pytest.approx(expected - 1e9 - 36e6, rel=1e-9)


@pytest.mark.parametrize(("rows", "step_s"), [(1, 0.1), (2, 0.1), (3, 0.2), (5, 0.2), (6, 0.3)])
def test_regimes_end_below_their_bound(rows: int, step_s: float) -> None:
    stage = PhaseStage(PhaseCosts.model_validate(PLAIN))
    assert stage.seconds(decodes(rows, 0)) == pytest.approx(step_s, abs=3e-5)


@pytest.mark.parametrize(
    ("shared", "times"), [({"share_step": True}, 1), ({"share_step": False}, 3), ({}, 3)]
)
def test_the_constant_is_shared_or_counts_at_each_stage(
    shared: dict[str, bool], times: int
) -> None:
    costs = PhaseCosts.model_validate(PLAIN | shared)
    stages = [PhaseStage(costs, share, number == 0) for number, share in enumerate((0.5, 0.3, 0.2))]
    assert sum(s.seconds(prompts(10)) for s in stages) == pytest.approx(times * 1e9 + 1e7 + 100)
    found = sum(stage.seconds(decodes(7, 100)) for stage in stages)
    assert found == pytest.approx(times * 0.3 + 0.5 + 21e-6, rel=1e-9)


def test_what_is_not_shared() -> None:
    """The first stage's constant and entries; each stage's own in steps with chunks alone."""
    extra = {"step_s": 1e-3, "context_s": 1e-6, "prefill_stage_s": 0.5}
    plain, more = (PhaseCosts.model_validate(PLAIN | e) for e in ({}, {"extra": extra}))
    chunk = Work(18, 2, 3, 2, 70, [(40, 16)], 2)
    for work, first, later in (
        (decodes(4, 300), 1e-3 + 300e-6, 0.0),
        (prompts(20, 30), 0.5 + 1e-3 + 50e-6, 0.5),
        (chunk, 0.5 + 1e-3 + (70 + 56) * 1e-6, 0.5),
    ):
        for is_first, expected in ((True, first), (False, later)):
            stages = [PhaseStage(costs, 1e-9, is_first) for costs in (plain, more)]
            steps = [stage.seconds(work) for stage in stages]
            assert steps[1] - steps[0] == pytest.approx(expected, rel=1e-5, abs=1e-7)
    # Each of the first stage's two counts without the other.
    for extra, expected in (({"step_s": 2.0}, 2.0), ({"context_s": 0.5}, 150.0)):
        first = PhaseStage(PhaseCosts.model_validate(PLAIN | {"extra": extra}), 1e-9)
        assert first.seconds(decodes(4, 300)) - 0.2 == pytest.approx(expected, rel=1e-6)


def run_file(simulate_section: dict[str, Any], stages: int = 1) -> RunFile:
    places = [{"group": f"g{i}", "layers": 32 // stages} for i in range(stages)]
    return as_run_file(
        {
            "model": "llama-3-8b",
            "engine": {"enable_prefix_caching": False, "launch_ahead": False},
            "groups": {f"g{i}": {"kind": "A100-80G-SXM"} for i in range(stages)},
            "instances": {"i": {"stages": places}},
            "links": [{"between": [f"g{i}", f"g{i + 1}"], "gb_s": 1e9} for i in range(stages - 1)],
            "simulate": simulate_section,
        }
    )


def test_a_run_has_these_costs() -> None:
    """A request of 500 and 4 tokens, in chunks of 400 and 100, through two stages of half each.

    Equation (step_s of 0.02 shared): 0.04 s for the two chunks' constants, 500 tokens, 500^2 pairs;
    then decodes that see 501, 502 and 503 entries. On the first stage 2 ms more for each step.
    """
    phases = {
        "prefill": {"step_s": 0.02, "token_s": 1e-4, "pair_s": 1e-8},
        "decode": [{"step_s": 0.01, "context_s": 1e-6, "sequence_s": 1e-5}],
        "share_step": True,
        "extra": {"step_s": 0.002},
    }
    config = run_file({"phases": phases}, stages=2)
    config = config.model_copy(
        update={
            "instances": {
                "i": config.instances["i"].model_copy(
                    update={"max_num_batched_tokens": 400, "chunks_in_flight": 1}
                )
            }
        }
    )
    times: list[float] = []

    def note(request: RequestState, delivered: Any) -> None:
        times.extend(delivered)

    simulate(config, [BenchRequest(None, 500, 4, 0.0)], on_request=note)
    first = 2 * (0.02 + 0.002) + 500e-4 + 500**2 * 1e-8
    ends = [first]
    for entries in (501, 502, 503):
        ends.append(ends[-1] + 0.012 + entries * 1e-6 + 1e-5)
    assert times == pytest.approx(ends, abs=1e-6)


def test_distserve_s_run_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt of 512 on two GPUs, and a token after it on one that sees 513 entries.

    By hand from the artefact's profile, 50.50 ms, and 3.05 ms besides; then 20.30 and 2.05 ms,
    after the KV's 512 x 819,200 bytes at the 300 GB/s of one GPU's link: 1.40 ms.
    """
    monkeypatch.chdir(Path(__file__).parents[3])
    config = load_run_file("configs/distserve/opt_13b.yaml")
    times: list[float] = []

    def note(request: RequestState, delivered: Any) -> None:
        times.extend(request.metrics.token_times)

    simulate(config, [BenchRequest(None, 512, 2, 0.0)], on_request=note)
    assert times[0] == pytest.approx(0.05355, abs=1e-5)
    assert times[1] - times[0] == pytest.approx(0.02030 + 0.00205 + 0.00140, abs=2e-5)


def test_a_group_s_own_kind_replaces_the_others() -> None:
    """Kinds of costs in place of one another."""
    kinds: dict[str, Any] = {
        "linear": {"step_s": 1.0},
        "phases": PLAIN,
        "tables": "somewhere",
        "curves": {"file": "there.csv"},
    }
    for common, own in ((a, b) for a in kinds for b in [*kinds, "flops"] if a != b):
        given = {"flops": 0.5} if own == "flops" else {own: kinds[own]}
        options = SimulateOptions.model_validate({common: kinds[common], "groups": {"g": given}})
        found = options.of("g")
        assert getattr(found, common) is None
        assert getattr(found, own)
        assert getattr(options.of("other"), common)


class Asks(System):
    """Serves on the one instance, and keeps its fit."""

    needs_fits = True
    seen: ClassVar[list[StepFit | None]] = []

    def route(self, waiting: Collection[RequestView], cluster: ClusterView) -> list[Assignment]:
        ((name, instance),) = cluster.instances.items()
        self.seen.append(instance.fit)
        return [Assignment(request.id, (Leg(name),)) for request in waiting]


def test_a_system_gets_decode_s_coefficients() -> None:
    decode = {"step_s": 0.01, "context_s": 1e-6, "sequence_s": 1e-4}
    phases = {"prefill": {"token_s": 1e-4}, "decode": [decode]}
    config = run_file({"phases": phases}).model_copy(
        update={"system": {"name": f"{__name__}:Asks"}}
    )
    simulate(config, [BenchRequest(None, 100, 4, 0.0)])
    fit = Asks.seen[-1]
    assert fit
    assert fit.decode
    assert fit.decode.constant == pytest.approx(0.01)
    assert fit.decode.per_context == pytest.approx(1e-6)
    assert fit.decode.per_sequence == pytest.approx(1e-4)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"phases": PLAIN, "tables": "x"}, "both tables and phases: give one of them"),
        ({"phases": PLAIN, "linear": {"step_s": 1}}, "both linear and phases: give one of them"),
        (
            {"phases": PLAIN, "curves": {"file": "x"}},
            "both phases and curves: give one of them",
        ),
        (
            {"curves": {"file": "x"}, "bandwidth": 0.5},
            "bandwidth has no effect with curves: give one of them",
        ),
        ({"phases": PLAIN, "flops": 0.5}, "flops has no effect with phases: give one of them"),
        ({"phases": PLAIN, "step_s": 0.5}, "step_s has no effect with phases: give one of them"),
        (
            {"phases": PLAIN, "groups": {"g": {"sequence_s": 0.5}}},
            "groups.g.sequence_s has no effect with phases: give one of them",
        ),
        (
            {"groups": {"g": {"phases": PLAIN, "linear": {"step_s": 1}}}},
            "groups.g: both linear and phases: give one of them",
        ),
    ],
)
def test_two_kinds_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(JaxinferError) as error:
        SimulateOptions.model_validate(given)
    assert str(error.value) == message


def test_a_capped_gpu_has_no_phases(tmp_path: Any) -> None:
    node = "{gpu: A10, gpus: 1, nic_gb_s: 1, flops_scale: 0.5}"
    file = tmp_path / "file.yaml"
    file.write_text(f"source: none\nlatency_s: 0.0\nnodes: {{n: {node}}}\n")
    config = run_file({"hardware": str(file), "groups": {"g0": {"node": "n", "phases": PLAIN}}})
    groups = {"g0": config.groups["g0"].model_copy(update={"kind": None})}
    cluster = config.cluster().model_copy(update={"groups": groups})
    with pytest.raises(JaxinferError, match=r"groups\.g0: phases are of an uncapped GPU, node n"):
        place_groups(cluster, config.simulate)


PREFILL = {"step_s": 1.0}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"decode": [PREFILL]}, "prefill is missing"),
        ({"prefill": PREFILL}, "decode is missing"),
        ({"prefill": PREFILL, "decode": []}, "decode is [], must have at least 1 item"),
        ({"prefill": {}, "decode": [PREFILL]}, "prefill: step_s, token_s or pair_s must be grea"),
        ({"prefill": PREFILL, "decode": [{}]}, "decode[0]: step_s, context_s or sequence_s must"),
        (
            {"prefill": PREFILL, "decode": [PREFILL, PREFILL]},
            "decode[0].below is missing: only the last regime is for all batches that are left",
        ),
        (
            {"prefill": PREFILL, "decode": [PREFILL | {"below": 5}]},
            "decode[0].below is 5: the last regime is for all batches that are left, leave it out",
        ),
        (
            {
                "prefill": PREFILL,
                "decode": [PREFILL | {"below": 5}, PREFILL | {"below": 5}, PREFILL],
            },
            "decode[1].below is 5, must rise from one regime to the next",
        ),
        (
            {"prefill": PREFILL, "decode": [PREFILL | {"below": 1}, PREFILL]},
            "decode[0].below is 1, must be greater than or equal to 2",
        ),
        ({"prefill": {"pair_s": -1.0}, "decode": [PREFILL]}, "prefill.pair_s is -1.0, must be"),
        ({"prefill": PREFILL, "decode": [PREFILL], "extra": {"stage_s": 1}}, "extra.stage_s: unk"),
        *(
            (
                {"prefill": PREFILL, "decode": [PREFILL], "extra": {name: -1.0}},
                f"extra.{name} is -1.0, must be greater than or equal to 0",
            )
            for name in ("step_s", "context_s", "prefill_stage_s")
        ),
    ],
)
def test_costs_that_cannot_be_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(JaxinferError) as error:
        PhaseCosts.model_validate(given)
    assert message in str(error.value)


def test_the_cluster_gives_each_stage_its_share() -> None:
    config = run_file({"phases": PLAIN | {"share_step": True}}, stages=4)
    cost = model_cluster(model_site(replace(resolve(config), pairs=()))).instances["i"].cost
    assert cost.stages(decodes(7, 100)) == pytest.approx([(0.3 + 0.5 + 21e-6) / 4] * 4)


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        (PrefillCosts, ("step_s", "token_s", "pair_s")),
        (DecodeCosts, ("step_s", "context_s", "sequence_s")),
    ],
)
def test_one_coefficient_is_enough(kind: Any, names: tuple[str, ...]) -> None:
    for name in names:
        one = kind(**{name: 0.5})
        assert [getattr(one, other) for other in names] == [0.5 * (n == name) for n in names]
