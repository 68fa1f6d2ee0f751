"""Every kernel lowers to CUDA for GPUs that are not here, with the jax that is installed."""

import pytest

from scripts.kernels.lower_kernels import lower, variants

VARIANTS = {variant.name: variant for variant in variants()}
# Shapes, dtypes and options; few of them have every dtype, with and without a window.
CASES = list(dict.fromkeys(name.partition(": ")[2] for name in VARIANTS))
FEW = CASES[::11]


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            name,
            marks=[]
            if name.partition(": ")[2] in FEW
            else (pytest.mark.long if number % 2 else pytest.mark.slow),
        )
        for number, name in enumerate(VARIANTS)
    ],
)
def test_lowers(name: str) -> None:
    variant = VARIANTS[name]
    found = {gpu: lower(variant, gpu) for gpu in variant.gpus}
    assert found == dict.fromkeys(variant.gpus, "yes")


def test_what_a_gpu_does_not_have() -> None:
    """Entries of fp8 are not multiplied on an A100, nor is wgmma anywhere but on Hopper."""
    gpus = {name: variant.gpus for name, variant in VARIANTS.items()}
    assert all("A100" not in on for name, on in gpus.items() if "float8" in name)
    assert all(on == ("H100",) for name, on in gpus.items() if name.startswith("hopper"))
    assert {"H100", "A100", "L4"} == {gpu for on in gpus.values() for gpu in on}
