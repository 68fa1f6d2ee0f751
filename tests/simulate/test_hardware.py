"""Sizes of known models, and costs against hand-made sums."""

import pytest

from jaxinfer import JaxinferError
from jaxinfer.serving.work import Work
from jaxinfer.simulate.hardware import ModelShape, find_gpu, find_model
from jaxinfer.simulate.roofline import Efficiency, RooflineStage


# Parameters as the models' cards say (in 10^9), and KV bytes of a token in bfloat16.
@pytest.mark.parametrize(
    ("model", "billions", "kv_bytes"),
    [
        ("llama-3-8b", 8.03, 131072),
        ("qwen2-7b", 7.62, 57344),
        ("llama-2-70b", 68.98, 327680),
        ("codellama-34b", 33.74, 196608),
        ("smollm2-135m-instruct", 0.1345, 46080 // 2),
    ],
)
def test_sizes_of_known_models(model: str, billions: float, kv_bytes: int) -> None:
    shape = find_model(model)
    layers = shape.num_hidden_layers
    assert shape.parameters(layers, True, True) / 1e9 == pytest.approx(billions, rel=2e-3)
    assert shape.kv_bytes(layers, 2) == kv_bytes


TINY = ModelShape(
    hidden_size=8, intermediate_size=16, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=2, vocab_size=10,
)  # fmt: skip
FULL = Efficiency(flops=1.0, bandwidth=1.0)


def stage(
    gpu: str, efficiency: Efficiency = FULL, last: bool = False, devices: int = 1
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
    half = Efficiency(flops=1.0, bandwidth=0.5, step_s=0.25, sequence_s=0.5)
    assert stage("A10", half, last=True).seconds(work) == pytest.approx(2 * expected + 0.75)


def test_devices_share_a_layer() -> None:
    work = Work(7, 0, 1, 1, 0, [(100, 7)])
    one, two = (stage("A10", last=True, devices=n).seconds(work) for n in (1, 2))
    assert two == pytest.approx(one / 2)


def test_unknown_names() -> None:
    with pytest.raises(JaxinferError, match="no GPU 'A100': known: A100-80G-SXM, A100-80G-PCIe"):
        find_gpu("A100")
    with pytest.raises(JaxinferError, match="did you mean 'llama-3-8b'"):
        find_model("llama3-8b")
