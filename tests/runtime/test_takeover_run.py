"""Takeover on four real instances: tokens as of one, whoever takes whose decodes."""

from pathlib import Path
from typing import Any

import pytest
from cluster_cases import G, H, Loader, roomy, set_pools, set_system
from cluster_checks import Done, Ran, check_transfers, serve, token_bytes

from jaxinfer import LLM
from jaxinfer.serving.step_fit import DecodeFit, MixedFit, PrefillFit, StepFit

INSTANCES: dict[str, Any] = {
    "p": {"stages": [{"group": "g", "layers": 1}, {"group": "h", "layers": 3}]} | roomy(8),
    "q": {"group": "k"} | roomy(16),
    "d": {"group": "h"} | roomy(32),
    "e": {"group": "g"} | roomy(8),
}


def fit(token_s: float, entry_s: float, step_s: float) -> StepFit:
    mixed = MixedFit(0.0, entry_s, step_s + 32 * token_s)
    return StepFit(PrefillFit(token_s, 0.0), mixed, DecodeFit(entry_s, 0.001, step_s))


# Each is slower than the next, so that decodes go from p to q, d and e, and from q on, too.
FITS = {
    name: fit(0.001, 0.0001 * factor, 0.01 * factor)
    for name, factor in (("p", 27), ("q", 9), ("d", 3), ("e", 1))
}


@pytest.fixture(scope="module")
def four(loader: Loader) -> LLM:
    return loader.load(
        "two", groups={"g": G, "h": H, "k": {}}, instances=INSTANCES, verify_transfers=True
    )


@pytest.mark.slow
@pytest.mark.parametrize("most_moves", [0, pytest.param(1, marks=pytest.mark.long), 2])
@pytest.mark.parametrize("pages", [{}, {"d": 6, "e": 18}], ids=["roomy", "small"])
def test_tokens_over_all_routes(
    four: LLM,
    expected: dict[str, list[Done]],
    most_moves: int,
    pages: dict[str, int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Fresh, a decode taken once and twice, in roomy pools and in small ones."""
    monkeypatch.setattr(four._runs, "fits", FITS)
    set_system(four, {"name": "takeover", "most_moves": most_moves})
    set_pools(four, pages, caching=False)
    done = serve(four, run_dir=tmp_path)
    ran = Ran.last(tmp_path)
    check_transfers(ran, token_bytes("two"))
    assert done == expected["two"]
    assert ran.metrics["failed"] == ran.metrics["late_compiles"] == 0
    taken = ran.record.run["system_report"]["decodes_taken"]
    assert bool(taken) == bool(most_moves)
    assert bool(ran.record.transfers) == bool(most_moves)
