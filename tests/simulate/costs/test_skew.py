"""Attention of decodes of unlike lengths: spans of steps, shares by kinds, and what they add."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from properties import examples

from jaxinfer import JaxinferError
from jaxinfer.config.run_file import as_run_file
from jaxinfer.serving.batch import Work
from jaxinfer.simulate.costs.skew import Skew
from jaxinfer.simulate.costs.tables import AttentionTable
from jaxinfer.simulate.run import prepare, serve

HEAD = "pc,n_label,skew_rate_label,kv_big_label,kp_label,alpha"


def write(folder: Path, *rows: str) -> Path:
    (folder / "skew_fit.csv").write_text("\n".join([HEAD, *rows]) + "\n")
    return folder


def test_a_batch_has_the_share_of_its_kind(tmp_path: Path) -> None:
    skew = Skew.read(
        write(
            tmp_path,
            "0,n<=4,sr<=40%,kvB<=1k,kp=0,0.1",
            "0,n<=4,sr>40%,kvB<=1k,kp=0,0.2",
            "0,n<=4,sr<=40%,kvB<=4k,kp=0,0.3",
            "0,n<=8,sr<=40%,kvB<=1k,kp=0,-0.4",
            "64,n<=4,sr<=40%,kvB<=1k,kp<=512,0.5",
            "512,n<=4,sr<=40%,kvB<=1k,kp=0,1.7",
        )
    )
    assert skew.share(0, 4, 0.4, 1024, 0) == 0.1
    assert skew.share(0, 4, 0.41, 1024, 0) == 0.2
    assert skew.share(0, 3, 0.0, 1025, 0) == 0.3
    assert skew.share(0, 99, 0.4, 1024, 0) == 0.0  # Of the largest kind; negative is none.
    # The nearest chunk by ratio, with entries before it; alpha is 1 at most.
    assert skew.share(100, 4, 0.4, 1024, 5) == 0.5
    assert skew.share(300, 4, 0.4, 1024, 0) == 1.0
    assert skew.share(0, 4, 0.4, 1024, 5) == 0.0  # Not fitted.


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], r"skew_fit\.csv has no rows$"),
        (["0,few,sr<=40%,kvB<=1k,kp=0,0.1"], r"has the label 'few', which says no size$"),
        (["0,n<=4,sr<=40%,kvB<=1k,kp=0,some"], r"has the alpha 'some', must be a number$"),
        (["x,n<=4,sr<=40%,kvB<=1k,kp=0,1"], r"skew_fit\.csv, line 2: pc must be numbers"),
    ],
)
def test_files_that_say_no_shares(tmp_path: Path, rows: list[str], message: str) -> None:
    with pytest.raises(JaxinferError, match=message):
        Skew.read(write(tmp_path, *rows))


def test_the_share_is_of_what_the_largest_context_adds() -> None:
    """The made-up kernel takes 1 us, and 0.01 for each row and entry."""
    points = {(0.0, 0.0, n, k): 1 + 0.01 * n * k for n in (1.0, 2.0, 4.0) for k in (10.0, 1000.0)}
    points[16.0, 8.0, 0.0, 0.0] = 5.0
    table = AttentionTable(points, True, skew=Skew({(0.0, 4.0, 1.0, 1000.0, 0.0): 0.25}))
    plain = AttentionTable(points, True)
    # Rows of 100, 100 and 400 entries.
    work = Work(3, 3, 3, 3, 600, [], 3, single_span=(100, 400))
    assert plain(work) == pytest.approx(1 + 0.01 * 600)
    assert table(work) == pytest.approx(1 + 0.01 * (600 + 0.25 * (1200 - 600)))
    for span in (None, (200, 200)):
        assert table(Work(3, 3, 3, 3, 600, [], 3, single_span=span)) == plain(work)


@examples(25)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 40), st.integers(1, 12)), min_size=1, max_size=8),
    seats=st.integers(1, 5),
)
def test_spans_are_those_of_rows(lengths: list[tuple[int, int]], seats: int) -> None:
    """Decodes advanced together have the span that single rows have, step by step."""
    spans = []
    for caching in (False, True):  # With a prefix cache and tokens, each request is a row.
        spans.append(spans_of(lengths, seats, caching))
    assert spans[0] == spans[1]
    assert any(span for span in spans[0]) or all(out < 2 for _, out in lengths)


def spans_of(lengths: list[tuple[int, int]], seats: int, rows: bool) -> list[Any]:
    from jaxinfer.workload.bench_request import BenchRequest

    config = as_run_file(
        {
            "model": "llama-3-8b",
            "engine": {
                "num_pages": 200,
                "page_size": 4,
                "max_num_seqs": seats,
                "max_num_batched_tokens": 64,
                "enable_prefix_caching": rows,
            },
            "groups": {"g": {"kind": "A100-80G-SXM"}},
            "instances": {"a": {"group": "g"}},
            "simulate": {"linear": {"step_s": 1.0}},
        }
    )
    work = [
        BenchRequest([number] * prompt if rows else None, prompt, output, 0.0)
        for number, (prompt, output) in enumerate(lengths)
    ]
    cluster = prepare(config)
    (instance,) = cluster.instances.values()
    seen: list[Any] = []

    class Watching:
        def stages(self, step: Work) -> list[float]:
            seen.append(step.single_span)
            return [1.0]

        def hops(self, step: Work) -> list[float]:
            return []

    object.__setattr__(instance, "cost", Watching())
    object.__setattr__(instance, "asks_spans", True)
    serve(cluster, work, None)
    return seen
