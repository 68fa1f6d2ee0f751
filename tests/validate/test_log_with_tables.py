"""``jaxinfer check points`` of a log takes any profile of operators; figures by hand."""

import json
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from jaxinfer import JaxinferError
from jaxinfer.commands.app import cli

RUN = {
    "model": "tiny",
    "models": {
        "tiny": {
            "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 3, "vocab_size": 10,
            "num_attention_heads": 4, "num_key_value_heads": 2,
        }
    },
    "gpus": {
        "my-card": {
            "bf16_tflops": 1, "memory_gb": 1, "memory_gb_s": 1, "link": "PCIe4", "link_gb_s": 32,
            "watts": 1,
        }
    },
    "groups": {"g": {"kind": "my-card"}},
    "instances": {"x": {"group": "g", "num_pages": 100}},
}  # fmt: skip
# Sent at 0 s by the client's clock, noted by the engine 1 ms later; the second, 0.5 s after it.
REQUESTS = [
    {"input_toks": 10, "output_toks": 3, "arrival_time": 100.0, "queued_ts": 7.0,
     "first_token_ts": 7.004, "last_token_ts": 7.010},
    {"input_toks": 10, "output_toks": 1, "arrival_time": 100.5, "queued_ts": 7.501,
     "first_token_ts": 7.508, "last_token_ts": 7.508},
    {"input_toks": 10, "output_toks": 0, "arrival_time": 100.6, "queued_ts": 0.0,
     "first_token_ts": None, "last_token_ts": None},
]  # fmt: skip


def write(folder: Path) -> list[str]:
    """Steps of 6 ms: 1 ms of attention in each of three layers, and as much besides."""
    tp = folder / "tp1"
    tp.mkdir()
    meta = {"hardware": "mycard", "engine_effective": {"hf_overrides": {"vocab_size": 10}}}
    (folder / "meta.yaml").write_text(yaml.safe_dump(meta))
    dense = {
        "layernorm": 0, "qkv_proj": 500, "rotary_emb": 0, "o_proj": 0, "gate_up_proj": 500,
        "act_fn": 0, "down_proj": 0, "embedding": 0, "final_layernorm": 0,
    }  # fmt: skip
    for name, axis, times in (
        ("dense", "tokens", dense),
        ("per_sequence", "sequences", {"lm_head": 0, "sampler": 0}),
    ):
        lines = [f"{operator},1,{micros}" for operator, micros in times.items()]
        (tp / f"{name}.csv").write_text("\n".join([f"layer,{axis},time_us", *lines]))
    rows = [f"{c},0,{n},{k},1000" for c, n, k in ((8, 0, 0), (64, 0, 0), (0, 1, 8), (0, 1, 64))]
    header = "prefill_chunk,kv_prefill,n_decode,kv_decode,time_us"
    (tp / "attention.csv").write_text("\n".join([header, *rows]))
    (folder / "run.yaml").write_text(yaml.safe_dump(RUN))
    lines = [json.dumps(request) for request in REQUESTS]
    (folder / "requests.jsonl").write_text("\n".join(lines))
    given = ["--run", "run.yaml", "--operators", "", "--out", "out"]
    paths = [part if part.startswith("--") else str(folder / part) for part in given]
    return ["check", "points", str(folder / "requests.jsonl"), *paths]


def test_any_profile_with_a_run_file_of_its_own(tmp_path: Path) -> None:
    done = CliRunner().invoke(cli, write(tmp_path), catch_exceptions=False)
    ttft, tpot, makespan, *_ = done.output.splitlines()
    # (4 + 8) / 2, 6 / 2 and 508 ms; ours 6, 6 and 506.
    assert ttft.split() == ["TTFT", "mean", "(s)", "vLLM", "0.0060", "simulated", "0.0060", "+0.0%"]
    assert tpot.split()[3:] == ["vLLM", "0.0030", "simulated", "0.0060", "+100.0%"]
    assert makespan.split()[2:] == ["vLLM", "0.5080", "simulated", "0.5060", "-0.4%"]
    run = json.loads((tmp_path / "out" / "1" / "run.json").read_text())
    (stage,) = run["instances"]["x"]["stages"]
    assert stage["tables"]["attention"]["decodes alone"] == {"points": 2, "filled_in": 0}


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("", "requests.jsonl: no request was answered"),
        ("\n{", "requests.jsonl, line 2: not JSON: "),
        ("[1]", "requests.jsonl, line 1: [1] is not a JSON object"),
        ('{"input_toks": 1}', "requests.jsonl, line 1: lacks output_toks"),
    ],
)
def test_what_are_no_timings_is_one_line(lines: str, message: str, tmp_path: Path) -> None:
    command = write(tmp_path)
    (tmp_path / "requests.jsonl").write_text(lines)
    with pytest.raises(JaxinferError) as error:
        CliRunner().invoke(cli, command, catch_exceptions=False)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_a_mistake_in_the_tables_is_one_line(tmp_path: Path) -> None:
    command = write(tmp_path)
    (tmp_path / "tp1" / "moe.csv").write_text("ep,tokens,time_us\n")
    with pytest.raises(JaxinferError, match=r"moe\.csv has operators that tables do not model"):
        CliRunner().invoke(cli, command, catch_exceptions=False)
