"""Steps of instances that share experts: times, rounds, weights, and experts by tokens."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from jaxinfer import JaxinferError
from jaxinfer.config.resolve import resolve
from jaxinfer.config.run_file import as_run_file
from jaxinfer.config.site import model_site
from jaxinfer.hardware.catalogue import ModelShape, find_gpu
from jaxinfer.serving.batch import Batch, Work
from jaxinfer.simulate.costs.joint import (
    Exchange,
    JointExperts,
    JointRounds,
    JointSteps,
    experts_curve,
)
from jaxinfer.simulate.costs.piecewise_linear import PiecewiseLinear
from jaxinfer.simulate.run import simulate
from jaxinfer.workload.bench_request import BenchRequest

MODEL = ModelShape(
    hidden_size=64,
    intermediate_size=32,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=100,
    num_experts=8,
    num_experts_per_tok=2,
)


class OwnCost:
    """A second, and one for each token."""

    def stages(self, work: Work) -> list[float]:
        return [1.0 + work.tokens]

    def hops(self, work: Work) -> list[float]:
        return []


def decodes(count: int) -> Work:
    return Work(count, count, count, count, count, [], count)


def joint(graph_tokens: int = 4) -> JointSteps:
    """Ten layers whose experts take 2 us a token, and whose exchange 1 us and as much a token."""
    experts = JointExperts(PiecewiseLinear({0.0: 0.0, 100.0: 200.0}), Exchange(1e-6, 1e-6), 10)
    return JointSteps({"a": OwnCost(), "b": OwnCost()}, [experts, experts], graph_tokens)


def test_the_slowest_sets_the_pace_and_experts_see_all_tokens() -> None:
    # 8 and 5 tokens, beyond a graph's: 10 layers of 26 + 1 + 13 us.
    found = joint().seconds({"a": decodes(8), "b": decodes(5)})
    assert found == pytest.approx(9 + 400e-6)
    # Of a graph, all are padded to the most; one that is idle goes along.
    assert joint().seconds({"a": decodes(4)}) == pytest.approx(5 + 10 * (16 + 1 + 8) * 1e-6)
    assert joint().seconds({"a": decodes(8)}) == pytest.approx(9 + 10 * (18 + 1 + 9) * 1e-6)


def test_the_slower_of_unlike_sharers_at_each_size() -> None:
    """Kernels that start in 20 us and take 1 us a token, and 2 us a token, cross at 20."""
    curves = ({0.0: 20.0, 100.0: 120.0}, {0.0: 0.0, 100.0: 200.0})
    experts = [JointExperts(PiecewiseLinear(c), Exchange(0.0, 0.0), 10) for c in curves]
    steps = JointSteps({"a": OwnCost(), "b": OwnCost()}, experts, 0)
    for tokens, micros in ((5, 26), (40, 82)):
        found = steps.seconds({"a": decodes(tokens)})
        assert found == pytest.approx(1 + tokens + 10 * micros * 1e-6, abs=1e-12)


def test_an_exchange_gathers_and_scatters_hidden_states() -> None:
    """Two devices have half of the bytes each, which go over the link twice."""
    gpu = find_gpu("RTX-PRO-6000")
    gb_s, each_s = gpu.collective
    found = Exchange.of(gpu, MODEL, 2, 2)
    assert found == Exchange(2 * each_s, 2 * 64 * 2 / 2 / (gb_s * 1e9))


def test_rounds_take_one_batch_of_each() -> None:
    rounds = JointRounds(joint())
    assert not rounds.begin(0.0)
    first, second = (Batch("a", [], 0, 1, 1, grouped=8, grouped_context=8) for _ in range(2))
    other = Batch("b", [], 0, 1, 1, grouped=20, grouped_context=20)
    rounds.add(first)
    rounds.add(second)
    (done,) = rounds.begin(1.0)
    assert (done.batch, done.start) == (first, 1.0)
    rounds.add(other)
    assert not rounds.begin(done.end - 0.5)  # The step is under way.
    both = rounds.begin(done.end)
    assert [each.batch for each in both] == [second, other]
    assert {each.end for each in both} == {
        done.end + joint().seconds({"a": second.work, "b": other.work})
    }


def test_experts_by_tokens_of_all_devices() -> None:
    """Two devices have half of the experts each, and half of the products in the mean."""
    points = {(t, e): 10 * e + t for t in (1.0, 64.0, 512.0) for e in (1.0, 2.0, 4.0)}
    curve = PiecewiseLinear(experts_curve(points, MODEL, 2))
    for tokens in (2, 8, 128, 1024):
        read = 8 * (1 - 0.75**tokens) / 2
        assert curve(tokens) == pytest.approx(10 * read + tokens / 2, rel=1e-6)
    assert curve(1) == pytest.approx(10 * 1 + 1)  # No fewer than were measured.


def profile(folder: Path, moe: str | None) -> str:
    """Operators that take nothing but the experts and a microsecond of attention."""
    tp = folder / "tp1"
    tp.mkdir(parents=True)
    meta = {"engine_effective": {"hf_overrides": {"hidden_size": 64, "intermediate_size": 999}}}
    (folder / "meta.yaml").write_text(yaml.safe_dump(meta))
    names = ("layernorm", "qkv_proj", "rotary_emb", "o_proj", "embedding", "final_layernorm")
    dense = "\n".join(f"{name},{at},0" for name in names for at in (1, 100))
    (tp / "dense.csv").write_text(f"layer,tokens,time_us\n{dense}\n")
    heads = "\n".join(f"{name},{at},0" for name in ("lm_head", "sampler") for at in (1, 10))
    (tp / "per_sequence.csv").write_text(f"layer,sequences,time_us\n{heads}\n")
    rows = "8,0,0,0,1\n64,0,0,0,1\n0,0,1,8,1\n0,0,8,8,1\n0,0,1,64,1\n0,0,8,64,1"
    header = "prefill_chunk,kv_prefill,n_decode,kv_decode,time_us"
    (tp / "attention.csv").write_text(f"{header}\n{rows}\n")
    if moe is not None:
        (tp / "moe.csv").write_text(f"tokens,activated_experts,time_us\n{moe}")
    return str(folder)


def run_file(folder: str, **simulated: Any) -> Any:
    shape = MODEL.model_dump(exclude_none=True)
    return as_run_file(
        {
            "model": "mixture",
            "models": {"mixture": shape},
            "groups": {"g": {"kind": "RTX-PRO-6000", "replicas": 2}},
            "engine": {"num_pages": 100, "max_in_flight": 1, "launch_ahead": False},
            "instances": {"x": {"group": "g", "replicas": 2}},
            "system": "least_loaded",
            "simulate": {"shared_experts": ["x"], "tables": folder} | simulated,
        }
    )


def test_replicas_end_their_steps_together(tmp_path: Path) -> None:
    """Two prompts at once by hand, one on each; the second has two tokens more to give."""
    tables = profile(tmp_path / "t", "1,1,1000\n1,4,1000\n100,1,1000\n100,4,1000\n")
    times: list[list[float]] = []
    work = [BenchRequest(None, 8, 2, 0.0), BenchRequest(None, 8, 4, 0.0)]
    simulate(run_file(tables), work, on_request=lambda _, at: times.append(list(at)))
    gb_s, each_s = find_gpu("RTX-PRO-6000").collective

    def step(tokens: int) -> float:
        exchange = 2 * each_s + tokens * 2 * 64 * 2 / 2 / (gb_s * 1e9)
        return 3 * (1e-6 + 1e-3 + exchange)

    # Prompts of 8 tokens on both, then one token of each; alone, the idle one goes along.
    ends = [step(16), step(16) + step(2), step(16) + 2 * step(2), step(16) + 3 * step(2)]
    assert times[0] == pytest.approx(ends[:2], rel=1e-6)
    assert times[1] == pytest.approx(ends, rel=1e-6)


def test_each_has_its_share_of_the_experts(tmp_path: Path) -> None:
    site = model_site(resolve(run_file(profile(tmp_path / "t", "1,1,1\n"))))
    (part,) = (stage.part for stage in site.stages["x0"])
    own = 3 * (MODEL.attention_parameters + 8 * 64) + 2 * 100 * 64
    assert part.weight_bytes == 2 * (own + 3 * 4 * MODEL.expert_parameters)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"shared_experts": ["x0"]}, "simulate.shared_experts must name two instances or more"),
        ({"shared_experts": ["x0", "x0"]}, "must name two instances or more, each once"),
        ({"shared_experts": ["x", "y"]}, "simulate.shared_experts: no instance 'y': known: x0, x1"),
        ({"tables": None}, "simulate.shared_experts needs tables with times of experts"),
        ({}, "tp1/moe.csv: No such file"),
    ],
)
def test_what_cannot_be_shared_is_one_line(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    from jaxinfer.simulate.run import prepare

    with pytest.raises(JaxinferError) as error:
        prepare(run_file(profile(tmp_path / "t", None), **changes))
    assert message in str(error.value)
    assert "\n" not in str(error.value)
