"""The engine with Pallas kernels, interpreted; and which devices get them."""

import json
import sys
from pathlib import Path
from pydoc_data.topics import topics
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer import LLM, JaxinferError, SamplingParams, pallas_kernels
from jaxinfer.pallas_kernels import choice
from jaxinfer.pallas_kernels.choice import choose_kernels
from jaxinfer.pallas_kernels.kv_pages import KVPages
from jaxinfer.runtime.kv.slab import SLAB_TOKENS, gather, scatter

ROOT = Path(__file__).parents[2]
TINY_OPTIONS: dict[str, Any] = {
    "max_num_seqs": 4,
    "max_num_batched_tokens": 32,
    "page_size": 8,
    "num_pages": 65,
}


def tokens(llm: LLM, prompts: list[list[int]], count: int) -> list[list[int]]:
    params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
    found = llm.generate([{"prompt_token_ids": p} for p in prompts], params, progress=False)
    return [output.outputs[0].token_ids for output in found]


@pytest.mark.slow
def test_greedy_tokens_of_the_demo_model(golden: list[dict[str, Any]]) -> None:
    """Tokens equal those of Hugging Face transformers, with chunks of prompts beside decodes."""
    cases = sorted(golden, key=lambda case: len(case["prompt_ids"]))[:3]
    llm = LLM(
        "smollm2-135m-instruct", progress=False, kernels="interpret", dtype="float32",
        max_num_seqs=3, max_num_batched_tokens=16, token_buckets=[16], page_size=16, num_pages=60,
        max_model_len=256,
    )  # fmt: skip
    found = tokens(llm, [case["prompt_ids"] for case in cases], 8)
    assert found == [case["output_ids"][:8] for case in cases]
    (engine,) = llm.describe()["instances"].values()  # type: ignore[attr-defined]
    assert [stage["kernels"] for stage in engine["stages"]] == ["interpret"]


@pytest.mark.slow
def test_on_two_devices(tiny_folder: Path) -> None:
    """Devices have their own heads."""
    prompts = [list(range(1, 40)), [5, 6, 7], list(range(100, 117))]
    found = [
        tokens(
            LLM(
                str(tiny_folder),
                progress=False,
                kernels=kernels,
                tensor_parallel_size=devices,
                **TINY_OPTIONS,
            ),
            prompts,
            12,
        )
        for kernels, devices in (("plain", 1), ("interpret", 2))
    ]
    assert found[0] == found[1]


def gpu(capability: str) -> Any:
    return SimpleNamespace(platform="gpu", compute_capability=capability, device_kind="NVIDIA X")


CPU: Any = SimpleNamespace(platform="cpu", device_kind="cpu")


@pytest.mark.parametrize(
    ("wanted", "device", "dtype", "head_dim", "page_size", "chosen"),
    [
        ("auto", gpu("9.0"), "bfloat16", 128, 64, "hopper"),
        ("auto", gpu("9.0"), "bfloat16", 128, 24, "generic"),
        ("auto", gpu("9.0"), "int8", 128, 64, "hopper"),
        ("auto", gpu("9.0"), "int8", 128, 32, "generic"),
        ("auto", gpu("10.0"), "bfloat16", 128, 64, "generic"),
        ("auto", gpu("8.6"), "bfloat16", 80, 16, "generic"),
        ("auto", gpu("8.9"), "float8_e4m3fn", 80, 16, "generic"),
        ("auto", gpu("8.6"), "float8_e4m3fn", 80, 16, "plain"),
        ("auto", gpu("9.0"), "float32", 128, 64, "plain"),
        ("auto", gpu("7.5"), "bfloat16", 128, 64, "plain"),
        ("auto", gpu("9.0"), "bfloat16", 72, 64, "plain"),
        ("generic", gpu("9.0"), "float32", 128, 64, "generic"),
        ("hopper", gpu("9.0"), "float16", 128, 64, "hopper"),
        ("plain", gpu("9.0"), "bfloat16", 128, 64, "plain"),
        ("interpret", CPU, "float32", 64, 64, "interpret"),
        ("auto", CPU, "float32", 20, 24, "numba"),
        ("auto", CPU, "bfloat16", 64, 64, "numba"),
        ("auto", CPU, "int8", 64, 64, "plain"),
        ("auto", CPU, "float16", 64, 64, "plain"),
        ("plain", CPU, "float32", 64, 64, "plain"),
    ],
)
def test_choice(
    wanted: Any, device: Any, dtype: str, head_dim: int, page_size: int, chosen: str
) -> None:
    found = choose_kernels(wanted, device, jnp.dtype(dtype), head_dim, 4, page_size)
    assert found == chosen


@pytest.mark.parametrize(
    ("wanted", "device", "dtype", "head_dim", "message"),
    [
        ("generic", CPU, "bfloat16", 64, "kernels is generic, the device is a cpu"),
        ("hopper", CPU, "bfloat16", 64, "kernels is hopper, the device is a cpu"),
        (
            "generic",
            gpu("7.5"),
            "bfloat16",
            64,
            "NVIDIA X has compute capability 7.5, they need compute capability 8.0",
        ),
        (
            "generic",
            gpu("8.0"),
            "float8_e4m3fn",
            64,
            "they need compute capability 8.9 or more with fp8 entries",
        ),
        ("generic", gpu("9.0"), "bfloat16", 72, "head_dim is 72, no multiple of 16"),
        (
            "hopper",
            gpu("8.9"),
            "bfloat16",
            128,
            "compute capability 8.9, they need compute capability 9.0",
        ),
        ("hopper", gpu("9.0"), "float32", 128, "KV entries are float32, neither"),
        ("ampere", gpu("9.0"), "bfloat16", 128, "compute capability 9.0, they need .* 8.0 to 8.9"),
        ("numba", gpu("9.0"), "float32", 128, "compute capability 9.0, it needs a CPU"),
        ("numba", CPU, "int8", 64, "KV entries are int8, it needs float32 or bfloat16"),
    ],
)
def test_a_device_that_cannot(
    wanted: Any, device: Any, dtype: str, head_dim: int, message: str
) -> None:
    with pytest.raises(JaxinferError, match=message):
        choose_kernels(wanted, device, jnp.dtype(dtype), head_dim, 4, 64)


@pytest.mark.parametrize(
    ("ptxas", "chosen"),
    [
        (None, "hopper"),
        ((12, 6, 85), "hopper"),
        ((12, 8, 61), "generic"),
        ((12, 9, 41), "generic"),
        ((12, 9, 86), "hopper"),
        ((13, 1, 80), "hopper"),
    ],
)
def test_an_assembler_that_makes_wrong_code(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    ptxas: tuple[int, ...] | None,
    chosen: str,
) -> None:
    """The code is of causal masks; what to install is said, and is an error for Hopper's."""
    monkeypatch.setattr(choice, "ptxas_version", lambda: ptxas)
    choice._note.cache_clear()
    case: Any = gpu("9.0"), jnp.dtype("bfloat16"), 128, 4, 64
    assert choose_kernels("auto", *case) == chosen
    said = "pip install 'nvidia-cuda-nvcc-cu12>=12.9.86'"
    assert (said in capsys.readouterr().err) == (chosen == "generic")
    if chosen == "generic":
        with pytest.raises(JaxinferError, match=r"ptxas 12\.[89]\.\d+ makes wrong code"):
            choose_kernels("hopper", *case)


def test_without_numba(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain JAX is the default then, and asking for it is an error that says what to install."""
    monkeypatch.setattr(choice, "find_spec", lambda name: None)
    assert choose_kernels("auto", CPU, jnp.dtype("float32"), 64, 3, 64) == "plain"
    with pytest.raises(JaxinferError, match=r"numba is not installed.*jaxinfer\[cpu\]"):
        choose_kernels("numba", CPU, jnp.dtype("float32"), 64, 3, 64)


def test_a_numba_that_cannot_be_imported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The package refuses a newer NumPy, say; a user who does not want it is not told."""
    for name in [name for name in sys.modules if name.startswith("jaxinfer.pallas_kernels.numba")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delitem(sys.modules, "jaxinfer.pallas_kernels.xla_call", raising=False)

    class Refuses:
        def find_spec(self, name: str, path: Any, target: Any = None) -> None:
            if name in ("jaxinfer.pallas_kernels.numba_cpu", "numba"):
                raise ImportError("Numba needs NumPy 2.3 or less.\nGot NumPy 2.4.")

    monkeypatch.setattr(choice, "find_spec", lambda name: object())
    monkeypatch.setattr(sys, "meta_path", [Refuses(), *sys.meta_path])
    monkeypatch.delattr(pallas_kernels, "numba_cpu", raising=False)
    choice._note.cache_clear()
    case = CPU, jnp.dtype("float32"), 64, 3, 64
    assert choose_kernels("plain", *case) == "plain"
    assert capsys.readouterr().err == ""
    why = "numba cannot be imported: ImportError: Numba needs NumPy 2.3 or less. Got NumPy 2.4."
    assert choose_kernels("auto", *case) == choose_kernels("auto", *case) == "plain"
    assert capsys.readouterr().err == f"jaxinfer: kernels of numba are left out: {why}\n"
    with pytest.raises(JaxinferError, match=f"^kernels is numba, {why}: auto, plain"):
        choose_kernels("numba", *case)


@pytest.mark.parametrize("kernels", ["generic", "hopper"])
def test_refused_before_anything_is_loaded(tiny_folder: Path, kernels: str) -> None:
    with pytest.raises(JaxinferError, match=f"kernels is {kernels}, the device is a cpu"):
        LLM(str(tiny_folder), progress=False, kernels=kernels, **TINY_OPTIONS)


def prompt_logprobs(llm: LLM, prompt: list[int]) -> np.ndarray:
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    (output,) = llm.generate([{"prompt_token_ids": prompt}], params, progress=False)
    assert output.prompt_logprobs
    rows = [next(iter(found.values())) for found in output.prompt_logprobs[1:] if found]
    return np.array([row.logprob for row in rows])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "bound"), [("int8", 0.075), pytest.param("fp8", 0.15, marks=pytest.mark.long)]
)
def test_a_cache_of_8_bits(dtype: str, bound: float) -> None:
    """The demo model's log-probabilities change little, and by what noise without direction does.

    The text is Python's own help. Noise d in the logits changes a drawn token's log-probability by
    d - log(sum(p exp(d))): to second order its mean is minus half its variance. Within four
    standard errors.
    """
    found = []
    for kv_cache_dtype in ("auto", dtype):
        llm = LLM(
            "smollm2-135m-instruct", progress=False, dtype="float32", page_size=48, num_pages=20,
            kv_cache_dtype=kv_cache_dtype, max_num_seqs=2, max_num_batched_tokens=64,
            token_buckets=[64], max_model_len=512,
        )  # fmt: skip
        found.append(prompt_logprobs(llm, list(llm.tokenizer.encode(topics["types"]))[:450]))
    change = found[1] - found[0]
    assert 0 < np.abs(change).mean() < bound
    error = change.std() / np.sqrt(len(change))
    assert abs(change.mean() + change.var() / 2) < 4 * error


@pytest.mark.parametrize("kv_cache_dtype", [pytest.param("int8", marks=pytest.mark.slow), "fp8"])
def test_a_cache_of_8_bits_in_kernels(tiny_folder: Path, kv_cache_dtype: str) -> None:
    """The same as in plain JAX, but for the kernels' products of bfloat16."""
    options = TINY_OPTIONS | {"page_size": 24, "num_pages": 20}
    found = [
        prompt_logprobs(
            LLM(
                str(tiny_folder),
                progress=False,
                kernels=kernels,
                kv_cache_dtype=kv_cache_dtype,
                **options,
            ),
            list(range(1, 90)),
        )
        for kernels in ("plain", "interpret")
    ]
    assert np.sqrt(np.mean((found[0] - found[1]) ** 2)) < 0.03 * found[0].std()


def test_a_cache_of_8_bits_takes_half_the_memory(tiny_folder: Path, uncompiled: None) -> None:
    """And a scale for each page and head."""
    options = TINY_OPTIONS | {"page_size": 16, "dtype": "bfloat16"}
    wide, narrow = (
        LLM(str(tiny_folder), progress=False, kv_cache_dtype=dtype, **options)
        for dtype in ("auto", "int8")
    )
    kv_bytes = [next(iter(llm.cluster.engines.values())).plan.kv_bytes for llm in (wide, narrow)]
    plan = next(iter(narrow.cluster.engines.values())).plan
    layers, heads = len(plan.pages), plan.config.num_key_value_heads
    assert kv_bytes[1] == kv_bytes[0] // 2 + 2 * 4 * layers * heads * plan.num_pages


def test_more_pages_of_8_bits_than_kernels_address(tiny_folder: Path) -> None:
    options = TINY_OPTIONS | {"num_pages": 2**27, "page_size": 128}
    with pytest.raises(JaxinferError, match=r"num_pages is 134217728, kernels interpret address"):
        LLM(str(tiny_folder), progress=False, kernels="interpret", kv_cache_dtype="int8", **options)


@pytest.mark.parametrize("by_token", [(False, True), (True, False)])
def test_slabs_of_8_bits(by_token: tuple[bool, bool]) -> None:
    """A slab from pages of one size arrives in pages of another, to half a step of both scales."""
    rng = np.random.default_rng(0)
    K, H, size, other = 2, 8, 12, 16
    given = np.float32(rng.normal(size=(2, SLAB_TOKENS, K, H)))

    def pool(page_size: int, by_token: bool) -> KVPages:
        count = SLAB_TOKENS // page_size + 3
        shape = (count, K, page_size, H) if by_token else (count, K, H, page_size)
        scale = jnp.zeros((count, K), jnp.float32)
        values = jnp.zeros((count, K, page_size, H), jnp.int8)
        return KVPages(jnp.zeros(shape, jnp.int8), values, scale, scale)

    nothing, number = jnp.int32(0), jnp.int32(SLAB_TOKENS)
    pages = jnp.arange(1, SLAB_TOKENS // size + 2)
    kv = [pool(size, by_token[0])]
    first = scatter(by_token[0], kv, given[:, None], pages, nothing, number)
    slab = gather(K, jnp.dtype("float32"), by_token[0], first, pages, nothing)
    pages = jnp.arange(1, SLAB_TOKENS // other + 1)
    kv = [pool(other, by_token[1])]
    second = scatter(by_token[1], kv, slab, pages, nothing, number)
    back = gather(K, jnp.dtype("float32"), by_token[1], second, pages, nothing)
    step = np.abs(given).max() / 127
    assert np.abs(back[:, 0] - given).max() <= 1.02 * step


@pytest.mark.gpu
@pytest.mark.skipif(jax.default_backend() != "gpu", reason="interpreted: the tokens above")
def test_log_probabilities_in_bfloat16(tmp_path: Path) -> None:
    """Kernels and plain functions agree but for rounding, for prompts in chunks beside decodes."""
    config = json.loads((ROOT / "configs/gpu/smollm2-135m/config.json").read_text())
    (tmp_path / "config.json").write_text(
        json.dumps(config | {"num_hidden_layers": 1, "vocab_size": 512})
    )
    prompts = [{"prompt_token_ids": [37 * i % 512 for i in range(1, n)]} for n in (150, 20, 70)]
    params = SamplingParams(temperature=0, max_tokens=4, prompt_logprobs=0)
    found = []
    for kernels in ("plain", "auto"):
        llm = LLM(
            str(tmp_path), progress=False, kernels=kernels, dtype="bfloat16", load_format="dummy",
            max_num_seqs=4, max_num_batched_tokens=32, page_size=16, num_pages=40,
            max_model_len=256, token_buckets=[32],
        )  # fmt: skip
        outputs = llm.generate(prompts, params, progress=False)
        found.append(
            [
                position[token].logprob
                for output in outputs
                for token, position in zip(
                    output.prompt_token_ids[1:], (output.prompt_logprobs or [])[1:], strict=True
                )
                if position
            ]
        )
    plain, ours = map(np.array, found)
    assert len(plain) == 149 + 19 + 69 - 3
    assert np.std(plain) > 0.3
    assert abs(plain - ours).mean() < 0.01 * np.std(plain)
