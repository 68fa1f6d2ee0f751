"""Models for the tests: the demo model's golden cases, and a tiny one with random weights."""

import json
import os
from pathlib import Path
from typing import Any

# On a CPU, most of the tests' time goes into compilation, and little into what was compiled.
if "cuda" not in os.environ.get("JAX_PLATFORMS", ""):
    os.environ["XLA_FLAGS"] = (
        f"{os.environ.get('XLA_FLAGS', '')} --xla_backend_optimization_level=0"
    )

import jax
import numpy as np
import pytest
from safetensors.numpy import save_file
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from jaxinfer import LLM, JaxinferError
from jaxinfer.config import RunFile

# Before anything counts the devices: tensor parallelism over 4 beside 4.
jax.config.update("jax_num_cpu_devices", 8)

DATA = Path(__file__).parent / "data"
TINY_OPTIONS: dict[str, Any] = {
    "max_num_seqs": 4,
    "max_num_batched_tokens": 32,
    "page_size": 8,
    "num_pages": 65,
}


@pytest.fixture(scope="session")
def golden() -> list[dict[str, Any]]:
    """Greedy cases of the demo model by Hugging Face transformers, in float32."""
    return json.loads((DATA / "smollm2_golden.json").read_text())["cases"]


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder: two Llama layers, 260 tokens (all bytes), context 256."""
    folder = tmp_path_factory.mktemp("tiny")
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


@pytest.fixture(scope="session")
def tiny(tiny_folder: Path) -> LLM:
    """The tiny model, with a pool of 64 pages of 8 tokens."""
    return LLM(str(tiny_folder), progress=False, **TINY_OPTIONS)


@pytest.fixture
def model(tiny: LLM, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The tiny model's folder; whoever loads it by a run file gets the one that is loaded."""

    def load(config: RunFile) -> LLM:
        if config.model != str(tiny_folder):
            raise JaxinferError(f"no model {config.model}")
        return tiny

    monkeypatch.setattr(LLM, "from_config", load)
    return str(tiny_folder)
