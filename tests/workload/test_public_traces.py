"""ShareGPT's, Mooncake's and BurstGPT's files: rows as these projects publish them."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from jaxinfer import JaxinferError
from jaxinfer.config.run_file import as_run_file
from jaxinfer.simulate.run import simulate
from jaxinfer.workload.bench_request import BenchRequest, modelled_tokens, real_tokens
from jaxinfer.workload.lengths import read_trace, read_workload

BURST = """Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,Conversation log
45.0,ChatGPT,1087.0,230.0,1317.0,Conversation log
118,GPT-4,417,0,417,API log
119,GPT-4,,0.0,0,API log
120,GPT-4,99,7,106,API log
"""


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def lines(*values: Mapping[str, Any]) -> str:
    return "".join(json.dumps(value) + "\n" for value in values)


def test_burst_gpt(tmp_path: Path) -> None:
    """Two rows without an answer are failures."""
    path = write(tmp_path / "b.csv", BURST)
    found = read_trace(path)
    assert found.requests == [
        BenchRequest(None, 472, 18, 5.0),
        BenchRequest(None, 1087, 230, 45.0),
        BenchRequest(None, 99, 7, 120.0),
    ]
    assert found.has_times
    assert found.note == f"{path}: 2 rows left out, failures without response tokens"
    assert [item.max_tokens for item in read_trace(path, 3).requests] == [18, 230, 7]
    notes: list[str] = []
    config = as_run_file({"workload": {"trace": str(path), "arrivals": "trace"}})
    assert [item.arrival for item in config.requests(notes.append)] == [0, 40, 115]
    moved = f"{path}: its first request comes at 5 s, which counts as 0"
    assert notes == [found.note, moved]


def test_lengths_as_pandas_writes_them(tmp_path: Path) -> None:
    text = "num_prefill_tokens,num_decode_tokens,arrived_at\n10.0,3.00,0\n"
    assert read_workload(write(tmp_path / "a.csv", text)) == [BenchRequest(None, 10, 3, 0.0)]
    mooncake = lines({"timestamp": 1500, "input_length": 10.0, "output_length": 3.0})
    assert read_workload(write(tmp_path / "a.jsonl", mooncake)) == [BenchRequest(None, 10, 3, 1.5)]


MOONCAKE = [
    {"timestamp": 0, "input_length": 1200, "output_length": 4, "hash_ids": [0, 1, 2]},
    {"timestamp": 60_000, "input_length": 1500, "output_length": 5, "hash_ids": [0, 1, 3]},
    {"timestamp": 120_500, "input_length": 1024, "output_length": 6, "hash_ids": [0, 4]},
    {"timestamp": 180_000, "input_length": 1200, "output_length": 4, "hash_ids": [0, 1, 2]},
]


def test_mooncake_s_prompts_share_what_their_blocks_say(tmp_path: Path) -> None:
    path = write(tmp_path / "m.jsonl", lines(*MOONCAKE))
    trace = read_trace(path)
    assert [item.arrival for item in trace.requests] == [0, 60, 120.5, 180]
    for tokens in (
        [modelled_tokens(item) for item in trace.requests],
        [real_tokens(item, 49152, seed) for seed, item in enumerate(trace.requests)],
    ):
        assert [len(each) for each in tokens] == [1200, 1500, 1024, 1200]
        assert tokens[0][:1024] == tokens[1][:1024]
        assert tokens[0][1024:] != tokens[1][1024:1200]
        assert tokens[0][:512] == tokens[2][:512]
        assert not set(tokens[0][512:540]) <= set(tokens[2][512:])
        assert tokens[0] == tokens[3]
        assert all(0 <= token < 49152 for each in tokens for token in each)


def test_a_prefix_cache_sees_mooncake_s_hits(tmp_path: Path) -> None:
    """Pages of 16: 64 of the second's, 32 of the third's, and all but the last token's of the
    fourth's, in tokens."""
    path = write(tmp_path / "m.jsonl", lines(*MOONCAKE))
    config = as_run_file(
        {
            "model": "llama-3-8b",
            "groups": {"g": {"kind": "A100-80G-SXM"}},
            "instances": {"i": {"group": "g", "page_size": 16}},
            "workload": {"trace": str(path), "arrivals": "trace"},
        }
    )
    hits: dict[str, int | None] = {}
    simulate(
        config,
        config.requests(),
        on_request=lambda request, times: hits.update(
            {request.id: request.metrics.num_cached_tokens}
        ),
    )
    assert {id: hit or 0 for id, hit in hits.items()} == {"0": 0, "1": 1024, "2": 512, "3": 1184}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hash_ids": [0, 1]}, "line 1: hash_ids has 2 blocks, must have 3: one for each 512"),
        ({"timestamp": -1}, "line 1: timestamp is -1, must be a number of milliseconds >= 0"),
        ({"timestamp": True}, "line 1: timestamp is True"),
        ({"output_length": 0}, "line 1: output_length is 0, must be an integer >= 1"),
        ({"hash_ids": [0, 1, "a"]}, r"hash_ids\[2\] is 'a'"),
        ({"tenant": 1}, "unknown field 'tenant'"),
    ],
)
def test_mooncake_s_mistakes(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(JaxinferError, match=message):
        read_workload(write(tmp_path / "m.jsonl", lines(MOONCAKE[0] | change)))


@pytest.mark.parametrize(
    ("name", "text"),
    [("a.csv", "prompt,completion\n1,2\n"), ("a.jsonl", '{"prompt": 1, "completion": 2}\n')],
)
def test_the_known_sets_are_named(name: str, text: str, tmp_path: Path) -> None:
    with pytest.raises(JaxinferError) as error:
        read_workload(write(tmp_path / name, text))
    known = {
        "a.csv": ("num_prefill_tokens", "ContextTokens", "Request tokens"),
        "a.jsonl": ("prompt_token_ids", "input_length", "conversations"),
    }[name]
    assert all(word in str(error.value) for word in ("'prompt,completion'", *known))


def talk(*texts: str) -> dict[str, Any]:
    who = ("human", "gpt") * len(texts)
    turns = [{"from": who[i], "value": text} for i, text in enumerate(texts)]
    return {"id": "x", "conversations": turns}


# One token a byte, as the tiny model's tokenizer has it: kept are the first and the last two.
TALKS = [
    talk("hello there", "hi, what can I do?", "nothing"),
    talk("only one turn"),
    talk("abc", "a prompt of three tokens"),
    talk("an answer of three", "abc"),
    talk("p" * 1025, "a prompt above 1024"),
    talk("p" * 1024, "a" * 1025),
    {"id": "y", "conversations": []},
    talk("p" * 1024, "a" * 1024),
    talk("four", "four"),
]
KEPT = [(11, 18), (1024, 1024), (4, 4)]


@pytest.mark.parametrize("suffix", [".json", ".jsonl"])
def test_sharegpt_is_taken_as_vllm_takes_it(suffix: str, tiny_folder: Path, tmp_path: Path) -> None:
    path = tmp_path / f"talks{suffix}"
    write(path, json.dumps(TALKS, indent=1) if suffix == ".json" else lines(*TALKS))
    notes: list[str] = []
    config = as_run_file({"model": str(tiny_folder), "workload": {"trace": str(path)}})
    found = config.requests(notes.append)
    assert [(item.prompt_len, item.max_tokens) for item in found] == KEPT
    reference = Tokenizer.from_file(str(tiny_folder / "tokenizer.json"))
    assert found[0].prompt_token_ids == reference.encode("hello there").ids
    assert notes[0].startswith(f"{path}: 6 of 9 conversations left out, as vLLM does:")
    two = {"trace": str(path), "tokenizer": str(tiny_folder), "limit": 2}
    found = as_run_file({"model": "llama-3-8b", "workload": two}).requests()
    assert [(item.prompt_len, item.max_tokens) for item in found] == KEPT[:2]


@pytest.mark.parametrize("model", ["llama-3-8b", None])
def test_texts_without_a_tokenizer(model: str | None, tmp_path: Path) -> None:
    path = write(tmp_path / "talks.json", json.dumps(TALKS))
    config = as_run_file({"model": model, "workload": {"trace": str(path)}})
    with pytest.raises(JaxinferError, match=r"tokenizer: no .*workload\.tokenizer") as error:
        config.requests()
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{}", "must be a list"),
        ("[1]", "1 is no object"),
        ('[{"a": 1}]', "has the fields 'a', must have conversations"),
        ('[{"conversations": [{"value": "abcd"}, {"value": 3}]}]', "has no value"),
        ('[{"conversations": []}', "does not end"),
        ('[{"conversations": []} x', "does not end"),
        ('[{"conversations": [}', "not JSON"),
        ("[]", "holds no request"),
        ('[{"conversations": []}]', "holds no request: .*1 of 1 conversations left out"),
    ],
)
def test_sharegpt_s_mistakes(text: str, message: str, tmp_path: Path) -> None:
    path = write(tmp_path / "talks.json", text)
    with pytest.raises(JaxinferError, match=message) as error:
        read_trace(path, encode=lambda text: list(text.encode()))
    assert "talks.json" in str(error.value)
    assert "\n" not in str(error.value)
