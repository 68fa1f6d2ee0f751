"""The best ratio of attention to FFN devices, in three regimes, against its closed form.

The closed form is that of arXiv 2601.21351: attention devices, each with ``B`` requests in a
micro-batch, share one FFN device. Attention takes ``mu_s``, the FFN ``alpha_s`` for each token and
``beta_s`` for its weights, the link ``link_s`` for each token. The slowest one sets the pace:
requests per second and device are ``r B / ((r + 1) max(...))``.
"""

from math import sqrt
from typing import Any, NamedTuple

import pytest
from spread_cases import PEAK, modelled

from jaxinfer.serving.batch import Work

HEADS, LAYERS, PARTS, REQUESTS = 720, 50, 6, 4
# FLOPs take no time here, so that times are linear in tokens.
CARD = {
    "bf16_tflops": 1e9,
    "memory_gb": 1e6,
    "memory_gb_s": 1.0,
    "link": "none",
    "link_gb_s": 1.0,
    "all_reduce_gb_s": 1e9,
}


class Regime(NamedTuple):
    """Hidden size, columns of the FFN, contexts of requests, and rate of the link."""

    hidden: int
    columns: int
    context: int
    gb_s: float

    @property
    def ratios(self) -> dict[str, float]:
        """The ratio to which each of three limits leads, in bytes at 10^9 per second."""
        kv = 2 * HEADS * 2 * REQUESTS * self.context
        alpha, beta = 2 * (3 * self.columns + 2 * self.hidden), 6 * self.hidden * self.columns
        link = 2 * self.hidden / self.gb_s
        return {
            "attention": (kv - beta) / (alpha * REQUESTS),
            "peak": sqrt(beta / (alpha * REQUESTS)),
            "link": kv / (link * REQUESTS),
        }


def per_device(regime: Regime, attention: int) -> float:
    """Tokens per second and device, of a modelled step of as many requests as there is room for."""
    shape = {
        "hidden_size": regime.hidden,
        "intermediate_size": regime.columns,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "head_dim": 1,
        "vocab_size": 1,
    }
    rows = attention * REQUESTS
    limits = {"max_num_seqs": PARTS * rows, "max_num_batched_tokens": PARTS * rows}
    file: dict[str, Any] = {
        "model": "wide",
        "models": {"wide": shape},
        "gpus": {"card": CARD},
        "groups": {"a": {"kind": "card", "devices": attention}, "f": {"kind": "card"}},
        "links": [{"between": ["a", "f"], "gb_s": regime.gb_s}],
        "instances": {
            "x": {"stages": [{"group": "a", "ffn": "f"}], "micro_batches": PARTS} | limits
        },
        "simulate": PEAK | {"reserve_gb": 0.0},
        "system": "single",
    }
    part = Work(rows, rows, rows, rows, rows * regime.context, [], rows)
    total = PARTS * rows
    work = Work(total, total, total, total, total * regime.context, [], total)
    work.halves = [part] * PARTS
    (seconds,) = modelled(file).cost.stages(work)
    return total / seconds / (attention + 1)


# Each regime's own limit says 20; the others say less, or in the case of the link more.
CASES = {
    "attention": Regime(hidden=400, columns=4000, context=1011, gb_s=1.0),
    "peak": Regime(hidden=1680, columns=20000, context=4000, gb_s=100.0),
    "link": Regime(hidden=400, columns=4000, context=2000, gb_s=0.0028),
}


@pytest.mark.parametrize("name", CASES)
def test_the_best_ratio_is_that_of_the_closed_form(name: str) -> None:
    regime = CASES[name]
    ratios = regime.ratios
    expected = max(ratios["attention"], ratios["peak"])
    if ratios["link"] < expected:
        expected = ratios["link"]
    assert expected == ratios[name]
    assert expected == pytest.approx(20, rel=0.02)
    # As many devices as divide the heads; next to 20 are 18 and 24.
    found = {n: per_device(regime, n) for n in range(2, 121) if not HEADS % n}
    best = max(found, key=found.__getitem__)
    assert best == pytest.approx(expected, rel=0.05)
    assert found[best] > 1.001 * max(found[18], found[24]) or name == "peak"
