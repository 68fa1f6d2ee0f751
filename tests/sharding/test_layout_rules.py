"""Rules of layouts of one's own that would cut nothing: refused by what the model has."""

from dataclasses import replace
from pathlib import Path

import pytest

from jaxinfer.config.resolve import resolve
from jaxinfer.config.run_file import RunFile
from jaxinfer.config.site import model_site
from jaxinfer.errors import JaxinferError
from jaxinfer.hardware.catalogue import ModelShape
from jaxinfer.lab.sharding.search import LayoutSearch
from jaxinfer.models.config import EightBits, ModelConfig, Rope
from jaxinfer.models.layout_files import load_layout
from jaxinfer.models.layouts import ALL, LAYOUTS, Layout, Rule
from jaxinfer.models.registry import ARCHITECTURES
from jaxinfer.runtime.stage.stage_plan import parameter_shapes
from jaxinfer.sharding.costs import LayoutFlow
from jaxinfer.sharding.shapes import check_layout, parameter_names
from tests.sharding.test_layout_search import MESH, MIXTURE, TINY, card

CONFIGS = Path(__file__).parents[2] / "configs" / "sharding"


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ([Rule("*", {"Q": "x"})], "rule '\\*': no parameter that it holds for has an axis 'Q'"),
        ([Rule("*", {"E": "x"})], "has an axis 'E': known: D, F, H, K, N, V$"),
        ([Rule("layers.*.attn.q_NOPE", {"N": "x"})], "did you mean 'layers.\\*.attn.q_DNH'"),
        ([Rule("*", {}), Rule("*.mlp.*", {"F": "x"})], "'\\*.mlp.\\*' holds for no parameter"),
        ([Rule("layers.2.*", {})], "'layers.2.\\*' matches no parameter"),
        ([Rule("layers.1.mlp.*", {"F": "x"})], "layers.1.mlp.gate_DF lies otherwise than layers.0"),
    ],
)
def test_rules_that_cut_nothing(rules: list[Rule], message: str) -> None:
    with pytest.raises(JaxinferError, match=message):
        check_layout(Layout(tuple(rules)), TINY)


def test_layouts_that_ship_are_for_all_models() -> None:
    for model in (TINY, MIXTURE):
        for layout in LAYOUTS.values():
            check_layout(layout, model)
        tables = Rule("*_VD", {"V": ALL}), Rule("*_bias_*", {}), Rule("*.scale_D", {})
        check_layout(Layout((*tables, *LAYOUTS["expert_parallel"].parameters)), model)
        for cut in LayoutSearch(model, MESH, card(40)).of_weights():
            check_layout(cut.layout(("x", "y")), model)
    check_layout(load_layout(str(CONFIGS / "vocabulary.py")), TINY)
    check_layout(load_layout(str(CONFIGS / "experts.py")), MIXTURE)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_all_parameters_of_each_architecture_have_names(name: str) -> None:
    """A rule that an engine takes is not refused where its model is but a shape."""
    rope = Rope((1.0,) * 4)
    config = ModelConfig(
        name, 20, 16, 32, 1, 4, 2, 8, 100, 1e-5, False, None, (), (None,), rope, attention_bias=True
    )
    experts = {"num_experts": 4, "num_experts_per_tok": 2}
    of = experts if "Moe" in name or "Mixtral" in name else {}
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "vocab_size": 20}
    shape = ModelShape(
        **sizes, num_attention_heads=4, num_key_value_heads=2, head_dim=8, **of,
        gated=not name.startswith("OPT"), qk_norm=name.startswith(("Qwen3", "Gemma3")),
    )  # fmt: skip
    bits = None if of else EightBits("int8", "float32")
    real = {*parameter_shapes(replace(config, **of, eight_bits=bits))}
    assert real <= {*parameter_names(shape)}


def test_tables_that_do_not_divide_are_refused_before_anything_is_compiled() -> None:
    layout = load_layout(str(CONFIGS / "vocabulary.py"))
    with pytest.raises(JaxinferError, match="V of embed_VD is 65 long, 2 pieces do not divide it"):
        LayoutFlow(TINY.model_copy(update={"vocab_size": 65}), layout, {"x": 2})


def test_modelled_stages_refuse_them(tmp_path: Path) -> None:
    path = tmp_path / "own.py"
    path.write_text("from jaxinfer.models.layouts import Rule\nRULES = [Rule('*', {'Q': 'tp'})]")
    sections = {
        "model": "llama-3-8b",
        "groups": {"g": {"kind": "H100-SXM", "devices": 2}},
        "instances": {"a": {"group": "g", "layout": str(path)}},
    }
    with pytest.raises(JaxinferError, match=r"instances\.a.*layout.*rule '\*': no parameter .*'Q'"):
        model_site(resolve(RunFile.model_validate(sections)))
