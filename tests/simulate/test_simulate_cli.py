"""The commands on modelled clusters."""

import re
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from jaxinfer import JaxinferError
from jaxinfer.commands.app import cli
from jaxinfer.hardware.catalogue import find_gpu, find_model
from jaxinfer.report.records import read_run
from jaxinfer.serving.batch import Work
from jaxinfer.simulate.costs.roofline import KernelEfficiency, RooflineStage

CRONUS = Path(__file__).parents[2] / "configs" / "cronus"


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.csv"
    rows = [f"{200 + 90 * i},{10 + i}" for i in range(12)]
    path.write_text("\n".join(["num_prefill_tokens,num_decode_tokens", *rows]) + "\n")
    return path


def test_one_cluster(trace: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    ran = CliRunner().invoke(
        cli, ["simulate", str(CRONUS / "cronus.yaml"), "--workload", str(trace), "--out", str(out)]
    )
    assert ran.exit_code == 0, ran.output
    assert "simulated on high (A100-80G-SXM), low (A10)" in ran.output
    names = {path.name for path in out.iterdir()}
    assert {"compare.md", "compare.csv", "timeline-cronus.png", "trace-cronus.json"} <= names


def test_several_systems(trace: Path, tmp_path: Path) -> None:
    files = [str(CRONUS / "cronus.yaml"), "--systems", "cronus,data_parallel", "--simulate"]
    given = [*files, "--workload", str(trace), "--limit", "5", "--out", str(tmp_path / "out")]
    ran = CliRunner().invoke(cli, ["compare", *given])
    assert ran.exit_code == 0, ran.output
    assert len((tmp_path / "out" / "compare.csv").read_text().splitlines()) == 3
    refused = CliRunner().invoke(cli, ["compare", *given, "--rounds", "2"])
    assert isinstance(refused.exception, JaxinferError)
    assert str(refused.exception).startswith("--rounds is for real runs")


def test_shares_of_the_bound(trace: Path, tmp_path: Path) -> None:
    """Systems of a cluster are beside one bound, which is printed where it is asked for."""
    given = ["--workload", str(trace), "--bound"]
    shares = {}
    for system in ("cronus", "data_parallel"):
        ran = CliRunner().invoke(cli, ["simulate", str(CRONUS / f"{system}.yaml"), *given])
        assert ran.exit_code == 0, ran.output
        (rate, share, bound) = re.findall(r"(\S+) requests/s, (\S+) of (\S+), the", ran.output)[0]
        assert float(rate) / float(bound) == pytest.approx(float(share), rel=0.02)
        shares[system] = f"{system}: {rate} requests/s, {share} of {bound}, the upper bound"
    files = [
        str(CRONUS / "cronus.yaml"),
        "--systems",
        "data_parallel",
        "--out",
        str(tmp_path / "o"),
    ]
    ran = CliRunner().invoke(cli, ["compare", *files, *given, "--simulate"])
    assert ran.exit_code == 0, ran.output
    assert all(line in ran.output for line in shares.values()), ran.output
    refused = CliRunner().invoke(cli, ["compare", *files, *given])
    assert str(refused.exception).startswith("--bound is for modelled clusters: add --simulate")


def test_a_rate_that_nobody_keeps_up(trace: Path) -> None:
    """A rate above the bound may keep the targets with few requests: they end before it shows."""
    *_, share = capacity_lines(trace, "--slo", "ttft=0.4,tbt=1", "--bound")
    assert re.fullmatch(
        r"\S+ requests/s, above \S+, the upper bound for a sustained rate: .*", share
    )


def capacity_lines(trace: Path, *options: str) -> list[str]:
    given = [str(CRONUS / "data_parallel.yaml"), "--workload", str(trace), *options]
    ran = CliRunner().invoke(cli, ["capacity", *given])
    if ran.exception:
        raise ran.exception
    return ran.output.splitlines()


def test_capacity(trace: Path) -> None:
    *tried, last, few = capacity_lines(trace, "--slo", "ttft=0.2,tbt=1", "--criterion", "each")
    assert re.fullmatch(r"warning: too few requests .* use \d{3} requests or more", few)
    found = re.fullmatch(
        r"capacity: (\S+) requests/s at (\S+)% attainment, goodput (\S+) requests/s, (\S+) per GPU",
        last,
    )
    assert found
    rate, share, goodput, per_gpu = map(float, found.groups())
    assert share > 90
    assert per_gpu == pytest.approx(goodput / 2, rel=0.01)
    assert tried[0] == "    0.125 requests/s: 91.7% attainment (ttft 91.7%, tbt 100.0%)"
    missed = [line for line in tried if "at most" in line]
    assert re.search(r"requests/s: at most 83.3% attainment \(ttft 83.3%, tbt \S+%\)", missed[0])
    assert rate < min(float(line.split()[0]) for line in missed)


def test_capacity_by_percentiles_and_of_several_seeds(trace: Path) -> None:
    more = "--requests-per-gpu", "4", "--seeds", "2"
    *tried, last, few = capacity_lines(trace, "--slo", "ttft:p90=0.2,tbt:p99=1", *more)
    assert re.fullmatch(r"capacity: \S+ requests/s, goodput \S+ requests/s, \S+ per GPU", last)
    assert re.search(r"requests/s: met, ttft p90 0\.\d+, tbt p99 0\.\d+$", tried[0])
    assert any(line.endswith("requests/s: missed") for line in tried)
    by_hand = capacity_lines(
        trace, "--slo", "ttft:p90=0.2,tbt:p99=1", "--limit", "8", "--seed", "0", "--seed", "1"
    )
    assert by_hand == [*tried, last, few]


def test_capacity_of_nothing(trace: Path) -> None:
    lines = capacity_lines(trace, "--slo", "ttft=0.000001", "--attainment", "0.5")
    assert lines == [
        "    0.001 requests/s: at most 41.7% attainment",
        "capacity: 0 requests/s, any rate misses the targets",
    ]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--seeds", "2", "--seed", "1"], "--seed is not for use with --seeds: give one of them"),
        (["--requests-per-gpu", "7"], "which for 2 GPUs is 14 requests: the workload has 12"),
        (["--slo", "ttft:p9=1", "--attainment", "0.9"], "attainment is 0.9, but a percentile's"),
    ],
)
def test_capacity_refuses(options: list[str], message: str, trace: Path) -> None:
    with pytest.raises(JaxinferError) as error:
        capacity_lines(trace, "--slo", "ttft=1", *options)
    assert message in str(error.value)


def test_nothing_to_simulate(tmp_path: Path) -> None:
    refused = CliRunner().invoke(cli, ["simulate", "--out", str(tmp_path / "out")])
    assert refused.exit_code == 2
    assert "Missing argument 'RUN_FILE'" in refused.output


def test_figures_alone_and_their_price(tmp_path: Path) -> None:
    """12 requests on two machines of $38 each; without a folder nothing is written."""
    run_file = tmp_path / "run.yaml"
    hardware = CRONUS.parent / "clusters" / "splitwise_hh.yaml"
    run_file.write_text(
        yaml.safe_dump(
            {
                "model": "llama-2-70b",
                "engine": {"enable_prefix_caching": False},
                "groups": {"p": {"devices": 8}, "t": {"devices": 8}},
                "instances": {"prefill": {"group": "p"}, "decode": {"group": "t"}},
                "system": {"name": "disaggregated"},
                "simulate": {
                    "hardware": str(hardware),
                    "groups": {"p": {"node": "prompt"}, "t": {"node": "token"}},
                },
                "workload": {"synthetic": {"lengths": "azure_code", "count": 12}},
            }
        )
    )
    before = set(tmp_path.iterdir())
    ran = CliRunner().invoke(cli, ["simulate", str(run_file)])
    assert ran.exit_code == 0, ran.output
    assert set(tmp_path.iterdir()) == before
    lines = dict(line.rsplit(maxsplit=1) for line in ran.output.splitlines()[:4])
    seconds = float(ran.output.split("wall time")[1].split()[0])
    assert lines["requests"] == "12"
    price = float(re.search(r"\$(\S+) per 1,000 requests", ran.output)[1])  # type: ignore[index]
    assert "$76.00 per hour" in ran.output
    assert "all requests arrive at once, so TTFT includes queueing" in ran.output
    assert price == pytest.approx(1000 / 12 * 76 / 3600 * seconds, rel=0.02)
    # 16 GPUs of 700 W.
    energy = re.search(r"limits: (\S+) Wh per request, (\S+) kWh per million", ran.output)
    assert energy
    watt_hours = 16 * 700 * seconds / 3600
    assert float(energy[1]) == pytest.approx(watt_hours / 12, rel=0.02)
    tokens = int(lines["output tokens"].replace(",", ""))
    assert float(energy[2]) == pytest.approx(1000 * watt_hours / tokens, rel=0.02)


def test_calibrate_prints_a_line_for_the_run_file(tmp_path: Path) -> None:
    """Steps of a GPU that computes at 0.5 and reads at 0.8 of its peaks, by hand."""
    points = ["chunk_tokens,chunk_context,decodes,decode_context,seconds"]
    model = find_model("llama-3-8b")
    stage = RooflineStage(
        find_gpu("A100-80G-SXM"), model, 32, True, 1, 2, KernelEfficiency(0.5, 0.8, 0.004), 300
    )
    for tokens, decodes in ((4096, 0), (1024, 0), (0, 1), (0, 64), (512, 64), (64, 8)):
        chunks = [(0, tokens)] if tokens else []
        rows = decodes + len(chunks)
        work = Work(tokens + decodes, decodes, rows, rows, 900 * decodes, chunks, decodes)
        points.append(f"{tokens},0,{decodes},{900 * bool(decodes)},{stage.seconds(work)!r}")
    path = tmp_path / "points.csv"
    path.write_text("\n".join(points) + "\n")
    ran = CliRunner().invoke(
        cli, ["calibrate", str(CRONUS / "cronus.yaml"), "--group", "high", "--points", str(path)]
    )
    assert ran.exit_code == 0, ran.output
    section = yaml.safe_load(ran.output[ran.output.index("simulate:") :])["simulate"]
    assert section["fit"] == "absolute"  # As it was.
    found = section["groups"]["high"]
    assert found["flops"] == pytest.approx(0.5, rel=0.01)
    assert found["bandwidth"] == pytest.approx(0.8, rel=0.01)
    assert found["step_s"] == pytest.approx(0.004, rel=0.02)


def test_linear_costs_in_a_run_file(trace: Path, tmp_path: Path) -> None:
    """A request of 200 + 10 tokens alone: 1 ms a step and 10 us a token of its prompt."""
    run_file = tmp_path / "run.yaml"
    linear = "{step_s: 0.001, token_s: 0.00001}"
    run_file.write_text(
        "model: llama-3-8b\nengine: {enable_prefix_caching: false, launch_ahead: false}\n"
        "groups: {g: {kind: A10}}\ninstances: {i: {group: g}}\n"
        f"simulate: {{groups: {{g: {{linear: {linear}}}}}}}\n"
    )
    given = ["simulate", str(run_file), "--workload", str(trace), "--limit", "1"]
    out = tmp_path / "out"
    ran = CliRunner().invoke(cli, [*given, "--out", str(out)])
    assert ran.exit_code == 0, ran.output
    (request,) = read_run(next((out / "runs").glob("**/1"))).requests
    times = [0.003 + i * 0.00101 for i in range(10)]
    assert request.token_times == pytest.approx(times, abs=2e-6)
    both = [*given, "--set", "simulate.groups.g.tables=somewhere"]
    refused = CliRunner().invoke(cli, both)
    assert "simulate.groups.g: both tables and linear" in str(refused.exception)


def test_a_workload_given_replaces_the_files(trace: Path, tmp_path: Path) -> None:
    run_file = tmp_path / "run.yaml"
    run_file.write_text(
        "model: llama-3-8b\ngroups: {g: {kind: A10}}\ninstances: {i: {group: g}}\n"
        "workload: {synthetic: azure_code}\n"
    )
    ran = CliRunner().invoke(cli, ["simulate", str(run_file), "--workload", str(trace)])
    assert ran.exit_code == 0, ran.output
    assert ran.output.split()[:2] == ["requests", "12"]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("simulate: {step_s: 1.0}\nsimulate: {hop_s: 1.0}", "'simulate' stands 2 times"),
        ("simulate: {step_s: 1e-3}", "is '1e-3', must be a number: YAML wants a dot, 1.0e-03"),
        ("simulate: {groups: {g: [1]}}", "simulate.groups.g is [1], must be a mapping"),
        ("simulate: {linear: {step_s: 0.1}, flops: 0.5}", "flops has no effect with linear"),
        ("simulate: {tables: x, bandwidth: 0.5}", "bandwidth has no effect with tables"),
        (
            "simulate: {linear: {step_s: 0.1}, groups: {g: {sequence_s: 0.1}}}",
            "simulate.groups.g.sequence_s has no effect with linear",
        ),
        ("workload: {arrivals: trace}", "has no times: take at_once"),
    ],
)
def test_refused(lines: str, message: str, trace: Path, tmp_path: Path) -> None:
    run_file = tmp_path / "run.yaml"
    groups = "groups: {g: {kind: A10}}\ninstances: {i: {group: g}}\n"
    run_file.write_text(f"model: llama-3-8b\n{groups}{lines}\n")
    refused = CliRunner().invoke(cli, ["simulate", str(run_file), "--workload", str(trace)])
    assert isinstance(refused.exception, JaxinferError)
    assert message in str(refused.exception)


def test_a_group_may_go_back_to_the_roofline(trace: Path, tmp_path: Path) -> None:
    """The group's efficiencies take the place of the coefficients that hold for the others."""
    run_file = tmp_path / "run.yaml"
    run_file.write_text("model: llama-3-8b\ngroups: {g: {kind: A10}}\ninstances: {i: {group: g}}\n")
    given = ["simulate", str(run_file), "--workload", str(trace)]
    plain, own = (
        CliRunner().invoke(cli, [*given, *more]).output.splitlines()[:7]
        for more in (
            ["--set", "simulate.flops=0.3"],
            ["--set", "simulate.linear={step_s: 9.0}", "--set", "simulate.groups.g.flops=0.3"],
        )
    )
    assert plain == own


def test_a_failed_simulation_leaves_no_folder(trace: Path, tmp_path: Path) -> None:
    """A pool of 9 pages holds no request of 200 tokens; one of 900 holds all."""
    out = tmp_path / "out"
    given = ["simulate", str(CRONUS / "data_parallel.yaml"), "--workload", str(trace)]
    refused = CliRunner().invoke(cli, [*given, "--out", str(out), "--set", "engine.num_pages=10"])
    assert "needs 14 pages of 16 tokens" in str(refused.exception)
    assert not out.exists()
    again = CliRunner().invoke(cli, [*given, "--out", str(out), "--set", "engine.num_pages=900"])
    assert again.exit_code == 0, again.output
