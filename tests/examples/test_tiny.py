"""examples/tiny.py: short, on its own, and its tokens those of the engine."""

import ast
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from examples import tiny as engine
from jaxinfer import LLM, SamplingParams

ROOT = Path(__file__).parents[2]
FILE = ROOT / "examples" / "tiny.py"
TEXT = FILE.read_text(encoding="utf-8")
# As the tiny model's tokens are: bytes. One prompt is a token, one fills slabs and pages unevenly.
PROMPTS = [b"Hello", b"x" * 70, b"Another one", b"?", bytes(range(150))]


def serve(
    checkpoint: engine.Checkpoint, prompts: list[list[int]], limits: list[int], share: float,
    wide: int, ends: tuple[int, ...] = (), seats: int = 3,
) -> tuple[list[engine.Request], list[str], list[engine.Instance]]:  # fmt: skip
    """Served by an instance on one device and one on ``wide``, with pages of different sizes."""
    config, tensors, _ = checkpoint
    narrow, *others = jax.devices()[: 1 + wide]
    first = engine.Instance("first", config, tensors, [narrow], page_size=8, seats=2, budget=24)
    second = engine.Instance(
        "second", config, tensors, others, page_size=24, seats=seats, budget=20, num_pages=25
    )
    pairs = enumerate(zip(prompts, limits, strict=True))
    requests = [engine.Request(f"#{i}", list(prompt), limit) for i, (prompt, limit) in pairs]
    for request in requests:
        engine.route(request, first, second, share)
    log = engine.serve(requests, [first, second], ends)
    return requests, log, [first, second]


@pytest.fixture(scope="module")
def checkpoint(tiny_folder: Path) -> engine.Checkpoint:
    return engine.read_folder(tiny_folder)


def dense_logits(checkpoint: engine.Checkpoint, tokens: list[int]) -> np.ndarray:
    """The last token's logits [V] in float64 by numpy: no pages, no cache, no batch."""
    c, weights, _ = checkpoint
    w = {name: x.astype(np.float64) for name, x in weights.items()}
    T, H = len(tokens), c.head_dim
    angle_TH = np.arange(T)[:, None] * c.theta ** (-np.arange(0, H, 2) / H)

    def norm(x_TD: np.ndarray, name: str) -> np.ndarray:
        return x_TD / np.sqrt((x_TD**2).mean(-1, keepdims=True) + c.eps) * w[f"{name}.weight"]

    def rotated(x_TH: np.ndarray) -> np.ndarray:
        z_TH = (x_TH[:, : H // 2] + 1j * x_TH[:, H // 2 :]) * np.exp(1j * angle_TH)
        return np.concatenate([z_TH.real, z_TH.imag], -1)

    x_TD = w["model.embed_tokens.weight"][tokens]
    for i in range(c.layers):
        m = {n: w[f"model.layers.{i}.self_attn.{n}_proj.weight"] for n in "qkvo"}
        h_TD = norm(x_TD, f"model.layers.{i}.input_layernorm")
        heads = []
        for n in range(c.query_heads):
            k = n // (c.query_heads // c.kv_heads)
            q, key = rotated(h_TD @ m["q"][n * H :][:H].T), rotated(h_TD @ m["k"][k * H :][:H].T)
            score = np.where(np.tri(T, dtype=bool), q @ key.T / H**0.5, -np.inf)
            p = np.exp(score - score.max(-1, keepdims=True))
            heads.append(p / p.sum(-1, keepdims=True) @ (h_TD @ m["v"][k * H :][:H].T))
        x_TD = x_TD + np.concatenate(heads, -1) @ m["o"].T
        h_TD = norm(x_TD, f"model.layers.{i}.post_attention_layernorm")
        gate, up, down = (
            w[f"model.layers.{i}.mlp.{n}_proj.weight"] for n in ("gate", "up", "down")
        )
        gated = h_TD @ gate.T
        x_TD = x_TD + (gated / (1 + np.exp(-gated)) * (h_TD @ up.T)) @ down.T
    return norm(x_TD, "model.norm")[-1] @ w["lm_head.weight"].T


@pytest.mark.parametrize("share", [0.5, 1.0, 0.0])
def test_tokens_are_the_engines(checkpoint: engine.Checkpoint, tiny: LLM, share: float) -> None:
    """A part of each prompt handed over, the whole of it, none."""
    prompts = [list(prompt) for prompt in PROMPTS]
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    asked = [{"prompt_token_ids": prompt} for prompt in prompts]
    expected = [o.outputs[0].token_ids for o in tiny.generate(asked, params, progress=False)]
    requests, log, instances = serve(checkpoint, prompts, [20] * len(prompts), share, wide=2)
    assert [request.output for request in requests] == expected
    if share == 0.5:  # The first token of each, by an implementation of another kind.
        firsts = [int(dense_logits(checkpoint, prompt).argmax()) for prompt in prompts]
        assert firsts == [tokens[0] for tokens in expected]
        # Chunks of both, beside decodes.
        assert any(line.startswith("first: 0 decodes, tokens 0 to") for line in log)
        assert any(re.match(r"second: [1-3] decodes, tokens", line) for line in log)
    used = {line.partition(":")[0] for line in log}
    assert used == ({"first", "second"} if share else {"second"})
    for instance in instances:  # Every page came back.
        assert len(instance.free) == instance.kv[0][0].shape[0] - 1
        shards = {shard.data.shape for shard in instance.kv[0][0].addressable_shards}
        assert {shape[2] for shape in shards} == {2 // instance.mesh.size}


def test_a_request_ends_at_a_token_of_ends(checkpoint: engine.Checkpoint) -> None:
    prompt = list(b"Hello")
    free, _, _ = serve(checkpoint, [prompt], [12], 0.5, wide=2)
    end = free[0].output[5]
    ended, _, _ = serve(checkpoint, [prompt], [12], 0.5, wide=2, ends=(end,))
    assert ended[0].output == free[0].output[: free[0].output.index(end) + 1]


def test_a_request_that_never_fits_is_refused(checkpoint: engine.Checkpoint) -> None:
    with pytest.raises(ValueError, match="#0: has 319 entries"):
        serve(checkpoint, [[65] * 300], [20], 0.0, wide=2)


@pytest.mark.long
@pytest.mark.parametrize("share", [0.5, 1.0])
def test_golden_tokens(golden: list[dict[str, Any]], share: float) -> None:
    """The demo model, on one device and three, against Hugging Face transformers."""
    checkpoint = engine.read_gguf(engine.demo_file())
    *_, tokenizer = checkpoint
    for case in golden:
        if case["kind"] != "chat":
            assert tokenizer.encode(case["prompt"]).ids == case["prompt_ids"]
    prompts, outputs = ([case[key] for case in golden] for key in ("prompt_ids", "output_ids"))
    requests, _, _ = serve(checkpoint, prompts, list(map(len, outputs)), share, wide=3)
    assert [request.output for request in requests] == outputs


@pytest.mark.slow
def test_it_runs_as_a_program() -> None:
    done = subprocess.run(
        [sys.executable, str(FILE)], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert "second: " in done.stdout
    assert "red, blue, and yellow" in done.stdout


def test_it_is_short_and_on_its_own() -> None:
    assert len(TEXT.splitlines()) <= 600
    tops = set()
    for node in ast.walk(ast.parse(TEXT)):
        if isinstance(node, ast.Import):
            tops |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            tops.add((node.module or ".").partition(".")[0])
    assert tops - sys.stdlib_module_names == {"gguf", "jax", "numpy", "safetensors", "tokenizers"}


def test_each_section_ends_with_where_the_engine_does_it() -> None:
    _, *sections = re.split(r"^# \d\. ", TEXT, flags=re.MULTILINE)
    assert len(sections) == 9
    for section in sections:
        pointers = re.findall(r"^# In jaxinfer: (.*)", section, re.MULTILINE)
        assert pointers
        for file, name in re.findall(r"([\w/]+\.py):(\w+)", " ".join(pointers)):
            code = (ROOT / "jaxinfer" / file).read_text(encoding="utf-8")
            found = re.search(rf"^ *(?:def |class )?{name}\b(?: =|\(|:)", code, re.MULTILINE)
            assert found, f"{file}:{name}"
