"""Layouts in the engine: the tokens of one device, alone and over hand-offs."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from cluster_checks import Ran
from tiny_model import write_tiny_mixture, write_tiny_model

from jaxinfer import LLM, JaxinferError, SamplingParams
from jaxinfer.config.cluster import InstanceConfig
from jaxinfer.config.run_file import as_run_file
from jaxinfer.models.layouts import LAYOUTS
from jaxinfer.runtime.stage.stage_plan import StagePlan

OPTIONS: dict[str, Any] = {
    "page_size": 8,
    "num_pages": 33,
    "max_num_seqs": 3,
    "max_num_batched_tokens": 16,
    "strict_shapes": True,
}
PROMPTS = [
    {"prompt_token_ids": tokens} for tokens in ([5, 7, 9, 11, 13], [*range(3, 33)], [40, 41])
]
PARAMS = [SamplingParams(temperature=t, seed=3, max_tokens=6, ignore_eos=True) for t in (0, 1.0, 0)]
MESHES = ({"x": 1, "y": 8}, {"x": 2, "y": 4})

Tokens = list[list[int]]


def load(model: str, groups: dict[str, Any], layouts: dict[str, str], **more: Any) -> LLM:
    """An instance on each group, with the layout of its name."""
    instances = {name: {"group": name, "layout": layouts[name]} | OPTIONS for name in groups}
    sections = {"model": model, "groups": groups, "instances": instances}
    return LLM.from_config(as_run_file(sections | more), progress=False)


def tokens(llm: LLM, run_dir: str | None = None) -> Tokens:
    done = llm.generate(PROMPTS, PARAMS, progress=False, run_dir=run_dir)
    return [answer.outputs[0].token_ids for answer in done]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    dense, mixture = (tmp_path_factory.mktemp(name) for name in ("dense", "mixture"))
    return {"dense": str(write_tiny_model(dense)), "mixture": str(write_tiny_mixture(mixture))}


@pytest.fixture(scope="module")
def expected(models: dict[str, str]) -> Callable[[str], Tokens]:
    """The tokens of one device, by plain JAX: on meshes, numba attends."""
    plain = {"engine": {"kernels": "plain"}}
    return cache(lambda name: tokens(load(models[name], {"g": {}}, {"g": "megatron"}, **plain)))


# Of the others, half a minute of compilation.
FEW = ("megatron", "expert_parallel", "expert_all_to_all")


@pytest.mark.parametrize(
    ("name", "mesh", "layout"),
    [
        pytest.param(
            name,
            mesh,
            layout,
            marks=[]
            if mesh is MESHES[1] and (name == "dense" or layout in FEW)
            else pytest.mark.slow,
            id=f"{layout}-{'x'.join(map(str, mesh.values()))}-{name}",
        )
        for layout in LAYOUTS
        for mesh in MESHES
        for name in ("dense", "mixture")
    ],
)
def test_every_layout_gives_the_tokens_of_one_device(
    name: str,
    mesh: dict[str, int],
    layout: str,
    models: dict[str, str],
    expected: Callable[[str], Tokens],
) -> None:
    llm = load(models[name], {"g": {"devices": 8, "mesh": mesh}}, {"g": layout})
    assert tokens(llm) == expected(name)
    assert set(expected(name)[0]) != {expected(name)[0][0]}, "a model that says one word"


@pytest.mark.parametrize(
    ("name", "prefill", "decode"),
    [
        ("dense", "weight_gathered", "attention_dp"),
        ("dense", "context_parallel", "weight_stationary_2d"),
        ("dense", "attention_dp", "sequence_parallel"),
        ("mixture", "fsdp", "expert_parallel"),
        pytest.param("mixture", "expert_all_to_all", "fsdp", marks=pytest.mark.slow),
        ("mixture", "megatron", "context_parallel"),
    ],
)
def test_hand_offs_between_layouts(
    name: str,
    prefill: str,
    decode: str,
    models: dict[str, str],
    expected: Callable[[str], Tokens],
    tmp_path: Path,
) -> None:
    """KV goes from heads over one mesh to heads over another, or to whole pages."""
    groups = {
        "p": {"devices": 4, "mesh": {"x": 2, "y": 2}},
        "d": {"devices": 4, "mesh": {"a": 4, "b": 1}},
    }
    system = {"name": "disaggregated", "prefill": "p", "decode": "d"}
    llm = load(
        models[name], groups, {"p": prefill, "d": decode}, system=system, verify_transfers=True
    )
    assert tokens(llm, str(tmp_path)) == expected(name)
    ran = Ran.last(tmp_path)
    assert [ran.moved(number) for number in range(3)] == [[5], [30], [2]]
    assert (ran.prefilled("d"), ran.decoded("p")) == (0, 0)


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["host", "transfer_server"])
def test_hand_offs_between_processes(
    transport: str, models: dict[str, str], expected: Callable[[str], Tokens]
) -> None:
    """Plans and slabs go by messages; four pieces of KV on one side, two on the other."""
    groups = {
        "p": {"devices": 4, "mesh": {"x": 2, "y": 2}, "process": "own"},
        "d": {"devices": 2, "mesh": {"a": 1, "b": 2}},
    }
    system = {"name": "disaggregated", "prefill": "p", "decode": "d"}
    layouts = {"p": "weight_gathered", "d": "weight_stationary_2d"}
    llm = load(
        models["dense"], groups, layouts, system=system, verify_transfers=True, transport=transport
    )
    assert tokens(llm) == expected("dense")


@pytest.mark.parametrize(
    ("group", "options", "message"),
    [
        (
            {"devices": 4, "mesh": {"x": 2, "y": 4}},
            {},
            "groups.g.mesh is {'x': 2, 'y': 4}, 8 devices, must be of the 4 of a stage",
        ),
        (
            {"devices": 8, "tensor_parallel_size": 2, "mesh": {"x": 8}},
            {},
            "groups.g.mesh is {'x': 8}, 8 devices, must be of the 2 of a stage",
        ),
        ({"devices": 2, "mesh": {"x": 0}}, {}, "groups.g.mesh.x is 0, must be"),
        ({}, {"layout": "megatrom"}, "layout megatrom: did you mean 'megatron'?"),
        (
            {},
            {"layout": {"prefill": "fsdp", "decode": "megatron"}},
            "instances.g.layout: must be one name or file, not {'prefill': 'fsdp', 'decode': "
            "'megatron'}: prefill and decode with layouts of their own are two instances",
        ),
        (
            {},
            {"sharding": "a.py", "layout": "fsdp"},
            "instances.g.sharding: layout is its name now, and is given, too; remove one",
        ),
        (
            {"devices": 8},
            {"layout": "attention_dp", "token_buckets": [10, 16]},
            "layout attention_dp: axis T of token_buckets is 10 long, 8 pieces do not divide it",
        ),
    ],
)
def test_bad_sections(
    group: dict[str, Any], options: dict[str, Any], message: str, models: dict[str, str]
) -> None:
    instance = {"group": "g"} | OPTIONS | options
    sections = {"model": models["dense"], "groups": {"g": group}, "instances": {"g": instance}}
    with pytest.raises(JaxinferError) as caught:
        LLM.from_config(as_run_file(sections), progress=False)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


HEAD = "from jaxinfer.models.layouts import ALL, LAYOUTS, Layout, Rule\nLAYOUT = "


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('Layout((Rule("*", {"F": "z"}),))', "F of rule '*' lies on mesh axis 'z', there is"),
        ('Layout((), {"ffn": {"F": ("x", "q")}})', "F of ffn lies on mesh axis 'q', there is"),
        ('Layout((), kv={"K": "q"})', "K of KV pages lies on mesh axis 'q', there is ['x', 'y']"),
        ('Layout((), gathered="q")', "gathered lies on mesh axis 'q', there is ['x', 'y']"),
        ('Layout((), {"ffn": {"T": "x", "F": ALL}})', "T and F of ffn lie on mesh axis 'x'"),
        ('Layout((Rule("*", {"D": ALL, "F": "x"}),))', "lie on mesh axis 'x'"),
        ('Layout((), {"residual": {"D": ("y", "x", "x")}})', "D and D of residual lie on mesh"),
        ('Layout((), {"logits": {"V": ALL}})', "axis V of logits is 260 long, 8 pieces do not"),
        ('Layout((), {"logits": {"S": "x"}})', "axis S of logits is 3 long, 2 pieces do not"),
        ('Layout((), {"heads": {"N": "x"}}, kv={"K": "y"})', "N of heads lies on ['x'], K of KV p"),
        ('Layout((), {"heads": {"T": "y"}}, kv={"K": ALL})', "T of heads and K of KV pages lie on"),
        ('Layout((), {"residul": {"D": ALL}})', "no activation 'residul': did you mean 'residual'"),
        ('Layout((), {"ffn": {"D": ALL}})', "ffn has no axis 'D': known: TF"),
        ('Layout((), {"heads": {"H": ALL}})', "H of heads is cut, attention needs each head whole"),
        ('Layout((), kv={"P": ALL})', "KV pages has no axis 'P': known: KSC"),
        (
            'Layout((), kv={"C": ALL})',
            "C of KV pages: an engine's pages, and those of a simulation",
        ),
        (
            'Layout((), {"heads": {"T": ALL}}, kv={"S": ALL})',
            "by heads (K) alone, not by sequences",
        ),
        ('Layout((), {"ffn": {"F": 3}})', "F of ffn is 3, must be a mesh axis, a tuple of them"),
        ('Layout((), {"ffn": 3})', "ffn must be a table of axes, not 3"),
        ("Layout((3,))", "3 must be a jaxinfer.models.layouts.Rule"),
        ("Layout(3)", "parameters must be a tuple of jaxinfer.models.layouts.Rule, not 3"),
        ("Layout((), 3)", "activations must be a table"),
        ("Layout((), kv=3)", "KV pages must be a table of axes, not 3"),
        (
            'Layout((Rule("*", {"Q": "x"}),))',
            "rule '*': no parameter that it holds for has an axis",
        ),
        ('Layout((Rule("*norm.*", {"F": "x"}),))', "has an axis 'F': known: D"),
        (
            'Layout((Rule("layers.*.attn.q_NOPE", {"N": "x"}),))',
            "matches no parameter of the model: did you mean 'layers.*.attn.q_DNH'?",
        ),
        ('Layout((Rule("layers.9.*", {"F": "x"}),))', "rule 'layers.9.*' matches no parameter"),
        (
            'Layout((Rule("*", {"F": "x"}), Rule("embed_VD", {"V": "x"})))',
            "rule 'embed_VD' holds for no parameter: rules before it match all that it does",
        ),
        ('LAYOUTS["fsdp"]\nRULES = ()', "must define LAYOUT or RULES, not both: "),
    ],
)
def test_bad_layouts(text: str, message: str, models: dict[str, str], tmp_path: Path) -> None:
    path = tmp_path / "own.py"
    path.write_text(HEAD + text)
    with pytest.raises(JaxinferError) as caught:
        load(models["dense"], {"g": {"devices": 8, "mesh": {"x": 2, "y": 4}}}, {"g": str(path)})
    assert str(caught.value).startswith(f"layout {path}: ")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_experts_that_do_not_divide(models: dict[str, str]) -> None:
    with pytest.raises(JaxinferError) as caught:
        load(models["mixture"], {"g": {"devices": 3}}, {"g": "expert_parallel"})
    assert str(caught.value) == (
        "layout expert_parallel: axis E of layers.0.mlp.down_EFD is 8 long, 3 pieces do not "
        "divide it"
    )


def test_the_former_name_of_layout(
    models: dict[str, str], expected: Callable[[str], Tokens], tmp_path: Path
) -> None:
    path = tmp_path / "rules.py"
    path.write_text("from jaxinfer.models.sharding import Rule\nRULES = [Rule('*', {'F': 'tp'})]")
    instance = {"group": "g", "sharding": str(path)} | OPTIONS
    sections = {"groups": {"g": {"devices": 2}}, "instances": {"g": instance}}
    with pytest.warns(FutureWarning, match="sharding is now layout"):
        run_file = as_run_file({"model": models["dense"]} | sections)
    # As records of runs have the default.
    assert InstanceConfig(**instance | {"sharding": None}).layout is None
    llm = LLM.from_config(run_file, progress=False)
    assert tokens(llm) == expected("dense")
    plan = llm.engine.plan
    assert isinstance(plan, StagePlan)
    found = {name: plan.parameters[f"layers.0.{name}"] for name in ("mlp.up_DF", "attn.q_DNH")}
    shapes = {name: each.sharding.shard_shape(each.shape) for name, each in found.items()}
    assert shapes == {"mlp.up_DF": (32, 32), "attn.q_DNH": (32, 4, 8)}
    assert plan.kv_ways == 2


@pytest.mark.parametrize(
    ("layout", "mesh"),
    [("fsdp", None), ("expert_parallel", {"x": 1, "y": 2}), ("megatron", {"x": 2, "y": 1})],
)
def test_attention_groups_need_one_axis(
    layout: str, mesh: dict[str, int] | None, models: dict[str, str]
) -> None:
    stages = [{"group": "g", "attention": ["h"]}]
    instance = {"stages": stages, "layout": layout, "enable_prefix_caching": False} | OPTIONS
    groups = {"g": {"devices": 2, "mesh": mesh}, "h": {}}
    sections = {"groups": groups, "instances": {"i": instance}}
    with pytest.raises(JaxinferError) as caught:
        LLM.from_config(as_run_file({"model": models["dense"]} | sections), progress=False)
    assert str(caught.value) == (
        f"layout {layout} on mesh axes {list(mesh or ['tp'])}: attention groups need megatron, or "
        "other rules of parameters, on one axis"
    )
