"""Profiles: the fits against known coefficients, and what emulation makes of them."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from checkpoint_files import plan_alone
from failure_cases import INSTANCE, PARAMS, PROMPTS, tokens
from hypothesis import given
from hypothesis import strategies as st
from properties import examples

from jaxinfer import LLM, JaxinferError
from jaxinfer.checkpoints.checkpoint import open_checkpoint
from jaxinfer.config.cluster import ClusterConfig, InstanceConfig, LinkConfig
from jaxinfer.config.engine import EngineOptions
from jaxinfer.config.groups import Emulate, GroupConfig
from jaxinfer.config.run_file import RunFile
from jaxinfer.config.stages import StageConfig
from jaxinfer.models.config import ModelConfig
from jaxinfer.report.records import read_run
from jaxinfer.runtime.cluster import Engine
from jaxinfer.runtime.profiling import profile as profiles
from jaxinfer.runtime.profiling.profile import Grid, profile_engines
from jaxinfer.runtime.stage.cluster_plan import _check_links
from jaxinfer.serving.kv_shards import KVShards
from jaxinfer.serving.page_pool import PagePool, Shard
from jaxinfer.steps import profile as stored
from jaxinfer.steps.profile import Profile, load_profile, store_profile
from jaxinfer.steps.shapes import StepLimits
from jaxinfer.steps.times import StepPoint, StepTimes, features, shape_of

LIMITS = StepLimits(max_num_seqs=8, max_num_batched_tokens=64, max_pages=64, page_size=8)


def test_features_count_what_attention_computes() -> None:
    parts = [(9, 1), (0, 1), (5, 3)]
    one, pairs, entries = features(parts)
    assert one == 1
    assert entries == 10 + 1
    assert pairs == sum(5 + i for i in (1, 2, 3))


def test_step_times_find_known_coefficients() -> None:
    rng = np.random.default_rng(0)
    known = {(8, 8, 0): (0.01, 0.0, 2e-6), (8, 64, 8): (0.05, 3e-6, 1e-6)}
    points = []
    for _ in range(40):
        decodes = [(int(rng.integers(0, 400)), 1) for _ in range(int(rng.integers(3, 8)))]
        for chunk in ([], [(int(rng.integers(0, 300)), int(rng.integers(20, 50)))]):
            parts = (*decodes, *chunk)
            weights = known[tuple(shape_of(LIMITS, parts))]
            points.append(StepPoint(parts, (0.0, float(np.dot(weights, features(parts))))))
    times = StepTimes.fit(LIMITS, points, stage=1)
    for shape, weights in known.items():
        found = next(c for s, c in times.coefficients.items() if tuple(s) == shape)
        assert found == pytest.approx(weights, rel=1e-6, abs=1e-12)


def test_no_step_takes_less_time_for_more_work() -> None:
    points = [StepPoint(((start, 32),), (0.1 - start * 1e-4,)) for start in (0, 50, 100)]
    times = StepTimes.fit(LIMITS, points, 0)
    ((constant, *slopes),) = times.coefficients.values()
    assert slopes == [0, 0]
    assert constant == pytest.approx(0.095)


def test_fits_find_the_coefficients_of_eqs_2_and_3() -> None:
    prefills = [(n, (2e-3 * n + 0.1, 1e-3 * n)) for n in (10, 50, 80)]
    mixed = [(p, d, (1e-5 * p + 0.2, 3e-6 * d)) for p in (0, 100, 300) for d in (0, 500)]
    found = Profile({}, prefills, mixed, [StepPoint(((0, 1),), (0.0, 0.0))])
    fit = found.fit([1.0, 4.0])
    assert (fit.prefill.per_token, fit.prefill.constant) == pytest.approx((6e-3, 0.1))
    assert fit.mixed.seconds(200, 1000) == pytest.approx(2e-3 + 0.2 + 4 * 3e-3)
    for quality in found.quality():
        assert quality.r2 == pytest.approx(1)
        assert quality.mape == pytest.approx(0, abs=1e-9)


def test_the_fit_is_of_relative_errors() -> None:
    """Points (1, 1), (2, 2), (4, 5)."""
    prefills = [(1, (1.0,)), (2, (2.0,)), (4, (5.0,))]
    found = Profile({}, prefills, [(0, 0, (1.0,))], [StepPoint(((0, 1),), (1.0,))])
    fit = found.fit([1.0]).prefill
    # Minimises the sum of (1 - (a n + b) / t)^2: the normal equations, by hand.
    for derivative in (lambda n: n, lambda n: 1):
        slope = sum((1 - fit.seconds(n) / t[0]) * derivative(n) / t[0] for n, t in prefills)
        assert slope == pytest.approx(0, abs=1e-12)
    prefill, _ = found.quality()
    errors = [abs(fit.seconds(n) / t[0] - 1) for n, t in prefills]
    assert prefill.mape == pytest.approx(sum(errors) / 3)
    squares = sum((fit.seconds(n) - t[0]) ** 2 for n, t in prefills)
    assert prefill.r2 == pytest.approx(1 - squares / (26 / 3))


@pytest.fixture(scope="module")
def profile(tiny: LLM) -> Profile:
    left: dict[str, list[int]] = {}
    engines = {"x": (tiny.engine, "tiny")}
    (found,) = profile_engines(
        engines, lambda part, n: left.setdefault(part, []).append(n)
    ).values()
    grid = Grid.of(tiny.engine)
    shapes, steps = (list(range(n, -1, -1)) for n in (len(grid.by_shape), 3 * len(grid.steps)))
    assert list(left.values()) == [shapes, steps]
    tiny.reset_prefix_cache()  # Its pages have been written to.
    return found


def test_a_profile_covers_every_shape_and_keeps(
    tiny: LLM, profile: Profile, tmp_path: Path
) -> None:
    limits = tiny.engine.plan.limits
    assert {shape_of(limits, p.parts) for p in profile.points} == set(limits.shapes())
    assert all(seconds > 0 for p in profile.points for seconds in p.stages)
    grid = Grid.of(tiny.engine)
    for length, stages in profile.prefills:
        chunks = [next(p for p in profile.points if p.parts == (c,)) for c in grid.prefill(length)]
        assert stages == pytest.approx((sum(p.seconds for p in chunks),))
        assert sum(count for _, count in grid.prefill(length)) == length
    assert load_profile(profile.key, tmp_path) is None
    store_profile(profile, tmp_path)
    assert load_profile(profile.key, tmp_path) == profile
    assert load_profile(profile.key | {"chunk_tokens": 7}, tmp_path) is None


def key_of(config: ModelConfig, **options: Any) -> dict[str, Any]:
    plan = plan_alone(config, EngineOptions.model_validate(INSTANCE | options))
    nothing: Any = None
    return profiles.profile_key(Engine("x", nothing, [plan], ["g"]), "the same name")


def test_a_profile_is_of_one_configuration(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Changes behind a model's name, or of what compiles it, make another profile."""
    rules = tmp_path / "rules.py"
    rules.write_text("RULES = ()")
    config = open_checkpoint(str(tiny_folder)).config
    keys = [
        key_of(config),
        *(
            key_of(replace(config, **{name: getattr(config, name) + 8}))
            for name in ("intermediate_size", "vocab_size", "max_position_embeddings")
        ),
        key_of(replace(config, windows=(8, None))),
        key_of(config, dtype="bfloat16"),
        key_of(config, kv_cache_dtype="int8"),
        key_of(config, kernels="interpret", page_size=16),
        key_of(config, page_size=16),
        key_of(config, num_pages=60),
        key_of(config, max_num_seqs=2),
        key_of(config, max_num_batched_tokens=40),
        key_of(config, max_num_batched_tokens=40, token_buckets=[10, 40]),
        key_of(config, max_model_len=100),
        key_of(config, tensor_parallel_size=2),
        key_of(config, layout=str(rules)),
        key_of(config, layout="context_parallel"),
    ]
    rules.write_text("from jaxinfer.models.layouts import Rule\nRULES = [Rule('*', {'F': 'tp'})]")
    keys.append(key_of(config, layout=str(rules)))
    monkeypatch.setenv("XLA_FLAGS", "--xla_backend_optimization_level=1")
    keys.append(key_of(config))
    for name, other in (("cpu_name", "another CPU"), ("_code", "edited")):
        monkeypatch.setattr(profiles, name, lambda other=other: other)
        keys.append(key_of(config))
    assert len({store_profile(Profile(key, [], [], []), tmp_path) for key in keys}) == len(keys)
    assert key_of(config) == keys[-1]


def test_an_edit_of_what_makes_steps_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profiles, "PACKAGE", tmp_path)
    (tmp_path / "runtime").mkdir()
    code = profiles._code.__wrapped__  # Not what it has found before.
    digests = [code()]
    for name, text in (("a.py", "1"), ("a.py", "2"), ("notes.txt", "3"), ("b.py", "")):
        (tmp_path / "runtime" / name).write_text(text)
        digests.append(code())
    assert digests[2] == digests[3]
    assert len(set(digests)) == 4


@examples(300)
@given(st.data())
def test_whatever_fits_in_a_step_has_been_measured(data: st.DataObject) -> None:
    draw = lambda low, high: data.draw(st.integers(low, high))  # noqa: E731
    page_size, seqs = 2 ** draw(0, 4), draw(1, 8)
    budget, longest = draw(max(seqs, 2), 300), draw(8, 200)
    limits = StepLimits(seqs, budget, -(-longest // page_size), page_size)
    fewest = -(-longest // page_size)
    pages = draw(fewest, fewest + 40)
    kv = KVShards([Shard(PagePool(pages + 1, page_size), (0,))])
    engine: Any = SimpleNamespace(
        plan=SimpleNamespace(limits=limits, max_model_len=longest), new_kv=lambda: kv
    )
    measured = Grid.of(engine).steps
    for parts in measured:
        assert sum(kv.pages_for(start + count) for start, count in parts) <= pages
    shapes = {shape_of(limits, parts) for parts in measured}
    tokens, free, parts = budget, pages, []
    for _ in range(draw(1, seqs)):  # A step of prompts' chunks and of decodes.
        most = min(tokens, longest - 1, free * page_size)
        if most < 1:
            break
        parts.append((0, draw(1, most)))
        tokens -= parts[-1][1]
        free -= kv.pages_for(parts[-1][1])
    assert shape_of(limits, parts) in shapes


def cluster(folder: Path, slowdown: float, **more: Any) -> LLM:
    config = RunFile(
        model=str(folder),
        groups={"a": GroupConfig(emulate=Emulate(slowdown=slowdown)), "b": GroupConfig()},
        instances={n: InstanceConfig(group=n, **INSTANCE) for n in "ab"},
        system={"name": "cronus", "partial": "a", "chunked": "b"},
        **more,
    )
    return LLM.from_config(config, progress=False)


@pytest.fixture
def own_profiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(stored, "FOLDER", tmp_path / "profiles")
    return tmp_path / "profiles"


def test_an_emulated_step_ends_when_the_slower_device_would_have(
    tiny_folder: Path, tiny: LLM, tmp_path: Path, own_profiles: Path
) -> None:
    llm = cluster(tiny_folder, 50.0)
    assert len(list(own_profiles.iterdir())) == 1  # The groups are alike.
    expected = tokens(tiny.generate(PROMPTS, PARAMS, progress=False))
    outputs = llm.generate(PROMPTS, PARAMS, progress=False, run_dir=tmp_path / "run")
    assert tokens(outputs) == expected
    run = read_run(tmp_path / "run" / "1")
    assert run.emulated == ("group a 50 times slower",)
    emulate = llm.cluster.engines["a"].worker.stages[0].emulate
    assert emulate is not None
    assert llm.cluster.engines["b"].worker.stages[0].emulate is None
    # The Balancer goes by the slower device: eq. 2 is 50 times the measured line.
    measured = load_profile(profiles.profile_key(llm.cluster.engines["a"], str(tiny_folder)))
    assert measured is not None
    assert llm._runs.fits["a"].prefill.per_token == pytest.approx(
        50 * measured.fit([1.0]).prefill.per_token
    )
    cuts = run.run["system_report"]["cuts"]
    assert set(cuts) == {r.id for r in run.requests}
    by_id = {r.id: r for r in run.requests}
    for name, cut in cuts.items():
        assert cut["length"] == by_id[name].cut
        assert cut["expected_prefill"] == pytest.approx(
            llm._runs.fits["a"].prefill.seconds(cut["length"])
        )


def test_profiles_are_found_again(
    tiny_folder: Path, own_profiles: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster(tiny_folder, 2.0)
    before = {path: json.loads(path.read_text()) for path in own_profiles.iterdir()}
    monkeypatch.setattr(profiles, "measure_steps", None)
    cluster(tiny_folder, 3.0)
    assert {path: json.loads(path.read_text()) for path in own_profiles.iterdir()} == before


def test_an_emulated_link_holds_data_back(
    tiny_folder: Path, tmp_path: Path, own_profiles: Path
) -> None:
    link = LinkConfig(between=("a", "b"), gb_s=1e-3, latency_s=0.02)
    llm = cluster(tiny_folder, 1.0, links=(link,))
    llm.generate(PROMPTS, PARAMS, progress=False, run_dir=tmp_path / "run")
    run = read_run(tmp_path / "run" / "1")
    assert run.transfers
    for transfer in run.transfers:
        assert transfer.end - transfer.start >= 0.02 + transfer.num_bytes / 1e6 - 1e-6
    assert "link a - b of 0.001 GB/s, 0.02 s" in run.emulated


def test_an_emulated_link_holds_hidden_states_back(
    tiny_folder: Path, tmp_path: Path, own_profiles: Path
) -> None:
    """Also where the stage behind it is as fast as it is."""
    config = RunFile(
        model=str(tiny_folder),
        groups={"a": GroupConfig(), "b": GroupConfig()},
        instances={
            "x": InstanceConfig(
                stages=(StageConfig(group="a", layers=1), StageConfig(group="b", layers=1)),
                **INSTANCE,
            )
        },
        links=(LinkConfig(between=("a", "b"), gb_s=1, latency_s=0.05),),
    )
    llm = LLM.from_config(config, progress=False)
    llm.generate(PROMPTS[:1], PARAMS, progress=False, run_dir=tmp_path)
    steps = [json.loads(line) for line in (tmp_path / "1" / "steps.jsonl").open()]
    assert steps
    for step in steps:
        (_, first), (second, end) = step["stages"]
        assert second >= first + 0.05 - 1e-6
        assert end >= second


def test_a_link_of_a_gpu_is_not_emulated(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = SimpleNamespace(platform="gpu")
    opened = {"a": [gpu], "b": [gpu]}
    monkeypatch.setattr(
        "jaxinfer.runtime.stage.cluster_plan.open_groups", lambda groups, share: opened
    )
    link = LinkConfig(between=("a", "b"), gb_s=1)
    with pytest.raises(JaxinferError, match="links: a - b is emulated, between CPUs and groups wi"):
        cluster(tiny_folder, 1.0, links=(link,))


def test_a_link_of_gpus_that_play_others_is_emulated() -> None:
    gpus: Any = {"a": [SimpleNamespace(platform="gpu")], "b": [SimpleNamespace(platform="gpu")]}
    groups: dict[str, Any] = {name: {"emulate": {"slowdown": 2}} for name in "ab"}
    instances = {name: {"group": name} for name in "ab"}
    links = [{"between": ["a", "b"], "gb_s": 1}]

    def check() -> None:
        sections = {"groups": groups, "instances": instances, "links": links}
        _check_links(ClusterConfig.model_validate(sections), gpus)

    check()
    groups["b"] = {}
    with pytest.raises(JaxinferError, match=r"links: a - b is emulated, .*, and b is a GPU: leave"):
        check()
