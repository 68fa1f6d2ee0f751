"""What cannot be a hand-off is one error, which names what an adapter has given."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxinfer.lab.conformance import GoldenModel, KVLayout, Side, check, hand_over, move

sys.path.append(str(Path(__file__).parents[2] / "examples"))
from conformance_numpy import NumpyEngine, transfer

MODEL = GoldenModel()


class Reserving(NumpyEngine):
    """An engine that gives a request other pages."""

    def __init__(self, change: Callable[[list[int]], Any]) -> None:
        super().__init__(24, 10)
        self._change = change

    def reserve(self, request: int, length: int) -> Any:
        return self._change(super().reserve(request, length))


class Reading(NumpyEngine):
    """An engine that reads other pools."""

    def __init__(self, change: Callable[[dict[Any, Any]], Any]) -> None:
        super().__init__(24, 10)
        self._change = change

    def read(self) -> Any:
        return self._change(dict(super().read()))


def handed(dest: NumpyEngine, lengths: Any = (75, 50), pages: int = 16) -> object:
    source = NumpyEngine(16, pages)
    return hand_over(MODEL, source, dest, lambda *r: transfer(source, dest, *r), lengths)


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        ((), "lengths has 0 requests, must have 1 to 12"),
        ((0,), r"hand_over: lengths\[0\] is 0, must be an integer from 1 on"),
        ((5, -5), r"hand_over: lengths\[1\] is -5, must be an integer from 1 on"),
        ((1.5,), r"hand_over: lengths\[0\] is 1\.5, must be an integer from 1 on"),
    ],
)
def test_lengths(lengths: Any, message: str) -> None:
    with pytest.raises(ValueError, match=rf"^{message}$"):
        handed(NumpyEngine(24, 10), lengths)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda p: p[:-1], "request 0 of 75 tokens has 3 pages of 24, needs 4"),
        (lambda p: [1] * len(p), "request 0 has page 1 twice"),
        (lambda p: [99, *p], "request 0 has page 99, the last one is 9"),
        (lambda p: [-1, *p], r"request 0: pages\[0\] is -1, must be an integer from 0 on"),
        (lambda p: [float(x) for x in p], r"request 0: pages\[0\] is 1\.0, must be an integer fro"),
        (lambda p: None, "pages of request 0 are None, must be a list of integers"),
    ],
)
def test_reserve(change: Callable[[list[int]], Any], message: str) -> None:
    with pytest.raises(ValueError, match=rf"^dest\.reserve\(0, 75\): {message}"):
        handed(Reserving(change))


@pytest.mark.parametrize("change", [lambda p: [*p, 0], tuple, np.array])
def test_more_pages_than_needed_and_other_sequences_are_well(change: Any) -> None:
    assert handed(Reserving(change)) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda p: None, "pools are NoneType, must be a mapping"),
        (lambda p: {}, r"LayerPages\(stage=0, rank=0, layer=0\): the layout alone has it"),
        (
            lambda p: {k: (a.pages.tolist(), b) for k, (a, b) in p.items()},
            r"LayerPages.*: the engine has list, must be a Pool of numpy's arrays",
        ),
        (lambda p: dict.fromkeys(p, 1), r"LayerPages.*: must have keys and values"),
    ],
)
def test_read(change: Callable[[dict[Any, Any]], Any], message: str) -> None:
    with pytest.raises(ValueError, match=rf"^dest\.read\(\): {message}$"):
        handed(Reading(change))


def test_pools_of_no_size() -> None:
    with pytest.raises(ValueError, match=r"^source\.num_pages: a pool of 200 pages holds 3200 tok"):
        handed(NumpyEngine(24, 10), pages=200)
    with pytest.raises(ValueError, match=r"^dest\.num_pages: Side: num_pages is 0, must be"):
        handed(NumpyEngine(24, 0))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: KVLayout(page_size=0), "KVLayout: page_size is 0, must be an integer from 1 on"),
        (lambda: KVLayout(page_size=-1), "KVLayout: page_size is -1, must be"),
        (lambda: KVLayout(tp=0), "KVLayout: tp is 0, must be"),
        (lambda: KVLayout(keys="XYZ"), "keys is 'XYZ', must be one of HND, NHD, HDN"),  # type: ignore[arg-type]
        (lambda: KVLayout(stages=(1, -1)), r"KVLayout: stages\[1\] is -1, must be"),
        (lambda: GoldenModel(heads=0), "GoldenModel: heads is 0, must be"),
        (lambda: GoldenModel(layers=0), "GoldenModel: layers is 0, must be"),
        (lambda: GoldenModel(windows=(0,) * 4), r"GoldenModel: windows\[0\] is 0, must be"),
        (lambda: Side(MODEL, KVLayout(), 4, 3), "former is 3, must be from 12 to 15"),
    ],
)
def test_sizes_that_nothing_has(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def sides() -> tuple[Side, Side]:
    source, dest = Side(MODEL, KVLayout(tp=2), 10, 12), Side(MODEL, KVLayout(page_size=24), 10, 13)
    source.add(0, 50, [1, 2, 3, 4])
    dest.add(0, 50, [1, 2, 3])
    source.fill(0)
    move(source, dest, 0)
    return source, dest


def test_checks_of_nothing() -> None:
    source, dest = sides()
    assert check(source, dest, [0]) == []
    with pytest.raises(ValueError, match=r"^requests is empty: nothing would be checked$"):
        check(source, dest, [])
    with pytest.raises(ValueError, match=r"^request 7 is not at the source, which has 0$"):
        check(source, dest, [7])
    with pytest.raises(ValueError, match=r"^wire is 'nosuch', must be one of float32, "):
        check(source, dest, [0], wire="nosuch")
    dest.lengths[0] = 49
    with pytest.raises(ValueError, match=r"^request 0 has 50 tokens at the source, 49 at the dest"):
        check(source, dest, [0])


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (0, "request 0 is there already"),
        (99, "request is 99, must be below 12: others are pools' pasts"),
        (-1, "add: request is -1, must be an integer from 0 on"),
    ],
)
def test_requests_that_cannot_be_added(request_: int, message: str) -> None:
    with pytest.raises(ValueError, match=rf"^{message}$"):
        sides()[0].add(request_, 16, [5])


@pytest.mark.parametrize("dest_dtype", ["bfloat16", "float32"])
def test_cut_is_not_rounded(dest_dtype: str) -> None:
    """Rounded to the nearest, half of the numbers would be others."""
    names = "float32", dest_dtype
    source, dest = (Side(MODEL, KVLayout(kv_dtype=n), 4, 12 + i) for i, n in enumerate(names))
    for side in (source, dest):
        side.add(0, 40, [1, 2, 3])
    source.fill(0)
    for rounded in (True, False):
        for shard in source.pools:
            entries = source.get(shard, [1, 2, 3], 0, 40)
            bits = entries.view(np.uint32).astype(np.uint64)
            bits += (0x7FFF + ((bits >> 16) & 1)) * rounded
            cut = (bits.astype(np.uint32) & 0xFFFF0000).view(np.float32)
            dest.put(shard, [1, 2, 3], 0, cut)
        found = [each.name for each in check(source, dest, [0], wire="bfloat16")]
        assert found == ([] if rounded else ["rounded"])
