"""Models in folders: modelled as a real run reads them, or refused by the same words."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from jaxinfer.checkpoints.hugging_face import read_folder_config
from jaxinfer.checkpoints.modelled import model_shape
from jaxinfer.commands.app import cli
from jaxinfer.config.run_file import RunFile, load_run_file
from jaxinfer.errors import JaxinferError
from jaxinfer.hardware.catalogue import Catalogue, WideLayers, find_gpu, find_model
from jaxinfer.hardware.efficiency import model_flops
from jaxinfer.report.metrics import RunMetrics
from jaxinfer.serving.batch import Work
from jaxinfer.simulate.costs.roofline import KernelEfficiency, RooflineStage
from jaxinfer.simulate.run import simulate

SIZES: dict[str, Any] = {
    "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
}  # fmt: skip
LLAMA = SIZES | {
    "architectures": ["LlamaForCausalLM"],
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
}
GEMMA = {
    "architectures": ["Gemma3ForCausalLM"], "hidden_size": 2560, "intermediate_size": 10240,
    "num_hidden_layers": 34, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256,
    "vocab_size": 262208, "sliding_window": 1024, "sliding_window_pattern": 6,
}  # fmt: skip
COMPRESSED = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True},
        }
    },
}


def write(folder: Path, values: dict[str, Any], **more: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(values | more))
    return folder


def run_file(folder: Path, model: str, **engine: Any) -> RunFile:
    trace, file = folder / "t.csv", folder / "r.yaml"
    trace.write_text("num_prefill_tokens,num_decode_tokens\n" + "500,40\n" * 4)
    sections = {
        "model": model,
        "engine": {"max_num_seqs": 8, "max_num_batched_tokens": 1024, "page_size": 16} | engine,
        "groups": {"g": {"kind": "A100-80G-SXM"}},
        "instances": {"e": {"group": "g"}},
        "system": "single",
        "simulate": {"flops": 0.6, "bandwidth": 0.7},
    }
    file.write_text(yaml.safe_dump(sections))
    return load_run_file(file, [f"workload.trace={trace}"])


def run(folder: Path, model: str, **engine: Any) -> RunMetrics:
    config = run_file(folder, model, **engine)
    return simulate(config, config.requests())


def test_a_folder_is_the_model_of_its_sizes(tmp_path: Path) -> None:
    found = model_shape(str(write(tmp_path / "m", LLAMA)), Catalogue())
    assert found.model_copy(
        update={"head_dim": None, "max_position_embeddings": None}
    ) == find_model("llama-3-8b").model_copy(update={"head_dim": None})


def test_stored_bits_are_those_of_weight_dtype(tmp_path: Path) -> None:
    wide = str(write(tmp_path / "wide", LLAMA))
    narrow = str(write(tmp_path / "narrow", LLAMA, quantization_config=COMPRESSED))
    asked, found = run(tmp_path, wide, weight_dtype="fp8"), run(tmp_path, narrow)
    assert (found.tpot_p50, found.ttft_mean) == (asked.tpot_p50, asked.ttft_mean)
    assert found.num_pages == asked.num_pages
    other = run(tmp_path, wide).tpot_p50
    assert found.tpot_p50
    assert other
    assert found.tpot_p50 < 0.6 * other
    assert run(tmp_path, narrow, weight_dtype="fp8").tpot_p50 == found.tpot_p50
    with pytest.raises(JaxinferError, match="weight_dtype is int8, the model has fp8: leave it"):
        run(tmp_path, narrow, weight_dtype="int8")


def test_layers_left_out_take_16_bits(tmp_path: Path) -> None:
    """Bytes of a decode of one token by hand: the products of 8 bits, and those of 16."""
    quantised = COMPRESSED | {"ignore": ["lm_head", "re:.*down_proj", "re:.*layers.[0-7].self_at"]}
    model = model_shape(
        str(write(tmp_path / "m", LLAMA, quantization_config=quantised)), Catalogue()
    )
    assert (model.stored_bits, model.wide_layers.down, model.wide_layers.q) == ("fp8", 32, 8)
    gpu, efficiency = find_gpu("A100-80G-SXM"), KernelEfficiency(1.0, 1.0)
    stage = RooflineStage(gpu, model, 32, False, 1, 2, efficiency, 1.0, weight_size=1)
    D, F, Q, KV = 4096, 14336, 4096, 1024
    attention, down, ups = D * (Q + 2 * KV) + Q * D, F * D, 2 * D * F
    held = 24 * attention + 8 * 2 * attention + 32 * (2 * down + ups)
    moved = 32 * 2 * (D + Q + 2 * KV + Q + D + D + 2 * F + F + D)
    seconds = stage.seconds(Work(1, 1, 1, 0, 0, []))
    assert seconds == pytest.approx((held + moved) / (gpu.memory_gb_s * 1e9), rel=1e-9)
    per_layer = attention + down + ups
    assert model.weight_size(1) == pytest.approx(held / (32 * per_layer))
    assert model.weight_size(2) == 2
    # The pool has what is left.
    each = 2 * 32 * 8 * 128 * 2 * 16
    pages = [
        run(
            tmp_path,
            str(write(tmp_path / "x", LLAMA, quantization_config=COMPRESSED | {"ignore": left})),
        ).num_pages
        for left in (["lm_head"], ["lm_head", "re:.*down_proj"])
    ]
    assert pages[0] - pages[1] == pytest.approx(32 * down / each, abs=1)


def test_a_mixture_of_8_bits_beside_attention_of_16(tmp_path: Path) -> None:
    """Modelled though a run refuses it, as ``weight_dtype`` of a mixture is."""
    values = LLAMA | {"architectures": ["Qwen3MoeForCausalLM"], "num_experts": 16}
    quantised = COMPRESSED | {"ignore": ["lm_head", "re:.*self_attn.*", "re:.*mlp.gate$"]}
    folder = write(tmp_path / "m", values, quantization_config=quantised)
    found = model_shape(str(folder), Catalogue())
    assert found.wide_layers == WideLayers(q=32, k=32, v=32, o=32)
    attention, experts = found.attention_parameters, 16 * found.expert_parameters
    assert found.weight_size(1) == pytest.approx(
        (2 * attention + experts) / (attention + experts), rel=1e-12
    )


@pytest.mark.parametrize(
    ("values", "layers"),
    [
        (GEMMA, 29),
        (GEMMA | {"layer_types": ["sliding_attention"] * 2 + ["full_attention"] * 32}, 2),
        (LLAMA | {"architectures": ["MistralForCausalLM"]}, 32),
        (LLAMA | {"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True}, 4),
        (
            LLAMA
            | {
                "architectures": ["Qwen3ForCausalLM"],
                "use_sliding_window": True,
                "max_window_layers": 30,
            },
            2,
        ),
    ],
)
def test_windows_are_kept(tmp_path: Path, values: dict[str, Any], layers: int) -> None:
    folder = write(tmp_path / "m", values)
    found = model_shape(str(folder), Catalogue())
    windows = [each for each in read_folder_config(folder).windows if each]
    assert (found.windowed_layers, found.sliding_window) == (layers, windows[0])
    with pytest.raises(JaxinferError, match="roofline has no times of layers with windows"):
        run(tmp_path, str(folder), max_model_len=8000)
    # Within the window, all layers see all.
    assert run(tmp_path, str(folder), max_model_len=1024).tpot_p50


@pytest.mark.parametrize(
    ("values", "layers"),
    [
        (LLAMA | {"architectures": ["Qwen2ForCausalLM"], "sliding_window": 4096}, 0),
        (LLAMA | {"architectures": ["MistralForCausalLM"], "sliding_window": None}, 0),
        (LLAMA | {"architectures": ["MistralForCausalLM"], "sliding_window": 8192}, 0),
    ],
)
def test_windows_that_do_nothing_are_none(
    tmp_path: Path, values: dict[str, Any], layers: int
) -> None:
    found = model_shape(str(write(tmp_path / "m", values)), Catalogue())
    assert found.windowed_layers == layers


@pytest.mark.parametrize(
    "changes",
    [
        *({"quantization_config": {"quant_method": method, "bits": 4}} for method in
          ("awq", "gptq", "bitsandbytes", "mxfp4")),
        {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}},
        {"quantization_config": COMPRESSED | {"transform_config": {"config_groups": {}}}},
        {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
        {"hidden_act": "gelu"},
        {"num_key_value_heads": 5},
        {"architectures": ["MixtralForCausalLM"], "num_local_experts": 0},
        {"architectures": ["Qwen3MoeForCausalLM"], "mlp_only_layers": [3]},
        {"architectures": ["GPT2LMHeadModel"]},
    ],
)  # fmt: skip
def test_what_a_real_run_refuses_is_refused_by_the_same_words(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    folder = write(tmp_path / "m", LLAMA, **changes)
    with pytest.raises(JaxinferError) as real:
        read_folder_config(folder)
    with pytest.raises(JaxinferError) as modelled:
        run(tmp_path, str(folder))
    assert str(modelled.value) == str(real.value)


def test_no_request_is_longer_than_the_model(tmp_path: Path) -> None:
    folder = str(write(tmp_path / "m", LLAMA, max_position_embeddings=530))
    with pytest.raises(JaxinferError, match="500 prompt and 40 output tokens, max_model_len is 53"):
        run(tmp_path, folder)
    with pytest.raises(JaxinferError, match="max_model_len is 640, the model was made for 530"):
        run(tmp_path, folder, max_model_len=640)


def test_a_changed_folder_is_read_again(tmp_path: Path) -> None:
    folder = write(tmp_path / "m", LLAMA)
    assert model_shape(str(folder), Catalogue()).num_hidden_layers == 32
    write(folder, LLAMA, num_hidden_layers=30)
    assert model_shape(str(folder), Catalogue()).num_hidden_layers == 30


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"quantization_config": COMPRESSED}, "has weights of fp8, must have those of --dtype"),
        ({"architectures": ["MistralForCausalLM"]}, "has layers with windows, which are not"),
        ({"quantization_config": {"quant_method": "awq"}}, "quant_method is 'awq', must be one of"),
        (
            {"architectures": ["MixtralForCausalLM"], "num_local_experts": 0},
            "num_local_experts is 0, must be a positive integer",
        ),
    ],
)
def test_shard_refuses_what_it_does_not_study(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    folder = write(tmp_path / "m", LLAMA, **changes)
    call = ["shard", "--model", str(folder), "--mesh", "tp=2", "--card", "H100"]
    with pytest.raises(JaxinferError) as error:
        CliRunner().invoke(cli, call, catch_exceptions=False, standalone_mode=False)
    assert message in str(error.value)


def test_a_mixture_from_its_config(tmp_path: Path) -> None:
    """Qwen3-30B-A3B's, of whose 30.5 billion parameters a token meets 3.3, as its card says."""
    values = {
        "architectures": ["Qwen3MoeForCausalLM"], "decoder_sparse_step": 1, "head_dim": 128,
        "hidden_size": 2048, "intermediate_size": 6144, "mlp_only_layers": [],
        "moe_intermediate_size": 768, "num_attention_heads": 32, "num_experts_per_tok": 8,
        "num_hidden_layers": 48, "num_key_value_heads": 4, "vocab_size": 151936,
    }  # fmt: skip
    path = tmp_path / "config.json"
    for name in ("num_experts", "num_local_experts"):
        path.write_text(json.dumps(values | {name: 128}))
        found = model_shape(str(tmp_path), Catalogue())
        assert found == find_model("qwen3-30b-a3b").model_copy(
            update={"max_position_embeddings": 32768}
        )
    flops = model_flops(find_model("qwen3-30b-a3b"))
    met = (flops.token + 2 * flops.sampled) / 2
    assert met / 1e9 == pytest.approx(3.3, rel=0.02)
    for key, value in (("mlp_only_layers", [3]), ("decoder_sparse_step", 2)):
        path.write_text(json.dumps(values | {"num_experts": 128, key: value}))
        with pytest.raises(JaxinferError, match=f"{key} is .*nothing else is implemented"):
            model_shape(str(tmp_path), Catalogue())
