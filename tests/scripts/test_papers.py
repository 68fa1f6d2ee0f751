"""Each reproduction has parts, and makes its cheapest one; published tables come out again."""

import csv
import gzip
import json
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from types import ModuleType
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from scripts.reproduce.__main__ import PAPERS, main
from scripts.reproduce.making import Maker, summary
from scripts.reproduce.reproduction import Reproduction
from scripts.tables import CONFIGS

RESULTS = Path(__file__).parents[2] / "docs" / "results"
# Of each, a part that takes about a second, and whether its published table comes out again.
CHEAP = {
    "aladdin": ("figure3", True),
    "any_system": ("best_by_rate", True),
    "cronus": ("table3", False),
    "distserve": ("measured", False),
    "hetis": ("idle_memory", True),
    "hexgen2": ("classes", False),
    "hexgen3": ("plans", False),
    "multivendor": ("conformance", False),
    "predictor": ("lines", False),
    "prefixes": ("capacities", False),
    "sharding": ("palm", True),
    "splitwise": ("transfers", False),
    "takeover": ("cost", False),
    "tetriinfer": ("interference", False),
    "vidur_search": ("longer", False),
}


def found(paper: str) -> Reproduction:
    reproduction = import_module(f"scripts.reproduce.{paper}").REPRODUCTION
    assert isinstance(reproduction, Reproduction)
    return reproduction


def test_which_there_are() -> None:
    assert sorted(CHEAP) == PAPERS


@pytest.mark.parametrize("paper", PAPERS)
def test_parts_say_what_they_are(paper: str) -> None:
    reproduction = found(paper)
    for name, make in reproduction.parts.items():
        assert 10 < len(summary(make)) <= 100, name
    assert set(reproduction.timed) | set(reproduction.by_name) <= set(reproduction.parts)
    said = CliRunner().invoke(main, [paper, "--list"])
    assert said.exit_code == 0
    assert all(name in said.output for name in (*reproduction.parts, *reproduction.inputs))


@pytest.mark.parametrize("paper", PAPERS)
def test_no_part_hides_a_module_of_its_name(paper: str) -> None:
    package = import_module(f"scripts.reproduce.{paper}")
    for module in iter_modules(package.__path__):
        hidden = getattr(package, module.name, None)
        assert hidden is None or isinstance(hidden, ModuleType), module.name


def test_refusals(tmp_path: Path) -> None:
    said = CliRunner().invoke(main, ["cronus", "--part", "table9"])
    assert said.exit_code == 2
    assert (
        "--part table9: must be one of table2, table3, figure4, below, calibration" in said.output
    )
    said = CliRunner().invoke(main, ["cronus", "--part", "table3", "--out", str(tmp_path)])
    assert said.exit_code == 1
    assert said.output.splitlines()[-1] == (
        "Error: no --data with azure_conversation.csv; it is Azure's 2023 conversation trace: "
        "AzureLLMInferenceTrace_conv.csv in "
        "https://github.com/Azure/AzurePublicDataset/tree/master/data"
    )


def test_a_folder_that_lacks_a_file_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "data" / "aiconfigurator"
    folder.mkdir(parents=True)
    (folder.parent / "vidur").mkdir()
    out = str(tmp_path / "out")
    asked = ["hetis", "--data", str(folder.parent), "--part", "measured", "--out", out]
    said = CliRunner().invoke(main, asked)
    assert said.exit_code == 1
    last = said.output.splitlines()[-1]
    assert last.startswith(f"Error: {folder}/a100_sxm_generation_attention_perf.csv.gz: is not the")
    assert "; aiconfigurator is folder with CARD_TABLE.csv.gz, packed CSV of" in last
    assert last.endswith(", commit 095f58a: generation_attention_perf of each")


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def write_data(folder: Path) -> None:
    """Inputs in miniature; lengths are made up."""
    lines = ["TIMESTAMP,ContextTokens,GeneratedTokens"]
    for number in range(24):
        at = f"2023-11-16 18:15:{number:02}.0000000"
        prompt, output = ((200, 20), (900, 300), (1500, 30), (300, 250))[number % 4]
        lines.append(f"{at},{prompt + number},{output + number}")
    (folder / "azure_conversation.csv").write_text("\n".join(lines))
    lines = ["num_prefill_tokens,num_decode_tokens"]
    lines += [f"{20 + 97 * number % 400},{5 + 61 * number % 300}" for number in range(60)]
    (folder / "sharegpt.csv").write_text("\n".join(lines))
    lines = [
        json.dumps(
            {
                "timestamp": 100 * number,
                "input_length": 1500,
                "output_length": 20,
                "hash_ids": [0, number, 100 + number],
            }
        )
        for number in range(24)
    ]
    (folder / "mooncake_conversation.jsonl").write_text("\n".join(lines))
    with gzip.open(folder / "prompts.jsonl.gz", "wt") as file:
        for text in ("1 + 1?", "2 + 2?", "2 + 2?", "x" * 400):
            file.write(json.dumps({"source": "sums first", "prompt": text}) + "\n")


def make(paper: str, part: str, tmp_path: Path) -> Path:
    write_data(tmp_path)
    Maker(paper, found(paper), tmp_path / "out", tmp_path, 1).make([part])
    return tmp_path / "out"


@pytest.mark.parametrize("paper", [paper for paper, (_, again) in CHEAP.items() if again])
def test_a_published_table_comes_out_again(paper: str, tmp_path: Path) -> None:
    part, _ = CHEAP[paper]
    if paper == "any_system":  # The table that it goes by is a published one, too.
        given = RESULTS / paper / "rates.csv"
        systems = import_module("scripts.reproduce.any_system.systems")
        tables = import_module("scripts.tables")
        best = systems.begins(tables.read_csv(given), "rate", "ttft_p90", least=True)
        tables.write_csv(tmp_path / f"{part}.csv", best)
        assert rows(tmp_path / f"{part}.csv") == rows(RESULTS / paper / f"{part}.csv")
        return
    out = make(paper, part, tmp_path)
    assert rows(out / f"{part}.csv") == rows(RESULTS / paper / f"{part}.csv")
    published = {row["claim"]: row for row in rows(RESULTS / paper / "targets.csv")}
    for row in rows(out / "targets.csv"):
        assert row == published[row["claim"]]


def test_a_cell_of_takeover_on_another_cluster_comes_out_again() -> None:
    cases = import_module("scripts.reproduce.takeover.cases")
    assert cases.gpus("2 A100+3 L4") == ("A100", "A100", "L4", "L4", "L4")
    cell = cases.Cell("H100+L4", 16384, 128)
    (ours,) = cases.systems(cell.cluster)["takeover"].values()
    made = [
        cell.count,
        *(round(share, 4) for share in cases.shares(cases.TakeoverRun(cell, *ours, 0))),
    ]
    published = {row["cell"]: row for row in rows(RESULTS / "takeover" / "h100_l4.csv")}
    row = published["16k/128"]
    assert made == [float(row[name]) for name in ("requests", "takeover", "takeover whole")]


def test_tetriinfer_by_hand(tmp_path: Path) -> None:
    """Interference is a closed form: its claims are the published ones."""
    out = make("tetriinfer", "interference", tmp_path)
    published = rows(RESULTS / "tetriinfer" / "targets.csv")
    mine = [row for row in published if row["made_by"].endswith(" interference")]
    assert rows(out / "targets.csv") == mine


def test_multivendor_tells_claims_of_a_published_table(tmp_path: Path) -> None:
    table = (RESULTS / "multivendor" / "conformance.csv").read_bytes()
    (tmp_path / "conformance.csv").write_bytes(table)
    out = make("multivendor", "conformance", tmp_path)
    published = rows(RESULTS / "multivendor" / "targets.csv")
    mine = [row for row in published if row["made_by"].endswith(" conformance")]
    assert rows(out / "targets.csv") == mine


def test_hexgen3_claims_of_a_published_table(tmp_path: Path) -> None:
    """The part reads rows of the authors' simulator, with the seconds of each search."""
    tables = import_module("scripts.tables")
    given = [row | {"found in s": 0.03} for row in tables.read_csv(RESULTS / "hexgen3/plans.csv")]
    (tmp_path / "hexgen3_plans.json").write_text(json.dumps(given))
    out = make("hexgen3", "plans", tmp_path)
    for name in ("plans", "targets"):
        assert rows(out / f"{name}.csv") == rows(RESULTS / "hexgen3" / f"{name}.csv")


def test_hexgen2_counts_classes(tmp_path: Path) -> None:
    out = make("hexgen2", "classes", tmp_path)
    *classes, every = rows(out / "classes.csv")
    assert sum(float(row["share (%)"]) for row in classes) == pytest.approx(100, abs=0.3)
    assert (every["class"], every["share (%)"]) == ("all", "100.0")


def test_prefixes_capacities_are_sums(tmp_path: Path) -> None:
    """Eight H100 carry twice what four do, and less than those with A10s."""
    alike, unlike = rows(make("prefixes", "capacities", tmp_path) / "capacities.csv")
    assert float(alike["requests_s"]) / 2 < float(unlike["requests_s"])
    assert float(unlike["requests_s"]) < float(alike["requests_s"])


def test_cronus_stages_are_full(tmp_path: Path) -> None:
    """Stages are used up to what each alone carries, and one of both is nearly full."""
    out = make("cronus", "table3", tmp_path)
    shares = [float(row["ours"]) for row in rows(out / "table3.csv")]
    assert len(shares) == 16
    assert max(shares) < 115
    assert all(max(shares[i], shares[i + 1]) > 50 for i in range(0, 16, 2))


def test_predictor_leaves_out_doubles_and_long_prompts(tmp_path: Path) -> None:
    out = make("predictor", "lines", tmp_path)
    assert rows(out / "lines.csv") == [{"source": "sums", "prompts": "2"}]
    texts = [
        json.loads(line)["messages"][0]["content"]
        for line in (out / "lines.jsonl").read_text().splitlines()
    ]
    assert sorted(texts) == ["1 + 1?", "2 + 2?"]


def test_distserve_measured_by_the_shipped_costs(tmp_path: Path) -> None:
    """Profiles made from ``configs/distserve/opt_13b.yaml``: the published figures come out."""
    data = yaml.safe_load((CONFIGS / "distserve" / "opt_13b.yaml").read_text())
    by_tp: dict[str, Any] = {}
    pools = ["model,tp,pp,max_num_tokens"]
    for role, group, tp in (("prefill", "two", 2), ("decode", "one", 1)):
        costs = data["simulate"]["groups"][group]["phases"]
        small, large = costs["decode"]
        by_tp[str(tp)] = {"decoding_large_small_bs_threshold": small["below"]}
        for name, fit, terms in (
            ("prefill", costs["prefill"], ("step_s", "token_s", "pair_s")),
            ("decoding_smallbs", small, ("step_s", "context_s", "sequence_s")),
            ("decoding_largebs", large, ("step_s", "context_s", "sequence_s")),
        ):
            by_tp[str(tp)][name] = [1e3 * fit[term] for term in terms]
        tokens = 16 * (data["instances"][role]["num_pages"] - 1)
        pools.append(f"facebook/opt-13b,{tp},1,{tokens}")
    folder = tmp_path / "distserve"
    folder.mkdir()
    for kernels in ("distserve", "vllm"):
        path = folder / f"profiler-a100-80g.{kernels}.json"
        path.write_text(json.dumps({"facebook/opt-13b": by_tp}))
    (folder / "max_num_tokens.csv").write_text("\n".join(pools))
    out = make("distserve", "measured", tmp_path)
    published = rows(RESULTS / "distserve" / "targets.csv")
    mine = [row for row in published if row["made_by"].endswith(" measured")]
    assert rows(out / "targets.csv") == mine


def test_splitwise_lone_requests(tmp_path: Path) -> None:
    """The measured steps are linear in the prompt, with decodes of a constant time."""
    columns = "model,hardware,tensor_parallel,prompt_size,batch_size,token_size"
    table = [f"{columns},prompt_time,token_time"]
    for model in ("bloom-176b", "llama2-70b"):
        for hardware in ("a100-80gb", "h100-80gb", "h100-80gb-pcap"):
            for prompt in (128, 512, 1024, 2048, 4096):
                for batch in (1, 2, 4):
                    took = 0.1 * prompt * batch
                    table.append(f"{model},{hardware},8,{prompt},{batch},128,{took},40")
    (tmp_path / "splitwise_perf_model.csv").write_text("\n".join(table))
    out = make("splitwise", "transfers", tmp_path)
    found = {row["claim"]: row for row in rows(out / "targets.csv")}
    # A prompt of 1,500 tokens takes 150 ms, and each of twelve tokens after it 40.
    assert float(found["Table IV, code, a100: TTFT ms"]["ours"]) == pytest.approx(150, rel=1e-3)
    assert float(found["Table IV, code, a100: TBT ms"]["ours"]) == pytest.approx(40, rel=1e-3)
    assert float(found["Table IV, code, a100: E2E ms"]["ours"]) == pytest.approx(630, rel=1e-3)
    published = rows(RESULTS / "splitwise" / "targets.csv")
    assert [*found] == [r["claim"] for r in published if r["made_by"].endswith(" transfers")]


def test_vidur_search_with_more_requests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rates are those of searches that are known."""
    best = {"gpu": "H100-SXM", "gpus": 4, "tp": 1, "pp": 4, "engine": "sarathi_512",
            "seqs_per_stage": 256, "value": 1.0}  # fmt: skip

    class Known:
        """Searches by name."""

        def exact(self, name: str) -> list[dict[str, Any]]:
            return [best]

        def one(self, name: str, row: Any, goal: Any) -> dict[str, Any]:
            return {"requests_s": {"chat_best": 8.0, "chat_paper": 4.0}.get(name, 6.0)}

    monkeypatch.setattr("scripts.reproduce.vidur_search.searches.made", lambda inputs: Known())
    out = make("vidur_search", "longer", tmp_path)
    assert [row["ratio"] for row in rows(out / "longer.csv")] == ["2.0", "1.0"]
    assert [row["requests"] for row in rows(out / "longer.csv")] == ["4000", "8192"]
