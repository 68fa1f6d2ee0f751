"""A tiny Llama with random weights, and the options that most tests have for it."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

TINY_OPTIONS: dict[str, Any] = {
    "max_num_seqs": 4,
    "max_num_batched_tokens": 32,
    "page_size": 8,
    "num_pages": 65,
}


def write_tiny_model(folder: Path) -> Path:
    """A Hugging Face folder: two Llama layers, 260 tokens (all bytes), context 256."""
    D, F, N, K, H, L, V = 32, 64, 4, 2, 8, 2, 260
    config = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": V,
        "hidden_size": D,
        "intermediate_size": F,
        "num_hidden_layers": L,
        "num_attention_heads": N,
        "num_key_value_heads": K,
        "head_dim": H,
        "max_position_embeddings": 256,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": 256,
    }
    (folder / "config.json").write_text(json.dumps(config))
    rng = np.random.default_rng(0)

    def draw(*shape: int) -> np.ndarray:
        return (rng.normal(size=shape) / np.sqrt(shape[-1])).astype(np.float32)

    tensors = {"model.embed_tokens.weight": draw(V, D) * 5, "lm_head.weight": draw(V, D) * 4}
    tensors["model.norm.weight"] = np.ones(D, np.float32)
    for i in range(L):
        layer = f"model.layers.{i}."
        tensors |= {
            layer + "input_layernorm.weight": np.ones(D, np.float32),
            layer + "self_attn.q_proj.weight": draw(N * H, D) * 3,
            layer + "self_attn.k_proj.weight": draw(K * H, D) * 3,
            layer + "self_attn.v_proj.weight": draw(K * H, D) * 2,
            layer + "self_attn.o_proj.weight": draw(D, N * H) * 2,
            layer + "post_attention_layernorm.weight": np.ones(D, np.float32),
            layer + "mlp.gate_proj.weight": draw(F, D) * 2,
            layer + "mlp.up_proj.weight": draw(F, D) * 2,
            layer + "mlp.down_proj.weight": draw(D, F) * 2,
        }
    save_file(tensors, folder / "model.safetensors")

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE({char: i for i, char in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(
        [AddedToken(t, special=True) for t in ("<end>", "<user>", "<assistant>", "<system>")]
    )
    backend.save(str(folder / "tokenizer.json"))
    template = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}<end>{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": "<end>", "chat_template": template})
    )
    return folder


def write_tiny_mixture(folder: Path) -> Path:
    """The tiny model as a Mixtral: one layer, of 8 experts with 16 columns each."""
    D, F, E = 32, 16, 8
    write_tiny_model(folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {
        "architectures": ["MixtralForCausalLM"],
        "intermediate_size": F,
        "num_hidden_layers": 1,
        "num_local_experts": E,
        "num_experts_per_tok": 2,
    }
    (folder / "config.json").write_text(json.dumps(config))
    found = load_file(folder / "model.safetensors")
    tensors = {n: x for n, x in found.items() if "layers.1" not in n and ".mlp." not in n}
    rng = np.random.default_rng(1)
    root = "model.layers.0.block_sparse_moe."
    shapes = {root + "gate.weight": (E, D)}
    for e in range(E):
        for name, shape in (("w1", (F, D)), ("w3", (F, D)), ("w2", (D, F))):
            shapes[f"{root}experts.{e}.{name}.weight"] = shape
    for name, shape in shapes.items():
        tensors[name] = (2 * rng.normal(size=shape) / np.sqrt(shape[-1])).astype(np.float32)
    save_file(tensors, folder / "model.safetensors")
    return folder
