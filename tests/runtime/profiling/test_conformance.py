"""Hand-offs of all sides: what arrives, by the number formats and in bytes, and refusals."""

from collections.abc import Iterator
from itertools import combinations, product
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cluster_cases import free_executables
from stage_cases import entries, pages_of, plans

from jaxinfer import JaxinferError
from jaxinfer.checkpoints.small_model import HEAD_DIM, LAYERS, small_checkpoint
from jaxinfer.lab.hand_offs.golden import golden_model
from jaxinfer.lab.hand_offs.measured import Conformance, HandOffCheck
from jaxinfer.lab.hand_offs.sides import (
    VALUES,
    HandOffSide,
    covering_sides,
    with_values,
)
from jaxinfer.pallas_kernels.kv_pages import KVPages, write_kv
from jaxinfer.runtime.kv.kv_entries import allowed_change, compare_entries, read_entries
from jaxinfer.runtime.kv.slab import SlabDest


def test_any_two_values_stand_together_in_a_side() -> None:
    sides = covering_sides(VALUES)
    assert sides[0] == HandOffSide()
    for one, other in combinations(VALUES, 2):
        together = {(getattr(side, one), getattr(side, other)) for side in sides}
        assert together == set(product(VALUES[one], VALUES[other])), (one, other)
    own = [side for side in sides if side.kv_cache_dtype == "auto"]
    for name in VALUES.keys() - {"dtype", "kv_cache_dtype"}:
        together = {(side.dtype, getattr(side, name)) for side in own}
        assert together == set(product(VALUES["dtype"], VALUES[name])), name
    # Six for two dtypes with three page sizes, and six for two KV dtypes with these.
    assert len(set(sides)) == len(sides) == 12


def test_values_of_one_s_own() -> None:
    values = with_values(["page_size=8, 48", "stages=1"])
    assert values == VALUES | {"page_size": (8, 48), "stages": (1,)}
    only = {name: some[:1] for name, some in VALUES.items()}
    assert covering_sides(only) == [HandOffSide()]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("page_sise=8", "no setting 'page_sise': did you mean 'page_size'?"),
        ("page_size=", "must be page_size=A,B,... with an integer from 1 on each"),
        ("page_size=x", "must be page_size=A,B,... with an integer from 1 on each"),
        ("page_size=0", "must be page_size=A,B,... with an integer from 1 on each"),
        ("dtype=16", "must be dtype=A,B,... with a name each"),
    ],
)
def test_values_that_are_none(text: str, message: str) -> None:
    with pytest.raises(JaxinferError) as caught:
        with_values([text])
    assert str(caught.value) == f"--values {text}: {message}"


def test_values_given_twice_are_refused() -> None:
    """The second would put the first aside."""
    with pytest.raises(JaxinferError) as caught:
        with_values(["page_size=8", "stages=1", "page_size=48"])
    assert str(caught.value) == (
        "--values page_size=48: page_size has values by page_size=8: give all of them once, "
        "page_size=8,48"
    )


@pytest.mark.parametrize("text", ["page_size=[8", "page_size=8]", "page_size=2024-13-45"])
def test_values_that_are_no_yaml(text: str) -> None:
    with pytest.raises(JaxinferError) as caught:
        with_values([text])
    assert str(caught.value).startswith(f"--values {text}: ")
    assert "\n" not in str(caught.value)


# Layers, tokens and heads of what is drawn; larger numbers in some heads.
L, T, K, H = 2, 300, 3, 8


def drawn(seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    spread = 10.0 ** rng.uniform(-2, 2, (L, 2, 1, K, 1))
    return (rng.normal(size=(L, 2, T, K, H)) * spread).astype(np.float32)


def rounded_to_bfloat16(x: np.ndarray) -> np.ndarray:
    """Round to nearest, ties to even, on the bits."""
    bits = x.view(np.uint32).astype(np.uint64)
    bits += 0x7FFF + ((bits >> 16) & 1)
    return (bits.astype(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)


def test_bfloat16_rounds_by_half_a_step_and_once() -> None:
    sent = drawn(0)
    narrow = rounded_to_bfloat16(sent)
    for wire, stored in (
        ("bfloat16", "bfloat16"),
        ("bfloat16", "float32"),
        ("float32", "bfloat16"),
    ):
        allowed = allowed_change(sent, jnp.dtype(wire), jnp.dtype(stored), 16)
        np.testing.assert_array_equal(allowed, np.abs(narrow - sent))
        assert (allowed <= 2.0**-8 * np.abs(sent)).all()
    # The way back, and float32 throughout, change nothing.
    for x, wire, stored in ((narrow, "bfloat16", "float32"), (sent, "float32", "float32")):
        assert not allowed_change(x, jnp.dtype(wire), jnp.dtype(stored), 16).any()


@pytest.mark.parametrize("kind", ["int8", "float8_e4m3fn"])
def test_only_pages_that_two_slabs_write_may_be_rounded_twice(kind: str) -> None:
    """Entries that are all alike: so is what is allowed, but from 240 to 264."""
    alike = np.full((1, 2, 300, 1, 4), 3.0, np.float32)
    for page_size, twice in ((16, slice(0)), (64, slice(0)), (24, slice(240, 264))):
        allowed = allowed_change(alike, jnp.dtype("float32"), jnp.dtype(kind), page_size)
        more = np.flatnonzero(allowed[0, 0, :, 0, 0] > 1.5 * allowed.min())
        np.testing.assert_array_equal(more, np.arange(300)[twice])


@pytest.mark.parametrize("by_token", [False, True])
@pytest.mark.parametrize("page_size", [16, 24, 64])
@pytest.mark.parametrize("kind", ["int8", "float8_e4m3fn"])
def test_8_bits_round_by_no_more_than_is_allowed(kind: str, page_size: int, by_token: bool) -> None:
    """Written as slabs are: 256 tokens, then the rest, so that pages of 24 are written twice."""
    sent, count = drawn(1), -(-T // page_size) + 1
    table = 1 + np.random.default_rng(2).permutation(count - 1)
    page, offset = np.divmod(np.arange(T), page_size)
    shape = (count, K, page_size, H)
    found = np.empty_like(sent)
    for layer in range(L):
        values = jnp.zeros(shape, kind)
        keys = values if by_token else jnp.swapaxes(values, 2, 3)
        kv = KVPages(keys, values, jnp.zeros((count, K)), jnp.zeros((count, K)))
        for start, stop in ((0, 256), (256, T)):
            some = slice(start, stop)
            at = jnp.asarray(table[page[some]]), jnp.asarray(offset[some])
            kv = write_kv(kv, *(jnp.asarray(x[some]) for x in sent[layer]), *at, by_token)
        stage: Any = SimpleNamespace(plan=plan_of(page_size, by_token), kv=[kv])
        found[layer] = read_entries([stage], [table.tolist()], T)[0]
    allowed = allowed_change(sent, jnp.dtype("float32"), jnp.dtype(kind), page_size)
    share = np.abs(found - sent) / allowed
    assert 0.8 < share.max() <= 1
    # Of the largest entry of a page and head: half a step of 127, or of e4m3's 8 in an octave.
    once = allowed[:, :, : 240 // page_size * page_size].max() / np.abs(sent).max()
    assert once == pytest.approx({"int8": 0.5 / 127, "float8_e4m3fn": 2.0**-4}[kind], rel=1e-3)


def plan_of(page_size: int, by_token: bool) -> Any:
    config = SimpleNamespace(kernels="interpret" if by_token else "plain")
    return SimpleNamespace(
        config=config, num_kv_heads=K, limits=SimpleNamespace(page_size=page_size)
    )


def test_entries_of_several_stages_with_heads_that_are_padding() -> None:
    """Three heads on two devices are four in the pages, and three where they are read."""
    (stages, _) = plans(3, {"page_size": 12, "tp": 2}, {"page_size": 8, "tp": 1})
    rng = np.random.default_rng(0)
    held: list[Any] = [SimpleNamespace(plan=plan, kv=pages_of(plan, rng)) for plan in stages]
    tables = [1 + rng.permutation(plan.num_pages - 1) for plan in stages]
    found = read_entries(held, [table.tolist() for table in tables], 100)
    wanted = [
        entries(kv, stage.plan, table, 100)
        for stage, table in zip(held, tables, strict=True)
        for kv in stage.kv
    ]
    np.testing.assert_array_equal(found, np.stack(wanted))
    assert found.shape[3] == 3


def test_changes_are_shares_of_the_entries() -> None:
    sent = np.array([4.0, 0.0, -2.0, 2.0], np.float32).reshape(1, 1, 1, 1, 4)
    found = sent + np.array([0.0, 0.5, -1.0, 0.0], np.float32)
    allowed = np.full_like(sent, 0.8)
    shares = compare_entries(sent, found, allowed)
    assert shares["max_change"] == 0.25
    assert shares["bound"] == pytest.approx(0.2)
    assert shares["beyond"] == pytest.approx(0.05)
    assert shares["rms_change"] == pytest.approx(np.sqrt((0.25 + 1) / (16 + 4 + 4)))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("end", ["sent", "found"])
def test_what_is_no_number_is_beyond_every_bound(value: float, end: str) -> None:
    both = {name: np.ones((1, 2, 3, 1, 4), np.float32) for name in ("sent", "found")}
    both[end][0, 1, 2, 0, 3] = value
    with np.errstate(invalid="ignore"):
        allowed = allowed_change(both["sent"], np.dtype("float32"), np.dtype("float32"), 8)
    assert compare_entries(both["sent"], both["found"], allowed)["beyond"] > 0
    zeros = np.zeros_like(both["sent"])
    assert compare_entries(zeros, zeros, zeros)["beyond"] == 0


SIDES = {
    "A": HandOffSide(),
    "B": HandOffSide("float32", "auto", 24, "plain", 2, 2),
    "C": HandOffSide("bfloat16", "auto", 64, "plain", 1, 1),
    "D": HandOffSide("float32", "int8", 24, "plain", 1, 1),
    "E": HandOffSide("float32", "auto", 16, "generic", 1, 1),
    "F": HandOffSide("int8", "auto", 16, "plain", 1, 1),
    "G": HandOffSide(stages=LAYERS + 1),
}
PROMPT = [(7 * i) % 251 for i in range(70)]


@pytest.fixture(scope="module")
def conformance() -> Iterator[Conformance]:
    made = Conformance(small_checkpoint(), SIDES, PROMPT, 4, lambda part, left: None)
    yield made
    free_executables()


@pytest.fixture(scope="module")
def outcomes(conformance: Conformance) -> dict[tuple[str, str], HandOffCheck]:
    return {(o.source, o.dest): o for o in conformance.outcomes()}


def test_all_pairs_in_order(outcomes: dict[tuple[str, str], HandOffCheck]) -> None:
    assert list(outcomes) == list(product(SIDES, SIDES))


def test_what_is_exact_and_what_rounds(outcomes: dict[tuple[str, str], HandOffCheck]) -> None:
    """Only what is stored narrower than it was, or anew in 8 bits, may change."""
    verdicts = {pair: o.verdict for pair, o in outcomes.items() if o.verdict != "refused"}
    assert set(verdicts) == set(product("ABCD", "ABCD"))
    exact = {*product("ABD", "AB"), *product("C", "ABC")}
    assert {pair for pair, verdict in verdicts.items() if verdict == "exact"} >= exact
    rounds = {pair for pair, verdict in verdicts.items() if verdict == "rounds"}
    assert rounds >= {("A", "C"), ("B", "C"), ("D", "C"), ("A", "D"), ("B", "D"), ("C", "D")}
    for pair in rounds:
        outcome = outcomes[pair]
        assert outcome.max_change is not None
        assert outcome.bound is not None
        assert 0 < outcome.max_change <= outcome.bound <= 2.0**-8 + 0.5 / 127
    for pair in exact:
        assert outcomes[pair].max_change == outcomes[pair].bound == outcomes[pair].rms_change == 0


def test_float32_draws_the_same_tokens_on_any_side(
    outcomes: dict[tuple[str, str], HandOffCheck],
) -> None:
    for pair in product("AB", "AB"):
        assert outcomes[pair].same_tokens == 4
        change = outcomes[pair].logprob_change
        assert change is not None
        assert change < 1e-4


def test_bytes_are_the_narrower_side_s(outcomes: dict[tuple[str, str], HandOffCheck]) -> None:
    """Heads that are padding do not travel, and KV of 8 bits does in its dtype."""
    for (source, dest), outcome in outcomes.items():
        if outcome.verdict != "refused":
            itemsize = 2 if "C" in (source, dest) else 4
            assert outcome.num_bytes == len(PROMPT) * 2 * LAYERS * 3 * HEAD_DIM * itemsize
            assert outcome.seconds is not None
            assert outcome.seconds > 0


@pytest.mark.parametrize(
    ("side", "reason"),
    [
        ("E", "kernels is generic, the device is a cpu, they need compute capability 8.0 or more"),
        ("F", "dtype: int8 is a format of weights alone: weight_dtype: int8"),
        ("G", "stages"),
    ],
)
def test_refusals_have_a_reason(
    side: str, reason: str, outcomes: dict[tuple[str, str], HandOffCheck]
) -> None:
    for name in SIDES:
        for pair in ((side, name), (name, side)):
            assert outcomes[pair].verdict == "refused"
    assert reason in outcomes["A", side].reason
    assert "\n" not in outcomes["A", side].reason


def test_what_arrives_changed_is_wrong(
    conformance: Conformance, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = SlabDest.place

    def changing(self: SlabDest, array: jax.Array, *tokens: Any) -> Any:
        return place(self, array.at[1, 0, 5].multiply(1.02), *tokens)

    monkeypatch.setattr(SlabDest, "place", changing)
    verdicts = {(o.source, o.dest): o.verdict for o in conformance.outcomes()}
    assert {verdicts[pair] for pair in product("ABCD", "ABCD")} == {"wrong"}


@pytest.mark.parametrize(
    ("fault", "mistake"),
    [
        ("head order", lambda slab: slab[:, :, :, ::-1]),
        ("layer shifted", lambda slab: slab[:, ::-1]),
        ("keys and values swapped", lambda slab: slab[::-1]),
        ("page offset off by one", lambda slab: jnp.roll(slab, 1, axis=2)),
        ("zeros", lambda slab: slab * 0),
    ],
)
@pytest.mark.parametrize("pair", ["AA", "AB", "BC", "CD"])
def test_a_fault_of_our_own_is_named(
    conformance: Conformance, monkeypatch: pytest.MonkeyPatch, pair: str, fault: str, mistake: Any
) -> None:
    place = SlabDest.place
    monkeypatch.setattr(
        SlabDest, "place", lambda self, slab, *tokens: place(self, mistake(slab), *tokens)
    )
    assert conformance.fault_of(*pair).startswith(f"{fault}: request 1, layer ")
    monkeypatch.undo()
    assert conformance.fault_of(*pair) == ""


@pytest.mark.parametrize("pair", ["AA", "AB"])
def test_a_token_that_is_left_out_is_named(
    conformance: Conformance, monkeypatch: pytest.MonkeyPatch, pair: str
) -> None:
    """The contents of the destination's own pages are told from the source's."""
    place = SlabDest.place
    monkeypatch.setattr(
        SlabDest,
        "place",
        lambda self, slab, table, start, stop: place(self, slab, table, start, stop - 1),
    )
    assert conformance.fault_of(*pair).startswith("missing last token: request 1, layer 0, keys, ")
    monkeypatch.undo()
    assert conformance.fault_of(*pair) == ""


def test_a_delta_follows_each_whole_hand_off(outcomes: dict[tuple[str, str], HandOffCheck]) -> None:
    """It leaves out half of the pages that end before the last of 70 tokens."""
    bases = {"A": 32, "B": 24, "C": 64, "D": 24}
    assert {pair: o.base for pair, o in outcomes.items() if o.verdict != "refused"} == {
        (source, dest): bases[dest] for source, dest in product("ABCD", "ABCD")
    }


@pytest.mark.parametrize("pair", ["AA", "AB", "BA"])
def test_a_delta_that_begins_a_page_late_is_named(
    conformance: Conformance, monkeypatch: pytest.MonkeyPatch, pair: str
) -> None:
    send, base = Conformance._send, {"A": 32, "B": 24}[pair[1]]

    def late(self: Conformance, channel: Any, dest: Any, sent: Any, transfer: Any) -> float:
        if transfer.start:
            transfer.start += 16
        return send(self, channel, dest, sent, transfer)

    monkeypatch.setattr(Conformance, "_send", late)
    assert conformance.fault_of(*pair) == ""
    begins = f"delta begins late: request 1, layer 0, keys, token {base}, head 0 "
    assert conformance.fault_of(*pair, base).startswith(begins)
    said = f"without the first {base} tokens: {begins}"
    assert conformance._golden_fault(*pair).startswith(said)


def test_golden_entries_that_are_refused_or_left_out_are_reported(
    conformance: Conformance, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(source: str, dest: str, base: int = 0) -> str:
        if source == dest:
            return ""
        raise JaxinferError("no way")

    left_out = "golden entries are left out: too many"
    monkeypatch.setattr(conformance, "fault_of", refuse)
    monkeypatch.setattr(conformance, "left_out", left_out)
    monkeypatch.setattr(conformance, "sides", {name: SIDES[name] for name in "AB"})
    own, other, *_ = conformance.outcomes()
    assert (own.verdict, own.fault, own.reason) == ("exact", "", left_out)
    assert (other.verdict, other.fault) == ("wrong", "golden entries are refused: no way")


def test_models_without_golden_entries() -> None:
    plan = SimpleNamespace(
        num_pages=9,
        limits=SimpleNamespace(page_size=16),
        num_kv_heads=2,
        config=SimpleNamespace(head_dim=24),
    )
    stage: Any = SimpleNamespace(plan=plan, kv=[None] * 3)
    assert golden_model([[stage]]) == (
        None,
        "golden entries are left out: head_dim is 24, must be a multiple of 16",
    )


def test_without_any_side() -> None:
    with pytest.raises(
        JaxinferError, match=r"^none of the configurations can be loaded: instances\.F\.dtype: int8"
    ):
        Conformance(small_checkpoint(), {"F": SIDES["F"]}, PROMPT, 4, lambda part, left: None)
