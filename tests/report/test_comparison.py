"""Figures against hand-computed ones, and what the folder holds."""

import csv
import io
import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from rich.console import Console

from jaxinfer import JaxinferError
from jaxinfer.report.comparison import comparison_table, new_folder, write_comparison
from jaxinfer.report.records import RequestRecord, RunRecord
from jaxinfer.report.summary import emulation, figures, median_round, medians, number_text

COMMAND = "jaxinfer compare a.yaml b.yaml"


def taking(run: RunRecord, *walls: float) -> list[RunRecord]:
    """Rounds that differ in nothing but their length; 3 requests finish in each."""
    return [replace(run, wall_s=wall) for wall in walls]


def printed(runs: dict[str, list[RunRecord]]) -> list[str]:
    text = io.StringIO()
    Console(width=200, file=text).print(comparison_table(runs))
    return text.getvalue().splitlines()


def test_figures_by_hand(small_run: RunRecord) -> None:
    f = figures(small_run)
    assert (f.wall_s, f.requests_s, f.output_tok_s) == pytest.approx((10, 0.3, 0.6))
    # TTFT 1, 1, 5; TBT 0.5, 1, 2: the 99th percentile is 0.98 of the way from second to third.
    assert (f.ttft_p50, f.ttft_p99) == pytest.approx((1.0, 1 + 0.98 * 4))
    assert (f.tbt_p50, f.tbt_p99) == pytest.approx((1.0, 1 + 0.98 * 1))
    assert (f.num_bytes, f.hidden_s, f.visible_s) == pytest.approx((1400, 0.75, 0.75))
    assert f.mean_cut == pytest.approx((50 / 100 + 0 + 20 / 80) / 3)
    # A mean: the median of these would be 0.25 still.
    cut = replace(small_run.requests[0], cut=80)
    f = figures(replace(small_run, requests=(cut, *small_run.requests[1:])))
    assert f.mean_cut == pytest.approx((80 / 100 + 0 + 20 / 80) / 3)
    f = figures(small_run)
    assert (f.preemptions, f.failed) == (3, 1)


def test_all_latencies_by_hand(small_run: RunRecord) -> None:
    first, *rest = small_run.requests
    f = figures(replace(small_run, requests=(replace(first, first_scheduled=0.25), *rest)))
    # Of three requests that did not fail: 4, 1.5 and 5 seconds for 3, 2 and 1 tokens.
    assert f.e2e_mean == pytest.approx(3.5)
    assert (f.e2e_p50, f.e2e_p90) == pytest.approx((4, 4.8))
    assert f.normalised_mean == pytest.approx((4 / 3 + 0.75 + 5) / 3)
    assert (f.tpot_mean, f.tpot_p50) == pytest.approx((1, 1))
    assert (f.delay_mean, f.delay_p99) == (0.25, 0.25)
    assert (f.ttft_mean, f.ttft_p90) == pytest.approx((7 / 3, 4.2))
    assert f.tbt_mean == pytest.approx(3.5 / 3)
    # What failed counts nowhere, whatever tokens it had.
    failed = replace(first, error="lost", token_times=(9.0, 12.0))
    f = figures(replace(small_run, requests=(failed, rest[0])))
    assert (f.e2e_mean, f.tpot_mean, f.ttft_mean, f.tbt_mean) == pytest.approx((1.5, 0.5, 1, 0.5))


def test_a_prompt_counts_once_with_all_its_continuations(small_run: RunRecord) -> None:
    """A prompt with one failed continuation has failed, though its other one has ended."""
    first, second, error, last = small_run.requests
    requests = (
        replace(first, parent="p"),
        replace(second, parent="q"),
        replace(error, parent="q"),
        replace(last, parent="p"),
    )
    run = replace(small_run, requests=requests)
    f = figures(run)
    assert (f.requests_s, f.failed, f.output_tok_s) == pytest.approx((0.1, 1, 0.4))
    assert (f.ttft_mean, f.e2e_mean, f.mean_cut) == pytest.approx((3, 4.5, (0.5 + 0.25) / 2))
    assert printed({"x": [run]})[-1].strip() == "x: 1 failed requests"


def test_what_the_run_itself_knows(small_run: RunRecord, tmp_path: Path) -> None:
    """MFU is the median of rounds with 20, 40 and 30 %; only the other system has dollars."""
    known = [
        replace(small_run, run={"metrics": {"mfu": mfu, "steady_requests_s": 1.25}})
        for mfu in (0.2, 0.4, 0.3)
    ]
    dear = replace(small_run, run={"metrics": {"usd_per_request": 0.0125}})
    runs = {"x": known, "y": [dear]}
    assert (figures(known[1]).mfu, medians(runs)["x"].mfu) == (0.4, 0.3)
    text = write_comparison(runs, tmp_path, COMMAND)[0].read_text()
    heading = "| system | requests/s without ramp and drain | MFU, % | $ per 1,000 requests |"
    assert f"{heading}\n| --- | ---: | ---: | ---: |\n| x | 1.25 | 30.0 | - |\n" in text
    assert "\n| y | - | - | 12.5 |\n" in text
    assert "\n| x | end-to-end | 3.50 s | 4.00 s | 4.80 s | 4.98 s |\n" in text
    assert "\n| y | scheduling delay | - | - | - | - |\n" in text


def test_rounded_times_leave_nothing_below_zero(small_run: RunRecord) -> None:
    (one, _) = small_run.transfers
    hidden = replace(one, start=0.1, end=0.3, hidden_s=0.200001)
    assert figures(replace(small_run, transfers=(hidden,))).visible_s == 0


def test_utilisation_counts_time_shared_by_instances_once(small_run: RunRecord) -> None:
    # low: 0-2, 1-3, 3-4.5, 4-5 cover 0-5; high: 3-6, 6-7.
    assert figures(small_run).utilisation == pytest.approx({"low": 0.5, "high": 0.4})
    nested = replace(small_run.steps[0], stages=((0.5, 1.0),))
    run = replace(small_run, steps=(*small_run.steps, nested))
    assert figures(run).utilisation["low"] == pytest.approx(0.5)
    idle = replace(small_run, groups=small_run.groups | {"c": ("spare",)})
    assert figures(idle).utilisation["spare"] == 0


def test_what_there_is_nothing_of_is_none(small_run: RunRecord) -> None:
    first = RequestRecord("r0", 0.0, 100, (1.0,), 0, 0, None)
    f = figures(replace(small_run, requests=(first,), transfers=()))
    assert (f.ttft_p99, f.tbt_p50, f.tbt_p99, f.mean_cut) == (1.0, None, None, None)
    assert (f.num_bytes, f.hidden_s, f.visible_s) == (0, 0, 0)
    f = figures(replace(small_run, requests=small_run.requests[2:3]))
    assert (f.requests_s, f.ttft_p50, f.mean_cut, f.failed) == (0, None, None, 1)
    # Of a failed request nothing counts but its preemptions.
    failed = replace(small_run.requests[0], error="lost")
    f = figures(replace(small_run, requests=(failed,)))
    assert (f.mean_cut, f.output_tok_s, f.ttft_p50, f.preemptions) == (None, 0, None, 1)


def test_medians_are_per_figure(small_run: RunRecord) -> None:
    rounds = taking(small_run, 10, 30, 20)
    rounds[1] = replace(rounds[1], transfers=(), requests=rounds[1].requests[:1])
    (f,) = medians({"x": rounds}).values()
    # Rounds of 3 / 10, 1 / 30 and 3 / 20 requests/s.
    assert (f.wall_s, f.requests_s) == pytest.approx((20, 0.15))
    assert f.utilisation == pytest.approx({"low": 0.25, "high": 0.2})
    assert (f.num_bytes, f.failed, f.preemptions) == (1400, 1, 3)
    (f,) = medians({"x": taking(small_run, 10, 20)}).values()
    assert f.requests_s == pytest.approx((0.3 + 0.15) / 2)


def test_medians_are_over_the_rounds_that_have_the_figure(small_run: RunRecord) -> None:
    uncut = replace(small_run.requests[1], token_times=(2.0,))
    short = replace(small_run, requests=(uncut,))
    (f,) = medians({"x": [short, small_run, short]}).values()
    assert (f.mean_cut, f.tbt_p50) == pytest.approx((0.25, 1.0))
    (f,) = medians({"x": [short, short]}).values()
    assert (f.mean_cut, f.tbt_p50) == (None, None)


def test_the_median_round_is_one_that_was_run(small_run: RunRecord) -> None:
    assert median_round(taking(small_run, 10, 30, 20)).wall_s == 20
    assert median_round(taking(small_run, 10, 30, 20, 40)).wall_s == 30
    assert median_round(taking(small_run, 10)).wall_s == 10


def test_emulation_is_said_once_or_per_system(small_run: RunRecord) -> None:
    slowed = replace(small_run, emulated=("low: 3 times slower", "link: 2 GB/s"))
    assert emulation({"x": [small_run], "y": [small_run]}) == []
    both = {"x": [slowed, slowed], "y": [slowed]}
    assert emulation(both) == ["emulated: low: 3 times slower; link: 2 GB/s"]
    assert emulation({"x": [small_run], "y": [slowed]}) == [
        "y, emulated: low: 3 times slower; link: 2 GB/s"
    ]


def test_the_table_has_a_row_per_system_and_a_column_per_group(small_run: RunRecord) -> None:
    alone = replace(
        small_run,
        groups={"a": ("mid",)},
        steps=small_run.steps[:1],
        transfers=(),
        requests=small_run.requests[1:2],
        emulated=("mid: [b] slower",),
    )
    lines = printed({"[b]": taking(small_run, 10, 20, 40), "alone": [alone]})
    assert lines[0].strip() == "Serving systems on one workload, medians of 1 to 3 rounds"
    assert [cell.strip() for cell in lines[1].split("  ") if cell.strip()] == [
        "system", "requests/s", "output tokens/s", "TTFT p50 / p99", "TBT p50 / p99", "low busy",
        "high busy", "mid busy", "KV moved", "transfer hidden / visible", "mean cut",
    ]  # fmt: skip
    assert [cell.strip() for cell in lines[2].split("  ") if cell.strip()] == [
        "[b]", "0.150", "0.300", "1.00 s / 4.92 s", "1.00 s / 1.98 s", "25.0 %", "20.0 %", "-",
        "0.00134 MiB", "750 ms / 750 ms", "25.0 %",
    ]  # fmt: skip
    assert [cell.strip() for cell in lines[3].split("  ") if cell.strip()] == [
        "alone", "0.100", "0.200", "1.00 s / 1.00 s", "500 ms / 500 ms", "-", "-", "20.0 %", "-",
        "-", "-",
    ]  # fmt: skip
    assert [line.strip() for line in lines[4:]] == [
        "alone, emulated: mid: [b] slower",
        "[b]: 3 failed requests",
    ]


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (2**20, "1.00 MiB"),
        (2**30 - 2**20, "1,023 MiB"),
        (2**30, "1.00 GiB"),
        (3 * 2**29, "1.50 Gi"),
    ],
)
def test_bytes_have_a_unit_of_their_size(small_run: RunRecord, num_bytes: int, text: str) -> None:
    moved = replace(small_run.transfers[0], num_bytes=num_bytes)
    assert f"  {text}" in printed({"x": [replace(small_run, transfers=(moved,))]})[2]


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0.00"), (0.01234, "0.0123"), (9.876, "9.88"), (99.96, "100"), (12345.6, "12,346")],
)
def test_numbers_keep_three_digits(value: float, text: str) -> None:
    assert number_text(value) == text


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (2**20 // 2, "0.500 MiB"),
        (2**30 - 2**20, "1,023 MiB"),
        (2**30, "1.00 GiB"),
        (3 * 2**29, "1.50 GiB"),
        (2**42, "4,096 GiB"),
    ],
)
def test_bytes_are_in_units_that_are_read(small_run: RunRecord, num_bytes: int, text: str) -> None:
    (one, _) = small_run.transfers
    run = replace(small_run, transfers=(replace(one, num_bytes=num_bytes),))
    assert f" {text} " in printed({"x": [run]})[2]


def test_csv_and_json_hold_the_figures_exactly(small_run: RunRecord, tmp_path: Path) -> None:
    uncut = replace(small_run.requests[1], token_times=(2.0,))
    other = replace(small_run, groups={"a": ("mid",)}, steps=(), requests=(uncut,))
    runs = {"x": taking(small_run, 10, 30, 20), "y": [other]}
    write_comparison(runs, tmp_path, COMMAND)

    with (tmp_path / "compare.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["system"], row["round"]) for row in rows] == [
        ("x", "1"),
        ("x", "2"),
        ("x", "3"),
        ("y", "1"),
    ]
    for row, run in zip(rows, [*runs["x"], other], strict=True):
        values = asdict(figures(run))
        shares = values.pop("utilisation")
        for name, value in values.items():
            assert row[name] == "" if value is None else float(row[name]) == value
        for group in ("low", "high", "mid"):
            text = row[f"utilisation {group}"]
            assert text == "" if group not in shares else float(text) == shares[group]
    assert rows[3]["tbt_p50"] == rows[3]["mean_cut"] == ""

    document = json.loads((tmp_path / "compare.json").read_text())
    assert document["command"] == COMMAND
    assert list(document["systems"]) == ["x", "y"]
    x = document["systems"]["x"]
    assert x["rounds"] == [asdict(figures(run)) for run in runs["x"]]
    assert x["median"] == asdict(medians(runs)["x"])
    assert document["systems"]["y"]["median"]["tbt_p50"] is None


def test_markdown_tells_command_rounds_spread_and_emulation(
    small_run: RunRecord, tmp_path: Path
) -> None:
    slowed = replace(small_run, emulated=("low: 3 times slower",))
    runs = {"high|low": taking(slowed, 10, 40, 20, 30), "y": taking(slowed, 10)}
    paths = write_comparison(runs, tmp_path / "new" / "folder", COMMAND)
    text = paths[0].read_text(encoding="utf-8")
    assert f"```sh\n{COMMAND}\n```" in text
    assert "\n- emulated: low: 3 times slower\n" in text
    assert "\n- high|low: 4 failed requests\n" in text
    # Of 0.3, 0.075, 0.15 and 0.1 requests/s, the middle two are those of rounds 4 and 3.
    assert "| high\\|low | 0.125 | 0.250 |" in text
    assert "| high\\|low | 4 | 0.0750 | 0.300 | 4 |" in text
    assert "| y | 1 | 0.300 | 0.300 | 1 |" in text


def test_every_file_is_there_and_linked(small_run: RunRecord, tmp_path: Path) -> None:
    names = [
        "Cronus (fixed cut)",
        "cronus fixed cut",
        "Cronus, fixed: cut",
        "../x",
        "\N{GREEK SMALL LETTER ALPHA}",
    ]
    paths = write_comparison({name: [small_run] for name in names}, tmp_path, COMMAND)
    slugs = [*(f"cronus-fixed-cut{number}" for number in ("", "-2", "-3")), "x", "system"]
    linked = ["throughput.png", "latency.png"]
    linked += [file for s in slugs for file in (f"timeline-{s}.png", f"trace-{s}.json")]
    expected = ["compare.md", "compare.csv", "compare.json", *linked]
    assert [path.relative_to(tmp_path).as_posix() for path in paths] == expected
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(expected)
    text = paths[0].read_text(encoding="utf-8")
    assert all(f"]({name})" in text for name in linked)
    trace = json.loads((tmp_path / "trace-x.json").read_text())
    assert trace["otherData"]["system"] == "../x"


def test_a_folder_in_use_is_refused_and_left_alone(small_run: RunRecord, tmp_path: Path) -> None:
    (tmp_path / "kept").write_text("mine")
    with pytest.raises(JaxinferError) as error:
        write_comparison({"x": [small_run]}, tmp_path, COMMAND)
    assert str(error.value) == f"{tmp_path}: has files in it, must be a new or an empty folder"
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]
    with pytest.raises(JaxinferError, match="kept: cannot make the folder: File exists"):
        new_folder(tmp_path / "kept")


def test_the_runs_may_lie_in_the_folder_that_is_written(
    small_run: RunRecord, tmp_path: Path
) -> None:
    folder = tmp_path / "a" / "b"
    new_folder(folder)
    new_folder(folder)
    (folder / "runs").mkdir()
    write_comparison({"x": [small_run]}, folder, COMMAND)
    (folder / "compare.md").read_text(encoding="utf-8")
    with pytest.raises(JaxinferError, match="must be a new or an empty folder"):
        write_comparison({"x": [small_run]}, folder, COMMAND)
    (tmp_path / "c" / "runs").mkdir(parents=True)
    with pytest.raises(JaxinferError, match="must be a new or an empty folder"):
        new_folder(tmp_path / "c")


@pytest.mark.parametrize(("wall_s", "drawn"), [(1e303, False), (1e-300, False), (1e6, True)])
def test_times_beyond_all_pictures(
    wall_s: float, drawn: bool, small_run: RunRecord, tmp_path: Path
) -> None:
    """Tables are kept, and say what is missing."""
    run = replace(small_run, wall_s=wall_s)
    written = write_comparison({"x": [run]}, tmp_path, "jaxinfer compare")
    names = {path.name for path in written}
    assert names == {path.name for path in tmp_path.iterdir()}
    assert ("throughput.png" in names) == ("trace-x.json" in names) == drawn
    text = (tmp_path / "compare.md").read_text()
    assert ("no pictures or traces: a run took" in text) == ("timeline-x.png" not in text) != drawn
