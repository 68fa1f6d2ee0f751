"""Tensor parallelism on CPU devices: the same tokens, a share of everything per device."""

import re
from pathlib import Path
from typing import Any

import jax
import pytest
from test_golden import OPTIONS, serve
from tiny_outputs import TINY, outputs

from jaxinfer import LLM, JaxinferError
from jaxinfer.checkpoints.checkpoint import open_checkpoint
from jaxinfer.config.cluster import one_engine
from jaxinfer.config.engine import EngineOptions
from jaxinfer.runtime.cluster import Cluster, load_cluster
from jaxinfer.steps.shapes import StepShape


def demo_engine(devices: int) -> Cluster:
    options = EngineOptions(
        dtype="float32",
        max_num_seqs=4,
        max_num_batched_tokens=64,
        max_model_len=512,
        page_size=16,
        num_pages=129,
        tensor_parallel_size=devices,
        strict_shapes=True,
    )
    checkpoint = open_checkpoint("smollm2-135m-instruct")
    return load_cluster(checkpoint, one_engine(options), lambda part, left: None)


@pytest.mark.slow
@pytest.mark.parametrize(
    "devices", [3, *(pytest.param(devices, marks=pytest.mark.long) for devices in (2, 4))]
)
def test_demo_model_gives_its_golden_tokens(golden: list[dict[str, Any]], devices: int) -> None:
    """Three KV heads: two and four devices pad them with zero groups."""
    loaded = demo_engine(devices)
    engine = loaded.engines["engine"]
    requests, _ = serve(engine, golden, OPTIONS)
    assert [r.output_token_ids for r in requests] == [c["output_ids"] for c in golden]

    groups = -(-3 // devices)
    kv = engine.worker.stages[0].kv[0]
    assert {s.data.shape for s in kv.keys.addressable_shards} == {(129, groups, 64, 16)}
    assert {s.data.shape for s in kv.values.addressable_shards} == {(129, groups, 16, 64)}
    attn = engine.worker.stages[0].parameters["layers"][0]["attn"]
    assert attn["q_DNH"].get_value().addressable_shards[0].data.shape == (576, 3 * groups, 64)
    assert attn["o_NHD"].get_value().addressable_shards[0].data.shape == (3 * groups, 64, 576)

    # Megatron's count: one all-reduce after attention and one after the MLP, in each layer.
    text = engine.worker.stages[0].step._executables[StepShape(4, 4, 0)].as_text()
    collectives = re.findall(r"= \S+ (all-\w+|reduce-scatter|collective-\w+)\(", text)
    assert collectives == ["all-reduce"] * 60


@pytest.mark.parametrize("devices", [2, 3, 4])
def test_tiny_model_draws_the_same_tokens(tiny: LLM, tiny_folder: Path, devices: int) -> None:
    """Greedy and sampled, with prefix cache, and the likeliest tokens in their order."""
    llm = LLM(str(tiny_folder), progress=False, tensor_parallel_size=devices, **TINY)
    expected = outputs(tiny)
    assert outputs(llm) == expected
    assert outputs(llm) == expected
    assert len(llm.engine.plan.devices) == devices


RULES = "from jaxinfer.models.layouts import Rule\nRULES = "


@pytest.mark.parametrize(
    "table",
    [
        "()",
        '(Rule("*embed_VD", {"D": "tp"}), Rule("*.mlp.*", {"F": "tp"}))',
        '[Rule("*_VD", {"V": "tp"}), Rule("*.q_DNH", {"D": "tp"})]',
    ],
)
def test_other_rules_change_no_token(
    tiny: LLM, tiny_folder: Path, tmp_path: Path, table: str
) -> None:
    (tmp_path / "rules.py").write_text(RULES + table)
    llm = LLM(
        str(tiny_folder),
        progress=False,
        tensor_parallel_size=2,
        layout=str(tmp_path / "rules.py"),
        **TINY,
    )
    assert outputs(llm) == outputs(tiny)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "rules.py: No such file or directory"),
        ("RULES = (", "rules.py: SyntaxError: '(' was never closed"),
        ("x = 1", "must define LAYOUT or RULES, and defines neither"),
        ("RULES = ['*']", "rules.py: '*' must be a jaxinfer.models.layouts.Rule"),
        ("LAYOUT = 3", 'layouts.Layout, such as Layout((Rule("*", {"N": "x"}),))'),
        ("RULES = {}", 'layouts.Rule, such as (Rule("*", {"N": "x"}),)'),
        ("raise ValueError('a\\nb')", "rules.py: ValueError: a b ("),
        ("raise SystemExit(2)", "rules.py: SystemExit: 2"),
        (
            RULES + '(Rule("*", {"D": "dp"}),)',
            "D of rule '*' lies on mesh axis 'dp', there is ['tp']",
        ),
        (RULES + '(Rule("*.q_DNH", {"D": "tp", "N": "tp"}),)', "two axes of layers.0.attn.q_DNH"),
        (
            RULES + '(Rule("head_VD", {"V": "tp"}),)',
            "axis V of head_VD is 260 long, 3 pieces do not divide it",
        ),
    ],
)
def test_bad_rules(tiny_folder: Path, tmp_path: Path, text: str | None, message: str) -> None:
    if text is not None:
        (tmp_path / "rules.py").write_text(text)
    with pytest.raises(JaxinferError) as caught:
        LLM(
            str(tiny_folder),
            progress=False,
            tensor_parallel_size=3,
            layout=str(tmp_path / "rules.py"),
            **TINY,
        )
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_more_devices_than_there_are(tiny_folder: Path) -> None:
    there = len(jax.devices())
    with pytest.raises(JaxinferError, match=f"asks for 99 devices, there are {there} cpu"):
        LLM(str(tiny_folder), progress=False, tensor_parallel_size=99, **TINY)
