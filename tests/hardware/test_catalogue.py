"""Sizes of known models, and costs against hand-made sums."""

import numpy as np
import pytest

from jaxinfer import JaxinferError
from jaxinfer.hardware.catalogue import Gpu, ModelShape, find_gpu, find_model
from jaxinfer.serving.batch import Work
from jaxinfer.simulate.costs.roofline import KernelEfficiency, RooflineStage


# Parameters as the models' cards say (in 10^9), and KV bytes of a token in bfloat16.
@pytest.mark.parametrize(
    ("model", "billions", "kv_bytes"),
    [
        ("llama-3-8b", 8.03, 131072),
        ("qwen2-7b", 7.62, 57344),
        ("llama-2-7b", 6.738, 524288),
        ("llama-2-13b", 13.016, 819200),
        ("llama-2-70b", 68.98, 327680),
        ("opt-13b", 12.853, 819200),
        ("opt-30b", 29.975, 2 * 48 * 7168 * 2),
        ("opt-66b", 65.72, 2 * 64 * 9216 * 2),
        ("opt-175b", 174.6, 2 * 96 * 12288 * 2),
        ("bloom-176b", 176.247, 4014080),
        ("qwen-72b", 72.288, 2 * 80 * 8192 * 2),
        ("internlm-20b", 20.09, 2 * 60 * 5120 * 2),
        ("codellama-34b", 33.74, 196608),
        ("smollm2-135m-instruct", 0.1345, 46080 // 2),
        ("mixtral-8x7b", 46.703, 131072),
        ("qwen3-30b-a3b", 30.532, 98304),
    ],
)
def test_sizes_of_known_models(model: str, billions: float, kv_bytes: int) -> None:
    shape = find_model(model)
    layers = shape.num_hidden_layers
    assert shape.parameters(layers, True, True) / 1e9 == pytest.approx(billions, rel=2e-3)
    assert shape.kv_bytes(layers, 2) == kv_bytes


@pytest.mark.parametrize(
    ("gpu", "mib"),
    [
        ("A100-80G-SXM", 81920), ("A100-80G-PCIe", 81920), ("H100-SXM", 81559), ("H200", 143771),
        ("A10", 23028), ("A30", 24576), ("L4", 23034), ("L40S", 46068), ("A40", 46068),
        ("T4", 15360), ("RTX-A6000", 49140), ("RTX-3090", 24576), ("RTX-4090", 24564),
        ("V100-SXM2", 32768),
    ],
)  # fmt: skip
def test_memory_is_the_total_that_nvidia_smi_shows(gpu: str, mib: int) -> None:
    assert find_gpu(gpu).memory_gb * 1e9 == pytest.approx(mib * 2**20, abs=100)


TINY = ModelShape(
    hidden_size=8,
    intermediate_size=16,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=10,
)
FULL = KernelEfficiency(flops=1.0, bandwidth=1.0)


def stage(
    gpu: str, efficiency: KernelEfficiency = FULL, last: bool = False, devices: int = 1
) -> RooflineStage:
    return RooflineStage(find_gpu(gpu), TINY, 3, last, devices, 2, efficiency, link_gb_s=1e30)


def test_a_large_prefill_takes_its_flops() -> None:
    """So large that every product is bound by compute."""
    count = 10**9
    work = Work(count, 0, 1, 0, 0, [(0, count)])
    # Per layer: Q, O of 64 and K, V of 32 parameters, three of 128 for the feed-forward layer.
    products = 2 * count * (64 + 32 + 32 + 64 + 3 * 128)
    attention = 4 * 8 * count * (count + 1) / 2
    expected = 3 * (products + attention) / 312e12
    # Narrow matrices move many numbers per product: they are bound by memory even so.
    moved = 2 * count * (8 + 16 + 8 + 8 + 8 + 32 + 16 + 8) / 2039e9
    assert stage("A100-80G-SXM").seconds(work) == pytest.approx(
        3 * (attention / 312e12 + moved), rel=1e-3
    )
    assert expected < stage("A100-80G-SXM").seconds(work)


def test_a_decode_takes_its_bytes() -> None:
    work = Work(1, 1, 1, 1, 1000, [])
    parameters = 64 + 32 + 32 + 64 + 3 * 128
    moved = 8 + 16 + 8 + 8 + 8 + 32 + 16 + 8
    kv = 1000 * 2 * 2 * 2
    expected = (3 * (2 * (parameters + moved) + 2 * kv) + 2 * (80 + 18)) / 600e9
    assert stage("A10", last=True).seconds(work) == pytest.approx(expected)
    half = KernelEfficiency(flops=1.0, bandwidth=0.5, step_s=0.25, sequence_s=0.5)
    assert stage("A10", half, last=True).seconds(work) == pytest.approx(2 * expected + 0.75)


def slow(
    flops: float,
    bandwidth: float,
    last: bool = False,
    devices: int = 1,
    itemsize: int = 2,
    link: float = 1.0,
    efficiency: KernelEfficiency = FULL,
    **model: object,
) -> RooflineStage:
    """TINY's three layers at the given FLOPs and bytes per second, with links of the same kind."""
    gpu = Gpu(
        bf16_tflops=flops / 1e12,
        memory_gb=1,
        memory_gb_s=bandwidth / 1e9,
        link="none",
        link_gb_s=1,
        watts=1,
        checked=True,
    )
    shape = TINY.model_copy(update=model)
    return RooflineStage(gpu, shape, 3, last, devices, itemsize, efficiency, link / 1e9)


# Weights of a layer's matrices, and numbers that come and go for each token, where D is 8, N is 4,
# K is 2, H is 2, F is 16: queries, keys and values; output; two matrices up, or one; down.
QKV, OUT, UPS, UP, DOWN = (128, 24), (64, 16), (256, 40), (128, 24), (128, 24)
# A chunk of 5 after 3 entries has 4 + 5 + 6 + 7 + 8 pairs, each 4 operations for 8 numbers.
CHUNK, PAIRS = Work(5, 0, 1, 0, 0, [(3, 5)]), 30 * 4 * 8


@pytest.mark.parametrize(("gated", "ups"), [(True, UPS), (False, UP)])
def test_a_chunk_by_hand(gated: bool, ups: tuple[int, int]) -> None:
    """Bound by compute, by memory, or each operator by its own; no head without a sample."""
    matrices = (QKV, OUT, ups, DOWN)
    computed = [2 * weights * 5 for weights, _ in matrices]
    moved = [2 * (weights + 5 * numbers) for weights, numbers in matrices]
    kv = 8 * 16  # All 8 entries that the chunk sees, of 2 x 2 x 2 numbers.
    no_memory, no_compute = slow(100.0, 1e12, gated=gated), slow(1e12, 50.0, gated=gated)
    assert no_memory.seconds(CHUNK) == pytest.approx(3 * (sum(computed) + PAIRS) / 100)
    assert no_compute.seconds(CHUNK) == pytest.approx(3 * (sum(moved) + kv) / 50)
    # At 2.5 operations for a byte, the wider matrices wait for memory less than for compute.
    each = [max(c / 100, m / 40) for c, m in zip(computed, moved, strict=True)]
    assert {c / 100 > m / 40 for c, m in zip(computed, moved, strict=True)} == {True, False}
    both = slow(100.0, 40.0, gated=gated, last=True)
    assert both.seconds(CHUNK) == pytest.approx(3 * (sum(each) + max(PAIRS / 100, kv / 40)))


def test_the_head_is_paid_for_rows_that_sample() -> None:
    """80 weights, and 18 numbers for each of the 2 rows; its compute counts those rows, too."""
    work = Work(7, 1, 3, 2, 9, [(0, 4), (6, 2)])
    for flops, head in ((1e12, 2 * (80 + 2 * 18) / 50), (1.0, 2 * 80 * 2 / 1.0)):
        stages = [slow(flops, 50.0, last=last) for last in (False, True)]
        middle, last = (each.seconds(work) for each in stages)
        assert last - middle == pytest.approx(head)


def test_decodes_and_chunks_are_kernels_of_their_own() -> None:
    """The decodes' entries are read after the chunks', not while these are computed."""
    alone = Work(6, 1, 2, 0, 0, [(3, 5)])
    beside = Work(6, 1, 2, 0, 40, [(3, 5)])
    for flops in (1e12, 1.0):
        stage = slow(flops, 50.0)
        assert stage.seconds(beside) - stage.seconds(alone) == pytest.approx(3 * 40 * 16 / 50)
    # With 32-bit numbers all bytes are twice as many.
    narrow, wide = (slow(1e12, 50.0, itemsize=size).seconds(beside) for size in (2, 4))
    assert wide == pytest.approx(2 * narrow)


@pytest.mark.parametrize(
    ("tokens", "read"), [(1, 2.0), (2, 3.0), (3, 3.5), (40, 4 * (1 - 2.0**-40))]
)
def test_a_mixture_reads_the_experts_that_its_tokens_choose(tokens: int, read: float) -> None:
    """Two of four experts: one token reads two of them, a second one of the other two."""
    each = 2 * tokens / read
    work = Work(tokens, 0, 1, 0, 0, [(0, tokens)])
    experts = {"num_experts": 4, "num_experts_per_tok": 2}
    dense = [QKV, OUT]
    moved = sum(2 * (w + tokens * n) for w, n in dense) + tokens * 16
    moved += read * sum(2 * (w + each * n) for w, n in (UPS, DOWN))
    assert slow(1e12, 50.0, **experts).seconds(work) == pytest.approx(3 * moved / 50)
    # Each token is computed by two experts, however many there are.
    flops = sum(2 * w * tokens for w, _ in dense) + 4 * 8 * tokens * (tokens + 1) / 2
    flops += 2 * tokens * sum(2 * w for w, _ in (UPS, DOWN))
    assert slow(100.0, 1e12, **experts).seconds(work) == pytest.approx(3 * flops / 100)


def test_experts_read_are_those_that_random_tokens_choose() -> None:
    """2,000 batches in which each token draws 8 of 64, without putting one back."""
    random, shape = np.random.default_rng(0), find_model("qwen3-30b-a3b")
    shape = shape.model_copy(update={"num_experts": 64})
    for tokens in (1, 3, 20):
        chosen = random.random((2000, tokens, 64)).argpartition(8, axis=2)[..., :8]
        drawn = [len(np.unique(batch)) for batch in chosen]
        error = np.std(drawn) / len(drawn) ** 0.5
        assert abs(np.mean(drawn) - shape.experts_read(tokens)) <= 4 * error + 1e-9
    # As ever without experts, there is one feed-forward layer.
    assert TINY.experts_read(7) == 1


@pytest.mark.parametrize(("flops", "bandwidth"), [(100.0, 1e12), (1e12, 50.0)])
def test_devices_share_a_layer_and_the_head(flops: float, bandwidth: float) -> None:
    work = Work(7, 1, 3, 2, 9, [(0, 4), (6, 2)])
    one, two = (
        slow(flops, bandwidth, last=True, devices=n, link=1e15).seconds(work) for n in (1, 2)
    )
    assert two == pytest.approx(one / 2)


@pytest.mark.parametrize(("devices", "share"), [(1, 0.0), (2, 1 / 2), (4, 3 / 4)])
def test_all_reduces_are_rings(devices: int, share: float) -> None:
    """Two in a layer, of 8 16-bit numbers per token; each device sends 2 (n - 1) / n of them."""
    stage = slow(1e15, 1e15, devices=devices, link=10.0)
    reduced = 2 * 2 * share * 5 * 8 * 2
    assert stage.seconds(CHUNK) == pytest.approx(3 * reduced / 10, abs=1e-9)


def test_efficiencies_are_shares_of_the_peaks() -> None:
    """And of the engine's time, a part comes with the step, the rest with its three sequences."""
    work = Work(7, 1, 3, 2, 9, [(0, 4), (6, 2)])
    engine = {"step_s": 1000.0, "sequence_s": 100.0}
    for flops, bandwidth in ((100.0, 1e12), (1e12, 50.0)):
        half = KernelEfficiency(flops=0.5, bandwidth=0.25, **engine)
        expected = slow(flops / 2, bandwidth / 4, last=True).seconds(work) + 1300
        found = slow(flops, bandwidth, last=True, efficiency=half).seconds(work)
        assert found == pytest.approx(expected)


def test_unknown_names() -> None:
    with pytest.raises(JaxinferError, match="no GPU 'A100': known: A100-80G-SXM, A100-80G-PCIe"):
        find_gpu("A100")
    with pytest.raises(JaxinferError, match="did you mean 'llama-3-8b'"):
        find_model("llama3-8b")
