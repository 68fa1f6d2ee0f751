"""Whole runs of instances whose KV heads lie on several modelled groups."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from properties import examples
from rich.table import Table
from spread_cases import LINK, modelled, run_file, served, work_with

from jaxinfer import JaxinferError
from jaxinfer.config.resolve import resolve
from jaxinfer.config.run_file import as_run_file
from jaxinfer.config.site import model_site
from jaxinfer.lab.plan.estimate import guess_rate
from jaxinfer.lab.validate.replay import replay
from jaxinfer.report.metrics import SliceMoveCounts
from jaxinfer.report.records import read_run
from jaxinfer.report.table import metrics_table
from jaxinfer.simulate.cluster import fit_instance, model_cluster
from jaxinfer.simulate.read_targets import read_targets
from jaxinfer.workload.lengths import BenchRequest


def test_a_run_with_all_heads_on_the_own_groups_is_that_of_plain_stages() -> None:
    """The run's decodes are not advanced together, and every time is the same to the last bit."""
    lengths = [(5, 9), (17, 4), (40, 30), (3, 3), (9, 1)]
    plain = [{"group": "a"}, {"group": "b"}]
    spread = [{"group": "a", "attention": ["w"]}, {"group": "b", "attention": ["w"]}]
    linked = [LINK | {"between": ["a", "b"]}]
    found, times = served(run_file(spread, "pipeline_parallel"), *lengths)
    expected, plain_times = served(run_file(plain, "pipeline_parallel", links=linked), *lengths)
    assert times == plain_times
    assert (found.steps, found.wall_s) == (expected.steps, expected.wall_s)
    assert found.peak_pages == 2 * expected.peak_pages
    assert expected.slice_moves is None
    assert found.slice_moves == SliceMoveCounts(begun=0, num_bytes=0, without_room=0, at_once=0)


def test_a_run_places_heads_where_the_system_wants_them() -> None:
    """A prompt of five tokens in one step, then two decodes: half of each on either group."""
    found, times = served(run_file(), (5, 3))
    cost = modelled(run_file()).cost
    steps = [work_with(rows, 1, 1) for rows in ([(0, 5)], [(5, 1)], [(6, 1)])]
    ends = [sum(cost.stages(work)[0] for work in steps[: n + 1]) for n in range(3)]
    assert times == {"0": pytest.approx(ends)}
    assert ends[0] > 6.0
    assert (found.num_pages, found.peak_pages) == (49 * 2 + 2 * (modelled_pages() - 1), 2 * 2)


def modelled_pages() -> int:
    return modelled(run_file()).shards[1].num_pages


def test_slices_move_over_the_link(tmp_path: Path) -> None:
    """A full page of four tokens of a head in six layers, half a second and 384 us, while the own
    group decodes; then the rest. The second move is left out.
    """
    found, times = served(run_file(system="Moving"), (5, 26), folder=tmp_path)
    cost = modelled(run_file()).cost
    tokens, step = times["0"], 0
    first = tokens[0] + 0.5 + 384e-6
    while tokens[step] < first:
        alone = cost.stages(work_with([(5 + step, 1)], 2, 0))[0]
        assert tokens[step + 1] == pytest.approx(tokens[step] + alone)
        step += 1
    # The step in flight has ended: 5 + step entries, 96 bytes each, and the next is of both groups.
    rest = 96 * (5 + step - 4)
    end = tokens[step] + 0.5 + rest * 1e-6
    both = cost.stages(work_with([(5 + step, 1)], 1, 1))[0]
    assert tokens[step + 1] == pytest.approx(end + both)
    moves = SliceMoveCounts(begun=1, num_bytes=384 + rest, without_room=0, at_once=1)
    assert found.slice_moves == moves
    run = read_run(tmp_path / "1")
    assert run.run["metrics"]["slice_moves"]["num_bytes"] == 384 + rest
    full, other = run.transfers
    assert (full.source, full.dest, full.num_tokens, full.num_bytes) == ("x", "x", 4, 384)
    assert (full.start, full.end) == pytest.approx((tokens[0], first), abs=2e-6)
    assert (other.num_tokens, other.num_bytes) == (1 + step, rest)
    assert (other.start, other.end) == pytest.approx((tokens[step], end), abs=2e-6)
    (described,) = run.run["instances"]["x"]["stages"]
    expected = {"group": "w", "num_pages": modelled_pages()}
    assert (described["group"], described["attention"]) == ("a", [expected])
    assert run.groups == {"x": ("a",)}
    heads = [step.heads for step in run.steps]
    assert heads == [(2, 0)] * (1 + step) + [(1, 1)] * (len(heads) - 1 - step)
    assert rows_of(metrics_table(found))["moves of KV heads"] == "1 of 0.0 MB, 1 left out"


def rows_of(table: Table) -> dict[Any, Any]:
    names, values = (column.cells for column in table.columns)
    return dict(zip(names, values, strict=True))


@examples(25)
@given(
    st.integers(0, 10**6),
    st.lists(st.tuples(st.integers(1, 30), st.integers(1, 25)), min_size=1, max_size=8),
    st.integers(10, 25),
)
def test_runs_with_random_placements_and_moves_come_to_their_end(
    seed: int, lengths: list[tuple[int, int]], num_pages: int
) -> None:
    """Pools hold hardly more than the longest request, and one group has two stages."""
    stages = [
        {"group": "a", "attention": [{"group": "w", "num_pages": num_pages}]},
        {
            "group": "b",
            "attention": [{"group": "w", "num_pages": 4}, {"group": "v", "num_pages": 9}],
        },
    ]
    file = run_file(stages, "Random", {"num_pages": num_pages})
    file["system"]["seed"] = seed
    found, times = served(file, *lengths)
    assert [len(times[str(n)]) for n in range(len(lengths))] == [n for _, n in lengths]
    assert found.slice_moves
    # A token of a head has 16 bytes in each layer of either stage.
    assert found.slice_moves.num_bytes % (3 * 16) == 0
    assert served(file, *lengths)[1] == times


def test_a_group_of_two_stages_takes_turns() -> None:
    """Apart, the two stages overlap; as one group, its work for both takes as long as it takes."""
    shared = [{"group": "a", "attention": ["w"]}, {"group": "b", "attention": ["w"]}]
    apart = [{"group": "a", "attention": ["v"]}, {"group": "b", "attention": ["w"]}]
    # The link between stages is fast, that to the group so slow that it is nearly always busy.
    links = [
        {"between": [*pair], "gb_s": 1.0 if pair == "ab" else 1e-6}
        for pair in ("ab", "av", "aw", "bv", "bw")
    ]
    engine = {"max_num_seqs": 4}
    file = run_file(shared, engine=engine, links=[x for x in links if "v" not in x["between"]])
    work = [(5, 20)] * 4
    together, _ = served(file, *work)
    alone, _ = served(run_file(apart, engine=engine, links=links), *work)
    visits = modelled(file).visits
    assert [[visit.shard for visit in each if visit.device == ("w", 0)] for each in visits] == [
        [1],
        [3],
    ]
    # A token's queries of a head are 48 bytes at 1,000 per second, in each of three layers.
    busy = 4 * (5 + 19) * 3 * 0.048
    assert busy < alone.wall_s < 1.5 * busy
    assert 2 * busy < together.wall_s < 2.05 * busy


def test_no_kv_is_handed_to_a_spread_instance() -> None:
    file = run_file()
    file["groups"]["p"] = {"kind": "card"}
    one = file["instances"]["x"]
    file["instances"]["p"] = {k: v for k, v in one.items() if k != "stages"} | {"group": "p"}
    file["system"] = {"name": "disaggregated", "prefill": "p", "decode": "x"}
    with pytest.raises(JaxinferError, match="system hands KV from p to x: x has attention groups"):
        served(file, (5, 3))


def test_runs_of_spread_instances_are_not_replayed(tmp_path: Path) -> None:
    served(run_file(), (5, 3), folder=tmp_path)
    path = tmp_path / "1" / "run.json"
    record = json.loads(path.read_text())
    record |= {"run_file": run_file(), "measured_gb_s": {}}
    path.write_text(json.dumps(record))
    with pytest.raises(JaxinferError, match="instance x has attention groups"):
        replay(tmp_path / "1", tmp_path / "out")


def test_fits_and_guesses_have_all_heads_on_the_own_groups() -> None:
    """Fits are those of a plain stage; so are guesses, but for all the room that there is."""
    spread = run_file(engine={"num_pages": 3, "max_num_seqs": 8})
    plain = run_file([{"group": "a"}], "single", {"num_pages": 3, "max_num_seqs": 8})
    clusters = [model_cluster(model_site(resolve(as_run_file(file)))) for file in (spread, plain)]
    fits = [fit_instance(cluster.instances["x"], relative=True) for cluster in clusters]
    assert fits[0] == fits[1]
    work = [BenchRequest(None, 5, 6, 0.0)]
    targets = read_targets("delay:p99=1000", work, None, None)
    guesses = [guess_rate(as_run_file(file), work, targets) for file in (spread, plain)]
    assert guesses[0] > guesses[1]
