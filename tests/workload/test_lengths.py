import gzip
import json
import os
import time
from pathlib import Path

import pytest

from jaxinfer.config import workload as module
from jaxinfer.config.run_file import Workload
from jaxinfer.errors import JaxinferError
from jaxinfer.workload.lengths import BenchRequest, read_trace, read_workload, synthetic_tokens

VIDUR = "num_prefill_tokens,num_decode_tokens,arrived_at\n"
AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n"


def lengths(prompt: int, output: int, arrival: float = 0.0) -> BenchRequest:
    return BenchRequest(None, prompt, output, arrival)


def read(tmp_path: Path, name: str, text: str) -> list[BenchRequest]:
    path = tmp_path / name
    path.write_text(text)
    return read_workload(path)


@pytest.mark.parametrize(
    ("text", "requests"),
    [
        (VIDUR + "5,6,0.5\n7,8,0.25\n", [lengths(5, 6, 0.5), lengths(7, 8, 0.25)]),
        ("num_prefill_tokens,num_decode_tokens\n5,6\n", [lengths(5, 6)]),
        (
            "num_prefill_tokens,num_decode_tokens,num_total_tokens,pd_ratio\n3,4,7,0.75\n",
            [lengths(3, 4)],
        ),
        (
            AZURE + "2023-11-16 18:17:04.0319600,3,8\n2023-11-16 18:17:03.9799600,4,9",
            [lengths(3, 8, 0.052), lengths(4, 9, 0.0)],
        ),
        (
            AZURE + "2023-11-16 18:17:03.979960,3,8\n2023-11-16 18:17:04.031967,4,9",
            [lengths(3, 8, 0.0), lengths(4, 9, 0.052007)],
        ),
        ("\ufeff" + VIDUR + "5,6,0\r\n\n", [lengths(5, 6)]),
    ],
)
def test_csv_formats(tmp_path, text, requests):
    assert read(tmp_path, "trace.csv", text) == requests


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.csv", "\ufeff" + VIDUR + "5,6,0\r\n\n"),
        ("a.jsonl", '{"prompt_token_ids": [1, 2], "max_tokens": 3}\n'),
        ("a.json", json.dumps([{"conversations": [{"value": "a b c d"}, {"value": "e f g h"}]}])),
    ],
)
def test_packed_traces(tmp_path, name, text):
    plain, packed = tmp_path / name, tmp_path / f"{name}.gz"
    plain.write_bytes(text.encode())
    raw = gzip.compress(text.encode())
    packed.write_bytes(raw)

    def read_one(path):
        return read_trace(path, encode=lambda text: list(range(len(text.split()))))

    assert read_one(packed) == read_one(plain)
    for damaged in (raw[:-9], b"plain", raw[:15] + bytes(9) + raw[24:]):
        packed.write_bytes(damaged)
        with pytest.raises(JaxinferError, match=rf"cannot read .*{name}\.gz") as error:
            read_one(packed)
        assert "\n" not in str(error.value)


def test_a_time_without_a_zone_is_utc(tmp_path, monkeypatch):
    """Local time has hours that do not exist, or come twice."""
    monkeypatch.setenv("TZ", "America/New_York")
    time.tzset()
    try:
        rows = "2023-03-12 01:30:00,1,1\n2023-03-12 03:30:00,1,1\n2023-03-12 03:30:00+01:00,1,1\n"
        found = read(tmp_path, "trace.csv", AZURE + rows)
    finally:
        monkeypatch.undo()
        time.tzset()
    assert [item.arrival for item in found] == [0.0, 7200.0, 3600.0]


def test_jsonl(tmp_path):
    lines = [
        {"prompt_token_ids": [1, 2], "max_tokens": 3},
        {"id": 0, "prompt_len": 1, "prompt_token_ids": [4], "max_tokens": 5, "text": "x"},
    ]
    text = "\n\n".join(json.dumps(x) for x in lines)
    assert read(tmp_path, "work.jsonl", text) == [
        BenchRequest([1, 2], 2, 3, 0.0),
        BenchRequest([4], 1, 5, 0.0),
    ]


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        ("a.txt", "", "a.txt must be a .jsonl, .csv or .json file"),
        ("a.jsonl", "", "holds no request"),
        ("a.csv", "", "has the columns ''"),
        ("a.csv", VIDUR, "holds no request"),
        ("a.csv", "x,y\n1,2\n", "'x,y', must have num_prefill_tokens,num_decode_tokens[,arriv"),
        ("a.csv", "num_prefill_tokens,num_decode_tokens,arived_at\n1,2,3\n", "must have"),
        ("a.csv", "ContextTokens,GeneratedTokens\n1,2\n", "ContextTokens,GeneratedTokens,TIME"),
        ("a.csv", "num_prefill_tokens,num_decode_tokens,num_decode_tokens\n1,2,3\n", "must have"),
        ("a.csv", VIDUR + "1,2,0\n0,2,0\n", "line 3: num_prefill_tokens is '0', must be"),
        ("a.csv", VIDUR + "1,-2,0\n", "line 2: num_decode_tokens is '-2', must be"),
        ("a.csv", VIDUR + "\u00b2,2,0\n", "line 2: num_prefill_tokens is '\u00b2', must be"),
        ("a.csv", VIDUR + "\u0664,2,0\n", "line 2: num_prefill_tokens is '\u0664', must be"),
        ("a.csv", VIDUR + "1,2,inf\n", "line 2: arrived_at is 'inf', must be"),
        ("a.csv", VIDUR + "1.5,2,0\n", "line 2: num_prefill_tokens is '1.5', must be"),
        ("a.csv", VIDUR + "1,2,-1\n", "line 2: arrived_at is '-1', must be"),
        ("a.csv", VIDUR + "1,2,nan\n", "line 2: arrived_at is 'nan', must be"),
        ("a.csv", VIDUR + "1,2,soon\n", "line 2: arrived_at is 'soon', must be"),
        ("a.csv", VIDUR + "1,2\n", "line 2: 2 cells, must be 3"),
        ("a.csv", AZURE + "noon,1,2\n", "line 2: TIMESTAMP is 'noon', must be like"),
        (
            "a.jsonl",
            "{}",
            "line 1: has the fields '', must have prompt_token_ids,max_tokens or time",
        ),
        ("a.jsonl", '{"max_tokens": 1}', "line 1: prompt_token_ids is None, must be a list"),
        ("a.jsonl", '\n{"prompt_token_ids": [1]}', "line 2: max_tokens is None, must be"),
        ("a.jsonl", '{"prompt_token_ids": [1], "max_tokens": 0}', "line 1: max_tokens is 0"),
        ("a.jsonl", '{"prompt_token_ids": [1], "max_tokens": 1.5}', "max_tokens is 1.5"),
        ("a.jsonl", '{"prompt_token_ids": [], "max_tokens": 1}', "prompt_token_ids is empty"),
        ("a.jsonl", '{"prompt_token_ids": [1], "max_token": 1}', "did you mean 'max_tokens'?"),
        (
            "a.jsonl",
            '{"prompt_token_ids": [1], "max_tokens": 1, "prompt_len": 2}',
            "line 1: prompt_len is 2, but there are 1 prompt_token_ids",
        ),
        ("a.jsonl", "[]", "line 1: [] is not a JSON object"),
    ],
)
def test_bad_workload_is_named_in_one_line(tmp_path, name, text, reason):
    with pytest.raises(JaxinferError) as error:
        read(tmp_path, name, text)
    assert reason in str(error.value)
    assert name in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["missing.csv", "missing.jsonl", "folder.csv"])
def test_unreadable_file(tmp_path, name):
    (tmp_path / "folder.csv").mkdir()
    with pytest.raises(JaxinferError, match=r"^cannot read .*: (No such file|Is a directory)"):
        read_workload(tmp_path / name)


def test_csv_that_is_not_text(tmp_path):
    path = tmp_path / "a.csv"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(JaxinferError, match="as CSV"):
        read_workload(path)


def test_synthetic_tokens_depend_on_the_seed_alone():
    tokens = synthetic_tokens(1000, 50, seed=3)
    assert tokens == synthetic_tokens(1000, 50, seed=3)
    assert tokens != synthetic_tokens(1000, 50, seed=4)
    assert len(tokens) == 1000
    assert set(tokens) == set(range(50))


@pytest.mark.parametrize("suffix", [".csv", ".jsonl"])
def test_what_comes_after_the_limit_is_not_looked_at(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"w{suffix}"
    if suffix == ".csv":
        lines = ["num_prefill_tokens,num_decode_tokens", "1,2", "3,4", "no"]
    else:
        lines = [f'{{"prompt_token_ids": [7], "max_tokens": {n}}}' for n in (2, 4)] + ["no"]
    path.write_text("\n".join(lines) + "\n")
    assert [item.max_tokens for item in read_workload(path, 1)] == [2]
    assert [item.max_tokens for item in read_workload(path, 2)] == [2, 4]
    with pytest.raises(JaxinferError, match=r"line [34]: "):
        read_workload(path, 3)


@pytest.mark.parametrize(("times", "has"), [((0, 0, 5), True), ((0, 0, 0), True), ((), False)])
def test_a_trace_has_times_where_it_has_their_column(
    times: tuple[int, ...], has: bool, tmp_path: Path
) -> None:
    path = tmp_path / "w.csv"
    rows = [f"1,1,{time}" for time in times]
    header = "num_prefill_tokens,num_decode_tokens"
    rows = [f"{header},arrived_at", *rows] if has else [header, "1,1"]
    path.write_text("\n".join(rows) + "\n")
    workload = Workload(trace=str(path), limit=2, arrivals={"kind": "trace"})  # type: ignore[arg-type]
    if has:
        assert [item.arrival for item in workload.requests(None)] == [0, 0]
    else:
        with pytest.raises(JaxinferError, match="has no times"):
            workload.requests(None)


def test_a_trace_that_stays_is_read_once(tmp_path, monkeypatch):
    """The list may be changed by whoever gets it; another limit or model is another trace."""
    read, calls = module.read_trace, []

    def counted(path, *args):
        calls.append(path)
        return read(path, *args)

    monkeypatch.setattr(module, "read_trace", counted)
    path = tmp_path / "a.csv"
    path.write_text(VIDUR + "5,6,0\n7,8,0\n")
    workload = Workload(trace=str(path))
    for _ in range(3):
        found = workload.requests("m")
        assert found == [lengths(5, 6), lengths(7, 8)]
        found.clear()
    assert len(calls) == 1
    workload._read("m", print, False).clear()
    assert len(workload.requests("m")) == 2
    assert len(calls) == 1
    assert len(Workload(trace=str(path), limit=1).requests("m")) == 1
    assert workload.requests("n") == [lengths(5, 6), lengths(7, 8)]
    assert len(calls) == 3
    path.write_text(VIDUR + "9,6,0\n7,8,0\n")
    os.utime(path, (0, 0))
    assert workload.requests("n") == [lengths(9, 6), lengths(7, 8)]
    assert len(calls) == 4
    assert module._read_once.cache_info().currsize == 2, "what was read before is let go"
    path.unlink()
    with pytest.raises(JaxinferError, match="cannot read"):
        workload.requests("n")
