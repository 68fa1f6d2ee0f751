"""Checksums of transfers find what does not arrive."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from failure_cases import CRONUS, PARAMS, PROMPTS, cluster, tokens

from jaxinfer import LLM, JaxinferError
from jaxinfer.config.run_file import as_run_file
from jaxinfer.runtime.kv.checksums import checksum
from jaxinfer.runtime.kv.slab import SlabDest


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_checksums_see_any_bit_and_any_place(dtype: str) -> None:
    rng = np.random.default_rng(0)
    slab = np.asarray(jnp.asarray(rng.normal(size=(2, 3, 5, 2, 4)), dtype))
    before = np.asarray(checksum(jnp.asarray(slab)))
    assert before.shape == (3, 5)
    for _ in range(50):
        changed = slab.copy()
        a, layer, t, k, h = (int(rng.integers(n)) for n in slab.shape)
        bits = changed.view(np.uint32 if dtype == "float32" else np.uint16)
        bits[a, layer, t, k, h] ^= 1 << int(rng.integers(8 * slab.dtype.itemsize))
        found = np.asarray(checksum(jnp.asarray(changed))) != before
        assert np.argwhere(found).tolist() == [[layer, t]]
    swapped = slab[:, :, :, ::-1]
    assert (np.asarray(checksum(jnp.asarray(swapped))) != before).all()


def test_verified_transfers_change_nothing(tiny_folder: Path, tiny: LLM) -> None:
    llm = cluster(tiny_folder, CRONUS, "a", "b", verify_transfers=True)
    expected = tokens(tiny.generate(PROMPTS, PARAMS, progress=False))
    assert tokens(llm.generate(PROMPTS, PARAMS, progress=False)) == expected


def test_a_page_that_arrives_changed_is_named(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = cluster(tiny_folder, CRONUS, "a", "b", verify_transfers=True)
    place = SlabDest.place

    def changing(self: SlabDest, array: jax.Array, *tokens: Any) -> Any:
        return place(self, array.at[1, 1, 9].add(1), *tokens)

    monkeypatch.setattr(SlabDest, "place", changing)
    with pytest.raises(JaxinferError) as caught:
        llm.generate(PROMPTS, PARAMS, progress=False)
    assert "from a to b: layer 1, page " in str(caught.value)
    assert "(token 9) is not what was sent" in str(caught.value)


def test_entries_of_8_bits_are_refused_before_anything_is_loaded() -> None:
    instances = {"a": {"group": "g"}, "b": {"group": "h", "kv_cache_dtype": "int8"}}
    run = {"groups": {"g": {}, "h": {}}, "instances": instances, "verify_transfers": True}
    with pytest.raises(
        JaxinferError, match=r"^instances\.b\.kv_cache_dtype is int8, must be auto: verify_transf"
    ):
        as_run_file(run).cluster()
    assert as_run_file(run | {"verify_transfers": False}).cluster().instances
