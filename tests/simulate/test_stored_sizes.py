"""Weights and KV of 8 bits in the modelled world: pools, times, transfers, what is refused."""

from dataclasses import replace
from typing import Any

import pytest

from jaxinfer import JaxinferError
from jaxinfer.config.resolve import resolve
from jaxinfer.config.run_file import RunFile, as_run_file
from jaxinfer.config.site import model_site
from jaxinfer.lab.validate.calibrate import calibrate_group
from jaxinfer.serving.batch import Work
from jaxinfer.simulate.cluster import model_cluster

# Llama 3 8B on an A100 of 80 GiB, nine tenths of it, 5 GB kept.
ROOM = 80 * 2**30 * 0.9 - 5e9
# Of the layers; the embedding and the head have 16 bits.
WEIGHTS = 32 * 4096 * (2 * 4096 + 2 * 1024 + 3 * 14336)
TABLES = 2 * 128256 * 4096


def config(devices: int = 1, **engines: dict[str, Any]) -> RunFile:
    """Instances of these options, each on a group of its own."""
    return as_run_file(
        {
            "model": "llama-3-8b",
            "engine": {"page_size": 16, "max_num_seqs": 8},
            "groups": {name: {"kind": "A100-80G-SXM", "devices": devices} for name in engines},
            "instances": {name: {"group": name} | options for name, options in engines.items()},
            "links": [{"between": [a, b], "gb_s": 10} for a in engines for b in engines if a < b],
            "system": {
                "name": "data_parallel",
                "shares": {name: {"weight": 1, "max_waiting": 1} for name in engines},
            },
            "simulate": {"flops": 0.5, "bandwidth": 0.5, "reserve_gb": 5},
        }
    )


# By weight_dtype and kv_cache_dtype: bytes of a weight, and of a page of 16 tokens in a layer.
# Entries of 8 bits have a float32 for each of 8 heads, of keys and of values.
@pytest.mark.parametrize("devices", [1, 4])
@pytest.mark.parametrize(
    ("weights", "kv", "size", "page"),
    [
        ("auto", "auto", 2, 16 * 2 * 8 * 128 * 2),
        ("int8", "auto", 1, 16 * 2 * 8 * 128 * 2),
        ("fp8", "int8", 1, 16 * 2 * 8 * 128 + 2 * 8 * 4),
        ("auto", "fp8", 2, 16 * 2 * 8 * 128 + 2 * 8 * 4),
    ],
)
def test_pools(weights: str, kv: str, size: int, page: int, devices: int) -> None:
    found = config(devices, x={"weight_dtype": weights, "kv_cache_dtype": kv})
    instance = model_cluster(model_site(replace(resolve(found), pairs=()))).instances["x"]
    held = WEIGHTS * size + TABLES * 2
    fits = (ROOM - held / devices) // (32 * page / devices)
    assert instance.num_pages == [fits]


def test_a_decode_reads_what_is_stored() -> None:
    """Bound by bytes: half the weights' bytes; half those of entries; hidden states as before."""
    kinds = {
        "wide": {},
        "weights": {"weight_dtype": "int8"},
        "kv": {"kv_cache_dtype": "int8"},
        "both": {"weight_dtype": "fp8", "kv_cache_dtype": "fp8"},
    }
    cluster = model_cluster(model_site(replace(resolve(config(1, **kinds)), pairs=())))
    work = Work(8, 8, 8, 8, 80_000, [], 8)
    (wide,), (weights,), (kv,), (both,) = (
        cluster.instances[name].cost.stages(work) for name in kinds
    )
    bandwidth = 2039e9 * 0.5
    assert wide - weights == pytest.approx(WEIGHTS / bandwidth)
    assert wide - kv == pytest.approx(80_000 * 32 * 2 * 8 * 128 / bandwidth)
    assert wide - both == pytest.approx((wide - weights) + (wide - kv))


def test_a_prefill_is_computed_as_before() -> None:
    cluster = model_cluster(
        model_site(replace(resolve(config(1, wide={}, narrow={"weight_dtype": "fp8"})), pairs=()))
    )
    work = Work(8000, 0, 1, 1, 0, [(0, 8000)])
    wide, narrow = (cluster.instances[name].cost.stages(work)[0] for name in ("wide", "narrow"))
    assert narrow == pytest.approx(wide, rel=1e-3)


@pytest.mark.parametrize(
    ("source", "dest", "itemsize"),
    [("auto", "auto", 2), ("auto", "int8", 1), ("fp8", "auto", 1), ("int8", "fp8", 1)],
)
def test_the_narrower_kv_goes(source: str, dest: str, itemsize: int) -> None:
    """The narrower format is sent, whatever the weights are of."""
    found = config(
        1, a={"kv_cache_dtype": source, "weight_dtype": "int8"}, b={"kv_cache_dtype": dest}
    )
    (lane,) = model_cluster(model_site(replace(resolve(found), pairs=[("a", "b")]))).lanes["a", "b"]
    assert lane.token_bytes == 32 * 2 * 8 * 128 * itemsize


def test_hidden_states_are_of_16_bits() -> None:
    data = config(1, a={}, b={}).model_dump(exclude_unset=True)
    stages = [{"group": "a", "layers": 16}, {"group": "b", "layers": 16}]
    data["system"] = "single"
    data["instances"] = {"x": {"stages": stages, "weight_dtype": "int8", "kv_cache_dtype": "int8"}}
    (hop,) = (
        model_cluster(model_site(replace(resolve(as_run_file(data)), pairs=())))
        .instances["x"]
        .cost.hops(Work(100, 0, 1, 1, 0, [(0, 100)]))
    )
    assert hop == pytest.approx(100 * 4096 * 2 / 10e9)


def test_a_calibration_reads_what_is_stored(tmp_path: Any) -> None:
    """Points of the modelled times themselves: what was set is found again."""
    found = config(1, a={"weight_dtype": "int8", "kv_cache_dtype": "fp8"})
    cost = model_cluster(model_site(replace(resolve(found), pairs=()))).instances["a"].cost
    lines = ["chunk_tokens,chunk_context,decodes,decode_context,seconds"]
    for chunk, decodes, context in ((4000, 0, 0), (2000, 0, 0), (0, 4, 900), (0, 64, 3000)):
        chunks = [(0, chunk)] * bool(chunk)
        rows = decodes + bool(chunk)
        work = Work(chunk + decodes, decodes, rows, rows, decodes * context, chunks, decodes)
        lines.append(f"{chunk},0,{decodes},{context},{cost.stages(work)[0]}")
    file = tmp_path / "points.csv"
    file.write_text("\n".join(lines) + "\n")
    calibration, _ = calibrate_group(found, "a", file)
    assert calibration.efficiency.flops == pytest.approx(0.5, rel=1e-3)
    assert calibration.efficiency.bandwidth == pytest.approx(0.5, rel=1e-3)


def test_what_is_not_modelled_is_refused() -> None:
    with pytest.raises(JaxinferError) as error:
        model_cluster(model_site(replace(resolve(config(1, x={"dtype": "float32"})), pairs=())))
    assert str(error.value) == (
        "instances.x.dtype is float32, must be auto or bfloat16: others are not modelled"
    )
    with pytest.raises(JaxinferError, match=r"instances\.x\.weight_dtype is 'int4', must"):
        config(1, x={"weight_dtype": "int4"})
    with pytest.raises(
        JaxinferError, match="int8 is a format of weights alone: weight_dtype: int8"
    ):
        config(1, x={"dtype": "int8"})


def test_layouts_have_the_same_sizes() -> None:
    """A layout changes nothing on one device: bytes held, and what steps take."""
    kinds = {"plain": {}, "laid": {"layout": "megatron"}}
    found = config(1, **{n: {"weight_dtype": "int8"} | each for n, each in kinds.items()})
    cluster = model_cluster(model_site(replace(resolve(found), pairs=())))
    plain, laid = (cluster.instances[name] for name in kinds)
    assert plain.num_pages == laid.num_pages
    work = Work(8, 8, 8, 8, 80_000, [], 8)
    assert laid.cost.stages(work) == pytest.approx(plain.cost.stages(work), rel=1e-3)
