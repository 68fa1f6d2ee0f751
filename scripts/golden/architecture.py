"""Write golden logits of every architecture, by transformers on small random weights.

    python -m scripts.golden.architecture tests/data/architectures [CASES]

This needs its own environment with torch and transformers. Each case becomes a folder that jaxinfer
reads (config.json, model.safetensors), with ``expected.npz``. That file has token ids [T] and
float32 logits [T, V], which were computed in float64. The weights can be represented exactly in
bfloat16. They are larger than usual initial weights, so that a wrong bias, norm or window changes
the logits.
"""

import json
from pathlib import Path

import click
import numpy as np

SIZES = {
    "vocab_size": 131,
    "hidden_size": 48,
    "intermediate_size": 50,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
GEMMA_ROPE = {
    "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
SLIDING = ["sliding_attention", "sliding_attention", "full_attention"]
OPT: dict[str, object] = {
    "vocab_size": 131,
    "hidden_size": 32,
    "ffn_dim": 50,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "word_embed_proj_dim": 32,
    "pad_token_id": 1,
    "bos_token_id": 2,
    "eos_token_id": 2,
}
# Smaller than SIZES, because experts have many matrices.
QWEN3_MOE: dict[str, object] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 22,
}
CASES: dict[str, tuple[str, dict[str, object]]] = {
    "llama": ("llama", {}),
    "llama3_rope": ("llama", {"rope_parameters": LLAMA3}),
    "linear_rope": ("llama", {"rope_parameters": LINEAR, "tie_word_embeddings": True}),
    "qwen2": ("qwen2", {"head_dim": None, "tie_word_embeddings": True}),
    "qwen2_yarn": ("qwen2", {"head_dim": None, "rope_parameters": YARN}),
    "qwen2_window": (
        "qwen2",
        {
            "head_dim": None,
            "use_sliding_window": True,
            "sliding_window": 9,
            "max_window_layers": 1,
        },
    ),
    "qwen3": ("qwen3", {}),
    "mistral": ("mistral", {"sliding_window": 11}),
    "mixtral": (
        "mixtral",
        {"num_local_experts": 6, "num_experts_per_tok": 2, "sliding_window": None},
    ),
    "qwen3_moe": ("qwen3_moe", QWEN3_MOE | {"norm_topk_prob": True}),
    "qwen3_moe_unnormalised": (
        "qwen3_moe",
        QWEN3_MOE | {"use_sliding_window": True, "sliding_window": 10},
    ),
    "gemma3": (
        "gemma3_text",
        {
            "query_pre_attn_scalar": 20,
            "sliding_window": 10,
            "layer_types": SLIDING,
            "rope_parameters": GEMMA_ROPE,
        },
    ),
    "opt": ("opt", OPT),
}


@click.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.argument("names", nargs=-1, type=click.Choice(list(CASES)))
def main(folder: Path, names: tuple[str, ...]) -> None:
    """Write these cases; all if none is named."""
    import torch
    import transformers

    for name in names or CASES:
        kind, values = CASES[name]
        write(folder / name, kind, values if kind == "opt" else SIZES | values)
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    (folder / "versions.json").write_text(json.dumps(versions) + "\n")


def write(folder: Path, kind: str, values: dict[str, object]) -> None:
    """Write one case."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    given = {key: value for key, value in values.items() if value is not None}
    torch.manual_seed(len(folder.name))
    config = AutoConfig.for_model(kind, **given)
    for key, value in values.items():
        if value is None and key in ("sliding_window", "pad_token_id", "bos_token_id"):
            setattr(config, key, None)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    if kind in ("mixtral", "qwen3_moe"):
        model.set_experts_implementation("eager")  # The others do not know float64.
    model = model.float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            spread = 0.3 if parameter.ndim == 1 else 2 / parameter.shape[-1] ** 0.5
            parameter.add_(torch.randn(parameter.shape) * spread)
            parameter.copy_(parameter.bfloat16())
        tokens = torch.randint(3, int(config.vocab_size), (1, 75))
        logits = model.double()(tokens).logits[0]
    model.bfloat16().save_pretrained(folder)
    np.savez_compressed(
        folder / "expected.npz", tokens=tokens[0].numpy(), logits=logits.float().numpy()
    )
    (folder / "generation_config.json").unlink()


if __name__ == "__main__":
    main()
