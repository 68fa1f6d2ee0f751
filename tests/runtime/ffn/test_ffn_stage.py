"""Stages whose FFN is on another group: logits of every architecture, and tokens of whole runs."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from cluster_cases import Loader, load, roomy
from cluster_checks import Done, Ran, serve
from ffn_cases import parts_of_steps, sections
from flax import nnx

from jaxinfer.checkpoints.checkpoint import open_checkpoint
from jaxinfer.config.cluster import ClusterConfig, InstanceConfig
from jaxinfer.config.groups import GroupConfig
from jaxinfer.errors import JaxinferError
from jaxinfer.runtime.explain import StepCost
from jaxinfer.runtime.ffn.ffn_stage import FfnStage
from jaxinfer.runtime.ffn.ffn_step import FfnStep
from jaxinfer.runtime.layout_table import plan_figures, plan_tables
from jaxinfer.runtime.stage.cluster_plan import plan_cluster
from jaxinfer.runtime.stage.load_weights import load_parameters
from jaxinfer.runtime.stage.parts import PartInputs
from jaxinfer.runtime.stage.sampler import PLAIN_SAMPLER
from jaxinfer.runtime.stage.stage import Stage
from jaxinfer.runtime.stage.step import Key
from jaxinfer.serving.batch import Batch, Row
from jaxinfer.serving.features.half_batches import in_parts
from jaxinfer.serving.kv_shards import KVShards
from jaxinfer.serving.page_pool import PagePool, Shard
from jaxinfer.serving.request_state import RequestState

DATA = Path(__file__).parents[2] / "data" / "architectures"
FEW = ("llama", "qwen3", "mixtral", "gemma3")
OTHERS = sorted({folder.name for folder in DATA.iterdir() if folder.is_dir()} - {*FEW, "opt"})
# Chunks, and a decode. No edge but the last is one of pages.
PIECES = [33, 2, 1, 39]


class Apart:
    """A stage with its FFN on another group; without devices for it, an ordinary stage."""

    def __init__(self, name: str, attention: int = 1, ffn: int = 1, **options: Any) -> None:
        checkpoint = open_checkpoint(str(DATA / name))
        config = ClusterConfig(
            groups={"p": GroupConfig(devices=attention)}
            | ({"f": GroupConfig(devices=ffn)} if ffn else {}),
            instances={
                "x": InstanceConfig(
                    stages=[{"group": "p"} | ({"ffn": "f"} if ffn else {})],
                    page_size=5,
                    num_pages=60,
                    max_model_len=100,
                    max_num_seqs=4,
                    max_num_batched_tokens=64,
                    **{"dtype": "float32"} | options,
                )
            },
        )
        ((self.plan,),) = plan_cluster(checkpoint.config, config).values()
        plans = [self.plan, *filter(None, [self.plan.ffn])]
        self.parameters = load_parameters(checkpoint, plans)
        self.stage = (FfnStage if ffn else Stage)(self.plan, *self.parameters)
        self.kv = KVShards([Shard(PagePool(self.plan.num_pages, 5))])

    def row(self, name: str, tokens: np.ndarray, start: int, stop: int) -> Row:
        request = RequestState(name, len(tokens), 9, prompt_token_ids=tokens.tolist())
        hold = self.kv.reserve(len(tokens))
        assert hold
        if start:
            self.step(Batch("x", [Row(request, 0, start, False, False, 0, hold)], 0, 1, 0))
        return Row(request, start, stop - start, False, False, 0, hold)

    def step(self, batch: Batch) -> np.ndarray:
        """Logits of the step's tokens."""
        key = Key(self.stage.step.limits.shape_for(batch), PLAIN_SAMPLER)
        inputs = self.stage.inputs(batch, key.shape, {}, 0)
        assert isinstance(inputs, PartInputs) == bool(batch.halves)
        _, x_TD = self.stage.forward(key, inputs, None)
        with jax.default_matmul_precision("highest"):
            model: Any = nnx.merge(self.plan.graphdef, self.parameters[0])
            return np.asarray(model.logits(x_TD))[: batch.work.tokens]

    def serve(self, tokens: np.ndarray) -> np.ndarray:
        """Logits of all tokens, in pieces."""
        request = RequestState("r", len(tokens), 9, prompt_token_ids=tokens.tolist())
        hold = self.kv.reserve(len(tokens))
        assert hold
        found = []
        for start, stop in pairwise(np.cumsum([0, *PIECES]).tolist()):
            row = Row(request, start, stop - start, False, False, 0, hold)
            found.append(self.step(Batch("x", [row], 0, 1, 0)))
        return np.concatenate(found)


def expected_of(name: str) -> tuple[np.ndarray, np.ndarray]:
    with np.load(DATA / name / "expected.npz") as arrays:
        return arrays["tokens"], arrays["logits"]


@pytest.mark.parametrize(
    ("name", "attention", "ffn"),
    [
        ("llama", 1, 1),
        ("mixtral", 1, 2),
        pytest.param("qwen3", 2, 1, marks=pytest.mark.slow),
        pytest.param("gemma3", 1, 1, marks=pytest.mark.slow),
        *(pytest.param(name, 1, 1, marks=pytest.mark.long) for name in OTHERS),
    ],
)
def test_logits_of_every_architecture(name: str, attention: int, ffn: int) -> None:
    tokens, logits = expected_of(name)
    found = Apart(name, attention, ffn).serve(tokens)
    np.testing.assert_allclose(found, logits, atol=1e-4, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("dtypes", [{"weight_dtype": "int8"}, {"kv_cache_dtype": "int8"}], ids=str)
def test_formats_of_8_bits_give_the_logits_of_an_ordinary_stage(dtypes: dict[str, str]) -> None:
    tokens, exact = expected_of("llama")
    found, ordinary = (Apart("llama", ffn=ffn, **dtypes).serve(tokens) for ffn in (1, 0))
    np.testing.assert_allclose(found, ordinary, atol=1e-4, rtol=0)
    assert np.abs(ordinary - exact).max() > 1e-2


def test_logits_of_micro_batches() -> None:
    """Two decodes and a chunk of requests with the same tokens, in one to three parts."""
    tokens, logits = expected_of("llama")
    model = Apart("llama", micro_batches=3)
    places = [("r", 40, 41), ("s", 35, 36), ("t", 0, 20)]
    for count in (1, 2, 3):
        rows = [model.row(*place[:1], tokens, *place[1:]) for place in places]
        batch = Batch("x", rows, 0, 3, 0)
        in_parts(batch, count)
        assert len(batch.halves) == (count if count > 1 else 0)
        found = model.step(batch)
        np.testing.assert_allclose(found[:2], logits[[40, 35]], atol=1e-4, rtol=0)
        np.testing.assert_allclose(found[2:], logits[:20], atol=1e-4, rtol=0)
        for row in rows:
            row.hold.release()


def test_each_group_has_its_part_of_the_weights_and_one_has_kv() -> None:
    """Bytes by hand: the FFN's three matrices of a layer are on two devices of ``f``."""
    model = Apart("llama", ffn=2)
    config, ffn = model.plan.config, model.plan.ffn
    assert ffn
    D, F, L = config.hidden_size, config.intermediate_size, config.num_hidden_layers
    sizes = ffn.parameters
    assert {path.split(".")[2] for path in sizes} == {"mlp"}
    assert len(sizes) == 3 * L
    padded = ffn.config.intermediate_size
    assert padded >= F
    assert sum(np.prod(leaf.shape) for leaf in sizes.values()) == 3 * L * D * padded
    assert not any(".mlp." in path for path in model.plan.parameters)
    assert (ffn.kv_bytes, ffn.num_pages) == (0, 0)
    assert set(ffn.devices).isdisjoint(model.plan.devices)
    held = {
        shard.device
        for leaf in jax.tree.leaves(model.stage.ffn)
        for shard in leaf.addressable_shards
    }
    assert held == {*ffn.devices}


def test_explain_tells_of_both_groups() -> None:
    """Programs of a step: attention and FFN of each layer, the end, and the head."""
    plan = Apart("llama").plan
    assert plan.ffn
    layers = plan.config.num_hidden_layers
    step = FfnStep(plan)
    assert len(step.compile_parts(Key(plan.limits.shapes()[-1], PLAIN_SAMPLER))) == 2 * layers + 2
    cost = StepCost(plan.limits.shapes()[0], 0, {}, 0.0)
    sizes = [np.prod(leaf.shape) * 4 for leaf in plan.ffn.parameters.values()]
    figures = plan_figures(plan, [cost])
    assert figures["ffn_weight_bytes_per_device"] == sum(sizes)
    _, memory, _ = plan_tables(plan, [cost])
    assert "FFN of the layers, 1 x cpu" in list(memory.columns[0].cells)


@pytest.mark.parametrize(
    ("heads", "attention", "ffn", "micro_batches"),
    [
        ("two", 1, 1, 2),
        pytest.param("two", 1, 1, 1, marks=pytest.mark.long),
        pytest.param("three", 2, 1, 4, marks=pytest.mark.slow),
        pytest.param("two", 1, 2, 4, marks=pytest.mark.long),
    ],
)
def test_runs_give_the_tokens_of_one_device(
    loader: Loader,
    expected: dict[str, list[Done]],
    tmp_path: Path,
    heads: str,
    attention: int,
    ffn: int,
    micro_batches: int,
) -> None:
    """Prompts in chunks beside decodes, greedy and drawn, with a prefix cache."""
    llm = loader.load(heads, **sections(ffn, attention, micro_batches=micro_batches))
    assert serve(llm, run_dir=tmp_path) == expected[heads]
    found = Ran.last(tmp_path)
    assert found.metrics["late_compiles"] == 0
    (stage,) = found.record.run["instances"]["x"]["stages"]
    assert (stage["ffn"]["group"], len(stage["ffn"]["devices"])) == ("f", ffn)
    steps = parts_of_steps(tmp_path / "1")
    assert all(parts == min(micro_batches, rows) for rows, parts in steps)
    assert max(parts for _, parts in steps) == micro_batches


@pytest.mark.slow
@pytest.mark.parametrize("micro_batches", [2, 4])
def test_two_stages_each_with_an_ffn_group(
    loader: Loader, expected: dict[str, list[Done]], tmp_path: Path, micro_batches: int
) -> None:
    given = sections(micro_batches=micro_batches)
    given["groups"] = {name: {} for name in "pqfg"}
    given["instances"]["x"]["stages"] = [
        {"group": "p", "layers": 3, "ffn": "f"},
        {"group": "q", "layers": 1, "ffn": "g"},
    ]
    given["system"] = "pipeline_parallel"
    assert serve(loader.load("three", **given), run_dir=tmp_path) == expected["three"]


@pytest.mark.slow
def test_decodes_of_prompts_that_another_instance_computed(
    loader: Loader, expected: dict[str, list[Done]], tmp_path: Path
) -> None:
    """KV goes to the attention side alone."""
    given = sections(micro_batches=2)
    given["groups"]["d"] = {}
    given["instances"]["y"] = {"group": "d"} | roomy(16)
    given["system"] = {"name": "disaggregated", "prefill": "y", "decode": "x"}
    assert serve(loader.load("two", **given), run_dir=tmp_path) == expected["two"]
    assert Ran.last(tmp_path).decoded("y") == 0


@pytest.mark.gpu
@pytest.mark.skipif(jax.default_backend() != "gpu", reason="without one: the tests above")
@pytest.mark.parametrize("platforms", [("gpu", "cpu"), ("cpu", "gpu")])
def test_a_gpu_and_a_cpu_share_the_layers(loader: Loader, platforms: tuple[str, str]) -> None:
    """Tokens are those of the CPU alone."""
    one = {"group": "p", "dtype": "float32"} | roomy(16)
    alone = {"groups": {"p": {"platform": "cpu"}}, "instances": {"x": one}, "system": "single"}
    expected = serve(loader.load("two", **alone))
    given = sections(micro_batches=2, dtype="float32")
    given["groups"] = {name: {"platform": kind} for name, kind in zip("pf", platforms, strict=True)}
    assert serve(loader.load("two", **given)) == expected


def test_opt_is_refused_by_name() -> None:
    with pytest.raises(JaxinferError, match=r"ffn: f: the layers of OPTForCausalLM are not"):
        Apart("opt")


def test_an_emulated_link_is_refused(tiny_folder: Path, tmp_path: Path) -> None:
    links = [{"between": ["p", "f"], "gb_s": 1}]
    message = r"links: p - f would have to be emulated layer by layer, f has the FFN of p"
    with pytest.raises(JaxinferError, match=message):
        load(tiny_folder, tmp_path, **sections() | {"links": links})
