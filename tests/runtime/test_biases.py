"""Biases of attention in Llama, of a Hugging Face folder and of GGUF, against numpy."""

from pathlib import Path

import numpy as np
import pytest
from checkpoint_files import LAYER, error_of, interleave, make_folder, make_gguf, make_weights
from test_architectures import Model

from jaxinfer.checkpoints.checkpoint import open_checkpoint

RNG = np.random.default_rng(3)
SIZES = {"q": 32, "k": 16, "v": 16, "o": 32}
BIASES = {
    f"{LAYER}self_attn.{part}_proj.bias": RNG.normal(size=size).astype(np.float32)
    for part, size in SIZES.items()
}
WEIGHTS = make_weights() | BIASES


def logits(tokens: np.ndarray, parts: str) -> np.ndarray:
    """The tiny model's, in float64: 4 query heads on 2 key-value heads of 8, one layer."""
    w = {name.removeprefix(LAYER): value.astype(np.float64) for name, value in WEIGHTS.items()}
    T = len(tokens)
    angle = np.arange(T)[:, None] * 5000.0 ** (-np.arange(4) / 4)

    def norm(x_TD: np.ndarray, scale: str) -> np.ndarray:
        return x_TD / np.sqrt((x_TD**2).mean(-1, keepdims=True) + 1e-5) * w[scale]

    def product(x_TD: np.ndarray, part: str) -> np.ndarray:
        bias = w[f"self_attn.{part}_proj.bias"] if part in parts else 0
        return x_TD @ w[f"self_attn.{part}_proj.weight"].T + bias

    def rotated(x_TE: np.ndarray) -> np.ndarray:
        a, b = np.split(x_TE.reshape(T, -1, 8), 2, axis=-1)
        cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)

    x_TD = w["model.embed_tokens.weight"][tokens]
    y_TD = norm(x_TD, "input_layernorm.weight")
    q_TNH, k_TKH = rotated(product(y_TD, "q")), rotated(product(y_TD, "k"))
    v_TKH = product(y_TD, "v").reshape(T, 2, 8)
    score_NTT = np.einsum("tnh,snh->nts", q_TNH, k_TKH.repeat(2, 1)) / np.sqrt(8)
    score_NTT = np.exp(np.where(np.tri(T, dtype=bool), score_NTT, -np.inf))
    score_NTT /= score_NTT.sum(-1, keepdims=True)
    x_TD = x_TD + product(
        np.einsum("nts,snh->tnh", score_NTT, v_TKH.repeat(2, 1)).reshape(T, 32), "o"
    )
    y_TD = norm(x_TD, "post_attention_layernorm.weight")
    gate_TF = y_TD @ w["mlp.gate_proj.weight"].T
    up_TF = y_TD @ w["mlp.up_proj.weight"].T
    x_TD = x_TD + (gate_TF / (1 + np.exp(-gate_TF)) * up_TF) @ w["mlp.down_proj.weight"].T
    return norm(x_TD, "model.norm.weight") @ w["model.embed_tokens.weight"].T


def gguf_file(path: Path, parts: str) -> Path:
    """A file in llama.cpp's order of rows; its base of positions is the folder's."""
    weights = make_weights()
    for part in parts:
        bias = BIASES[f"{LAYER}self_attn.{part}_proj.bias"]
        if part in "qk":
            bias = interleave(bias, 4 if part == "q" else 2)
        weights[f"blk.0.attn_{'output' if part == 'o' else part}.bias"] = bias
    return make_gguf(path, weights, metadata=lambda writer: writer.add_rope_freq_base(5000.0))


@pytest.mark.parametrize("kind", ["folder", "qkvo", "qkv", ""])
def test_logits(tmp_path: Path, kind: str) -> None:
    if kind == "folder":
        source = make_folder(tmp_path / "hf", WEIGHTS, attention_bias=True)
    else:
        source = gguf_file(tmp_path / "x.gguf", kind)
    tokens = RNG.integers(0, 96, 20)
    got = Model(str(source))(tokens, 0)
    wanted = logits(tokens, "qkvo" if kind == "folder" else kind)
    np.testing.assert_allclose(got, wanted, atol=1e-3, rtol=1e-4)


def test_other_sets_of_biases_are_refused(tmp_path: Path) -> None:
    path = gguf_file(tmp_path / "x.gguf", "q")
    message = error_of(lambda: open_checkpoint(str(path)))
    assert "x.gguf: has a bias of attn_q, must have those of attn_q, attn_k and attn_v" in message
