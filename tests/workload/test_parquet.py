"""Parquet in and out, by pyarrow and pandas: as JSONL, a row a line; bounded memory."""

import hashlib
import json
import os
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jaxinfer import JaxinferError
from jaxinfer.workload.batch_input import BadLine, BatchFile, BatchLine
from jaxinfer.workload.parquet import write_results

ROWS: list[dict[str, Any]] = [
    {"prompt": "Hi", "max_tokens": 5, "temperature": 0.5},
    {"prompt_token_ids": [1, 2], "max_tokens": 7, "stop": ["a", "b"], "ignore_eos": True},
    {"messages": [{"role": "user", "content": "Hö"}, {"role": "assistant", "content": "?"}]},
    {"custom_id": "x", "prompt": "\U0001f600 \n", "seed": 2**40, "logit_bias": {"3": -1.5}},
    {"prompt": "both", "prompt_token_ids": [1]},
    {"custom_id": "x", "prompt": "twice"},
    {"max_tokens": 3},
    {"prompt": "half", "max_tokens": 0},
]


def contents(path: Path) -> list[Any]:
    with BatchFile(path) as file:
        good = {line.number: line for line in file.lines(())}
        bad = {line.number: line for line in file.bad.values()}
    return [(good | bad)[number] for number in sorted(good | bad)]


def as_jsonl(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def as_table(rows: list[dict[str, Any]]) -> pa.Table:
    """Return a table with a column for each name, null in rows that have none."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    return pa.Table.from_pylist([{n: row.get(n) for n in names} for row in rows])


def test_a_row_is_a_line(tmp_path: Path) -> None:
    """The same requests, and the same mistakes, as of JSONL; whatever the row groups."""
    pq.write_table(as_table(ROWS), tmp_path / "a.parquet", row_group_size=3)
    found = contents(tmp_path / "a.parquet")
    assert found == contents(as_jsonl(tmp_path / "a.jsonl", ROWS))
    assert [isinstance(line, BadLine) for line in found] == [False] * 4 + [True] * 4
    assert [line.custom_id for line in found[:4]] == ["line-1", "line-2", "line-3", "x"]


def test_as_pandas_writes_it(tmp_path: Path) -> None:
    """Numbers of which some are missing are floats there, and a kept index is a column."""
    frame = pd.DataFrame({"prompt": ["a", "b", "c"], "max_tokens": [3, None, 5]})
    frame[frame.prompt != "b"].set_index(pd.Index(["x", "y"])).to_parquet(tmp_path / "a.parquet")
    assert "__index_level_0__" in pq.read_schema(tmp_path / "a.parquet").names
    found = contents(tmp_path / "a.parquet")
    assert [line.sampling.max_tokens for line in found] == [3, 5]
    frame.to_parquet(tmp_path / "b.parquet")
    assert [line.sampling.max_tokens for line in contents(tmp_path / "b.parquet")] == [3, 256, 5]


def test_floats_in_lists_are_numbers_as_alone(tmp_path: Path) -> None:
    """Token ids as pandas has lists of which some have a missing number; others stay floats."""
    columns = {
        "prompt_token_ids": pa.array([[7.0, 8.0], [1.0]], pa.list_(pa.float64())),
        "stop_token_ids": pa.array([[3.0], None], pa.large_list(pa.float32())),
        "temperature": [0.5, 1.0],
    }
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")
    first, second = contents(tmp_path / "a.parquet")
    assert (first.prompt, second.prompt) == ([7, 8], [1])
    assert first.sampling.stop_token_ids == (3,)
    assert (first.sampling.temperature, second.sampling.temperature) == (0.5, 1.0)
    columns["prompt_token_ids"] = pa.array([[7.5], [1.0]], pa.list_(pa.float64()))
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")
    assert isinstance(contents(tmp_path / "a.parquet")[0], BadLine)


def test_a_failed_write_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file that was there stays; half of a new one does not."""
    path, lines = tmp_path / "out.parquet", as_jsonl(tmp_path / "lines.jsonl", [])
    path.write_bytes(b"old")

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(JaxinferError, match=r"cannot write .*out\.parquet: No space left"):
        write_results(path, lines, [])
    assert path.read_bytes() == b"old"
    monkeypatch.undo()
    with pytest.raises(KeyError):
        write_results(path, lines, ["gone"])
    assert {each.name for each in tmp_path.iterdir()} == {"out.parquet", "lines.jsonl"}
    write_results(path, lines, [])
    assert pq.read_table(path).num_rows == 0
    assert {each.name for each in tmp_path.iterdir()} == {"out.parquet", "lines.jsonl"}


def test_maps_categories_and_large_types(tmp_path: Path) -> None:
    columns = {
        "prompt": pa.array(["a", "b", "a"]).dictionary_encode(),
        "custom_id": pa.array(["1", "2", "3"], pa.large_string()),
        "logit_bias": pa.array([[("5", 1.0)], None, [("7", 2.5)]], pa.map_("string", "double")),
        "stop_token_ids": pa.array([[1], [2, 3], None], pa.large_list(pa.int32())),
    }
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")
    found: list[BatchLine] = contents(tmp_path / "a.parquet")
    assert [line.prompt for line in found] == ["a", "b", "a"]
    assert [line.custom_id for line in found] == ["1", "2", "3"]
    assert [line.sampling.logit_bias for line in found] == [{5: 1.0}, {}, {7: 2.5}]
    assert [line.sampling.stop_token_ids for line in found] == [(1,), (2, 3), ()]


def test_it_is_known_by_its_bytes(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(as_table(ROWS), path)
    with BatchFile(path) as file:
        assert file.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"promt": ["a"]}, r"unknown column 'promt': did you mean 'prompt'\?"),
        ({"prompt": ["a"], "source": ["b"]}, "unknown column 'source'"),
        ({"prompt": [b"a"]}, "column 'prompt' is of type binary, must be of text"),
        ({"prompt": ["a"], "user": pd.to_datetime(["2024-01-01"])}, "is of type timestamp"),
    ],
)
def test_columns_that_are_refused(columns: Any, message: str, tmp_path: Path) -> None:
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")
    with pytest.raises(JaxinferError, match=message) as error:
        BatchFile(tmp_path / "a.parquet")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("damage", ["text", "cut", "empty", "missing"])
def test_a_file_that_is_none(damage: str, tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(as_table(ROWS), path)
    whole = path.read_bytes()
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes({"text": b'{"prompt": "a"}\n', "cut": whole[:-9], "empty": b""}[damage])
    with pytest.raises(JaxinferError, match=r"a\.parquet") as error:
        BatchFile(path)
    assert "\n" not in str(error.value)


def test_a_name_given_twice(tmp_path: Path) -> None:
    """Of two columns, or fields of a struct, one would be dropped."""
    path = tmp_path / "a.parquet"
    pq.write_table(pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"])], ["prompt"] * 2), path)
    with pytest.raises(JaxinferError, match=r"a\.parquet: column 'prompt' is given twice"):
        BatchFile(path)
    text = pa.array(["user"])
    twice = pa.StructArray.from_arrays([text, text], ["role", "role"])
    column = pa.ListArray.from_arrays([0, 1], twice)
    pq.write_table(pa.table({"messages": column}), path)
    with pytest.raises(JaxinferError, match=r"column 'messages' is of type .*fields that differ"):
        BatchFile(path)


def test_numbers_as_ids(tmp_path: Path) -> None:
    """As tables have them, with some missing, too; their text is the id."""
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"custom_id": [7, 8, 7], "prompt": ["a", "b", "c"]}), path)
    first, second, third = contents(path)
    assert (first.custom_id, second.custom_id) == ("7", "8")
    assert third.reason == "custom_id '7' is already that of line 1, must be unique"
    frame = pd.DataFrame({"custom_id": [7, None], "prompt": ["a", "b"]})
    frame.to_parquet(path)
    assert [line.custom_id for line in contents(path)] == ["7", "line-2"]


def test_a_column_that_is_not_known(tmp_path: Path) -> None:
    """Another is named only where it is nearly the same."""
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"prompt": ["a"], "answer": ["b"]}), path)
    with pytest.raises(JaxinferError, match=r"unknown column 'answer': known: .*custom_id"):
        BatchFile(path)
    pq.write_table(pa.table({"promt": ["a"]}), path)
    with pytest.raises(JaxinferError, match="unknown column 'promt': did you mean 'prompt'"):
        BatchFile(path)


def test_nan_is_told_with_its_column(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"prompt": ["a"], "temperature": [float("nan")]}), path)
    (bad,) = contents(path)
    assert bad.reason == "temperature: NaN is not JSON, write a finite number"


def test_endings_in_capitals(tmp_path: Path) -> None:
    pq.write_table(as_table(ROWS[:1]), tmp_path / "A.PARQUET")
    assert contents(tmp_path / "A.PARQUET")[0].prompt == "Hi"


def test_without_pyarrow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(as_table(ROWS), path)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    message = r"^.*a\.parquet: Parquet takes pyarrow, .*: pip install 'pyarrow>=17'$"
    with pytest.raises(JaxinferError, match=message) as error:
        BatchFile(path)
    assert "\n" not in str(error.value)


def test_a_large_file_is_not_held(tmp_path: Path) -> None:
    """Only a few of 16 MB of prompts in a row group are held, by Python's and Arrow's counts."""
    path = tmp_path / "a.parquet"
    schema = pa.schema({"prompt": pa.string()})
    texts = [f"{i:06} " + "x" * 16_000 for i in range(1_000)]
    pq.write_table(
        pa.table({"prompt": texts}, schema),
        path,
        use_dictionary=False,
        compression="none",
        row_group_size=1_000,
        write_batch_size=64,
    )
    size = sum(map(len, texts))
    del texts
    pool = pa.default_memory_pool()
    before = pool.bytes_allocated()
    tracemalloc.start()
    with BatchFile(path) as file:
        tracemalloc.reset_peak()
        most = 0
        for line in file.lines(()):
            most = max(most, pool.bytes_allocated() - before)
            assert str(line.prompt).startswith(f"{line.number - 1:06}")
        peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert size > 15e6
    assert peak < size / 3
    assert most < size / 3


def test_results(tmp_path: Path) -> None:
    """Results come in the order that is asked for, whichever they ended in."""
    usage = {"prompt_tokens": 2, "completion_tokens": 3, "total_tokens": 5}
    bodies: dict[str, dict[str, Any]] = {
        "chat": {"choices": [{"message": {"role": "assistant", "content": "ä"},
                              "finish_reason": "stop"}], "usage": usage},
        "text": {"choices": [{"text": "b", "finish_reason": "length"},
                             {"text": "c", "finish_reason": "stop"}], "usage": usage},
        "tokens": {"choices": [{"text": "", "token_ids": [4, 5, 6], "finish_reason": "length"}],
                   "usage": usage},
    }  # fmt: skip
    records: list[dict[str, Any]] = [
        {"custom_id": id, "response": {"body": body}, "error": None} for id, body in bodies.items()
    ]
    records.append({"custom_id": "bad", "response": None, "error": {"message": "line 4: no"}})
    lines = as_jsonl(tmp_path / "a.parquet.jsonl", records)
    write_results(tmp_path / "a.parquet", lines, ["bad", "tokens", "chat", "text"])
    rows = pq.read_table(tmp_path / "a.parquet").to_pylist()
    assert [row["custom_id"] for row in rows] == ["bad", "tokens", "chat", "text"]
    assert rows[0] == dict.fromkeys(rows[0]) | {"custom_id": "bad", "error": "line 4: no"}
    assert [row["generated_text"] for row in rows[1:]] == ["", "ä", "b"]
    assert [row["generated_tokens"] for row in rows[1:]] == [[4, 5, 6], None, None]
    assert [row["finish_reason"] for row in rows[1:]] == ["length", "stop", "length"]
    assert {(row["num_input_tokens"], row["num_generated_tokens"]) for row in rows[1:]} == {(2, 3)}
    assert [json.loads(row["response"]) for row in rows[1:]] == [
        bodies[row["custom_id"]] for row in rows[1:]
    ]
    assert not (tmp_path / "a.parquet.new").exists()
