import gzip
import hashlib
import json
from pathlib import Path

import pytest

from jaxinfer.errors import JaxinferError
from jaxinfer.request import SamplingParams
from jaxinfer.workload.batch_input import (
    BadLine,
    BatchFile,
    BatchLine,
)
from jaxinfer.workload.conversation import Conversation


def read_batch(path: str | Path) -> list[BatchLine | BadLine]:
    """Read all lines, in their order."""
    with BatchFile(path) as file:
        good = {line.custom_id: line for line in file.lines(skipped=())}
        assert not good.keys() & file.bad.keys()
        assert all(line.number == file.number_of[line.custom_id] for line in good.values())
        return [file.bad.get(custom_id) or good[custom_id] for custom_id in file.number_of]


def read(tmp_path: Path, *lines: object) -> list[BatchLine | BadLine]:
    """Read a file of these lines: bytes and text as they are, anything else as JSON."""
    raw = [
        line if isinstance(line, bytes) else (line if isinstance(line, str) else json.dumps(line))
        for line in lines
    ]
    path = tmp_path / "in.jsonl"
    path.write_bytes(b"".join((x if isinstance(x, bytes) else x.encode()) + b"\n" for x in raw))
    return read_batch(path)


def envelope(url: str, body: object, **changes: object) -> dict[str, object]:
    return {"custom_id": "a", "method": "POST", "url": url, "body": body} | changes


def chat(**body: object) -> dict[str, object]:
    return envelope(
        "/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}]} | body
    )


def completion(**body: object) -> dict[str, object]:
    return envelope("/v1/completions", {"prompt": "Hi"} | body)


def good(tmp_path: Path, line: object) -> BatchLine:
    (only,) = read(tmp_path, line)
    assert isinstance(only, BatchLine), only
    return only


HI = Conversation([{"role": "user", "content": "Hi"}])


@pytest.mark.parametrize(
    ("line", "prompt"),
    [
        (chat(), HI),
        (completion(), "Hi"),
        (completion(prompt=[1, 2]), [1, 2]),
        ({"prompt": "Hi"}, "Hi"),
        ({"prompt": [3]}, [3]),
        ({"prompt_token_ids": [0, 5]}, [0, 5]),
        ({"messages": [{"role": "user", "content": "Hi"}]}, HI),
        ({"prompt": None, "prompt_token_ids": [7]}, [7]),
        ({"prompt": ""}, ""),
        (completion(prompt=["Hi"]), "Hi"),
        (completion(prompt=[[1, 2]]), [1, 2]),
    ],
)
def test_accepted_forms(tmp_path, line, prompt):
    assert good(tmp_path, line).prompt == prompt


def test_text_parts_become_one_text(tmp_path):
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    messages = [{"role": "system", "content": ""}, {"role": "user", "content": parts}]
    assert good(tmp_path, {"messages": messages}).prompt == Conversation(
        [{"role": "system", "content": ""}, {"role": "user", "content": "one\ntwo"}]
    )
    messages = [{"role": "user", "content": "Hi", "name": None, "tool_calls": None}]
    assert good(tmp_path, {"messages": messages}).prompt == HI
    messages = [{"role": "user", "content": "Hi", "annotations": [], "tool_calls": []}]
    assert good(tmp_path, {"messages": messages}).prompt == HI
    messages = [{"role": "user", "content": "Hi", "name": "Ann"}]
    assert good(tmp_path, {"messages": messages}).prompt == Conversation(messages)


def test_sampling_options_and_defaults(tmp_path):
    assert good(tmp_path, {"prompt": "Hi"}).sampling == SamplingParams(
        temperature=1.0, max_tokens=256
    )
    options = {
        "temperature": 1,
        "top_k": 5,
        "top_p": 0.5,
        "seed": 3,
        "max_tokens": 7,
        "stop": ["x"],
        "stop_token_ids": [2],
        "ignore_eos": True,
    }
    wanted = SamplingParams.model_validate(options)
    assert good(tmp_path, {"prompt": "Hi"} | options).sampling == wanted
    assert good(tmp_path, completion(**options)).sampling == wanted
    assert good(tmp_path, chat(stop="x")).sampling.stop == ("x",)


def test_max_completion_tokens_is_max_tokens(tmp_path):
    assert good(tmp_path, chat(max_completion_tokens=9)).sampling.max_tokens == 9
    both = chat(max_completion_tokens=9, max_tokens=9)
    assert good(tmp_path, both).sampling.max_tokens == 9


def test_what_a_line_gives_is_told_from_defaults(tmp_path):
    """A null is not given; the limit of a batch's lines is a default like others."""
    assert good(tmp_path, {"prompt": "Hi"}).sampling.model_fields_set == set()
    given = good(tmp_path, chat(top_p=0.5, temperature=None, max_completion_tokens=3)).sampling
    assert given.model_fields_set == {"top_p", "max_tokens"}
    assert good(tmp_path, {"prompt": "Hi", "min_tokens": 99}).sampling.max_tokens == 256


def test_numbers_as_openai_takes_them(tmp_path):
    asked = {"max_tokens": 4.0, "n": 2.0, "seed": 7.0, "min_tokens": 1.0, "logprobs": 3.0}
    found = good(tmp_path, {"prompt": "Hi"} | asked).sampling
    assert [type(getattr(found, name)) for name in asked] == [int] * 5
    assert found.max_tokens == 4
    assert good(tmp_path, chat(max_completion_tokens=4.0)).sampling.max_tokens == 4
    for zero in (0, 0.0):
        only = good(tmp_path, chat(top_p=zero, top_k=9)).sampling
        assert (only.top_p, only.top_k) == (1, 1)


@pytest.mark.parametrize("name", ["a.csv", "a.TSV", "a.csv.gz", "a.parquet.gz", "a.zst", "a.xlsx"])
def test_other_formats_are_refused_by_name(tmp_path, name):
    (tmp_path / name).write_text('{"prompt": "a"}')
    with pytest.raises(JaxinferError, match=rf"{name[:5]}.*input is JSON lines or Parquet, not \."):
        BatchFile(tmp_path / name)


def test_packed_lines(tmp_path):
    """The digest is that of the file, as others count it; a broken file is one error."""
    lines = [{"prompt": f"text {i}"} for i in range(50)]
    raw = gzip.compress("".join(json.dumps(line) + "\n" for line in lines).encode())
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(raw)
    with BatchFile(path) as file:
        assert [line.prompt for line in file.lines({"line-1"})] == [x["prompt"] for x in lines[1:]]
        assert file.sha256 == hashlib.sha256(raw).hexdigest()
    for damaged in (raw[:-30], b"not packed", raw[:20] + bytes(20) + raw[40:]):
        path.write_bytes(damaged)
        with pytest.raises(JaxinferError, match=r"cannot read .*a\.jsonl\.gz: "):
            BatchFile(path)


@pytest.mark.parametrize(
    "harmless",
    [
        {"model": "any", "user": "me", "metadata": {"k": "v"}},
        {"n": 1, "stream": False, "tools": [], "logit_bias": {}, "frequency_penalty": 0.0},
        {"logprobs": False, "top_logprobs": 0, "best_of": 1, "min_tokens": 0},
        {"temperature": None, "seed": None, "logprobs": None, "audio": None},
        {"response_format": {"type": "text"}},
        {"parallel_tool_calls": True, "tool_choice": "none", "functions": [], "suffix": ""},
    ],
)
def test_options_that_ask_for_nothing_are_accepted(tmp_path, harmless):
    default = SamplingParams(max_tokens=256)
    assert good(tmp_path, chat(**harmless)).sampling == default


def test_sampling_options(tmp_path):
    line = good(
        tmp_path,
        chat(
            logprobs=True, top_logprobs=4, n=3, min_tokens=2, logit_bias={"17": -5, "3": 1.5},
            presence_penalty=0.5, frequency_penalty=-0.5, repetition_penalty=1.1, min_p=0.1,
        ),
    )  # fmt: skip
    assert line.sampling == SamplingParams(
        logprobs=4, n=3, min_tokens=2, logit_bias={17: -5, 3: 1.5}, presence_penalty=0.5,
        frequency_penalty=-0.5, repetition_penalty=1.1, min_p=0.1, max_tokens=256,
    )  # fmt: skip
    assert good(tmp_path, chat(logprobs=True)).sampling.logprobs == 0
    assert good(tmp_path, chat(logprobs=True, top_logprobs=20)).sampling.logprobs == 20
    assert good(tmp_path, completion(logprobs=2)).sampling.logprobs == 2
    assert good(tmp_path, completion(logprobs=0, top_logprobs=0)).sampling.logprobs == 0


BAD = [
    # JSON
    (b"\xff\xfe{}", "not UTF-8: invalid start byte at byte 1"),
    ("{", "not JSON: Expecting property name"),
    ('{"prompt": "a"} x', "not JSON: Extra data at column 17"),
    ("[1]", "[1] is not a JSON object"),
    ('"text"', "'text' is not a JSON object"),
    ("null", "None is not a JSON object"),
    ('{"prompt": "a", "temperature": NaN}', "temperature: NaN is not JSON"),
    ('{"prompt": "a", "temperature": -Infinity}', "temperature: -Infinity is not JSON"),
    ('{"prompt": "a", "logit_bias": {"3": NaN}}', "3: NaN is not JSON"),
    ('{"prompt_token_ids": [1, NaN]}', "prompt_token_ids: NaN is not JSON"),
    ("NaN", "NaN and infinity are not JSON"),
    ('{"prompt": "a\x01"}', "not JSON: Invalid control character at column 14"),
    ({"prompt": "a", "stop": ""}, "stop: '' is empty, must have at least one character"),
    ('{"prompt": "a", "temperature": 1e999}', "temperature is inf, must be"),
    ('{"prompt": "a", "prompt": "b"}', "'prompt' is given twice"),
    (r'{"prompt": "\ud800"}', r"'\ud800' is half of a surrogate pair"),
    ("[" * 100_000, "nested too deeply"),
    ('{"prompt": "a", "seed": %s}' % ("1" * 5000), "not JSON: Exceeds the limit"),
    # envelope
    ({"custom_id": 7, "prompt": "a"}, "custom_id is 7, must be a non-empty string"),
    ({"custom_id": "", "prompt": "a"}, "custom_id is '', must be a non-empty string"),
    (envelope("/v1/embeddings", {}), "url is '/v1/embeddings', must be /v1/chat/completions or"),
    (envelope("/v1/completions", {}, method="GET"), "method is 'GET', must be 'POST'"),
    (envelope("/v1/completions", [1]), "body is [1], must be a JSON object"),
    ({"url": "/v1/completions", "body": {"prompt": "a"}}, "needs 'method' too"),
    (completion() | {"bodi": 1}, "unknown field 'bodi': did you mean 'body'?"),
    # prompts
    ({"promt": "a"}, "needs exactly one of prompt, messages, prompt_token_ids, has ['promt']"),
    ({"prompt": "a", "messages": []}, "has ['prompt', 'messages']"),
    ({"prompt": []}, "prompt is empty"),
    ({"prompt_token_ids": []}, "prompt_token_ids is empty"),
    ({"messages": []}, "messages is [], must be a non-empty list"),
    ({"prompt": 5}, "prompt is 5, must be a string or a list of token ids"),
    (completion(prompt=["a", "b"]), "write one prompt per line"),
    (completion(prompt=[[1], [2]]), "write one prompt per line"),
    (completion(prompt=[[]]), "prompt is empty"),
    ({"prompt": [1, -2]}, "prompt[1] is -2, must be an integer >= 0"),
    ({"prompt_token_ids": [1, True]}, "prompt_token_ids[1] is True, must be an integer >= 0"),
    ({"prompt_token_ids": "ab"}, "prompt_token_ids is 'ab', must be a list"),
    (chat(messages=None), "/v1/chat/completions needs messages, has []"),
    (chat(prompt="a"), "/v1/chat/completions needs messages, has ['prompt', 'messages']"),
    (envelope("/v1/completions", chat()["body"]), "/v1/completions needs prompt, has ['messages']"),
    # messages
    (chat(messages=["Hi"]), "messages[0] is 'Hi', must be an object with role and content"),
    (chat(messages=[{"content": "Hi"}]), "messages[0] has role None"),
    (chat(messages=[{"role": "user"}]), "messages[0] has content None"),
    (chat(messages=[{"role": "user", "content": []}]), "messages[0] has content []"),
    (
        chat(messages=[{"role": "user", "content": [{"type": "image_url"}]}]),
        "messages[0] has content part {'type': 'image_url'}",
    ),
    (
        chat(messages=[{"role": "user", "content": [{"type": "text", "text": "Hi", "x": 1}]}]),
        "messages[0] has content part {'type': 'text', 'text': 'Hi', 'x': 1}",
    ),
    (
        chat(messages=[{"role": "assistant", "content": "x", "tool_calls": [1]}]),
        "messages[0] has 'tool_calls', can only have role, content and name",
    ),
    (chat(messages=[{"role": "user", "content": "x", "name": 5}]), "messages[0] has name 5, must"),
    # options
    (chat(n=0), "n is 0, must be"),
    (chat(n=True), "n is True, must be"),
    (chat(best_of=2), "best_of is 2, not supported except as 1"),
    (chat(best_of=True), "best_of is True, not supported except as 1"),
    (chat(stream=0), "stream is 0, not supported except as false"),
    (chat(top_logprobs=-1), "top_logprobs is -1, must be an integer from 0 to 20"),
    (chat(min_tokens=9, max_tokens=8), "min_tokens is 9, must be at most max_tokens, 8"),
    (chat(logit_bias={"x": 1}), "logit_bias.x is 'x', must be"),
    (chat(logit_bias={"5": 101}), "logit_bias.5 is 101, must be"),
    (chat(presence_penalty=2.1), "presence_penalty is 2.1, must be"),
    (chat(repetition_penalty=0), "repetition_penalty is 0, must be"),
    (chat(stream=True), "stream is True, not supported except as false"),
    (chat(logprobs=3), "logprobs is 3, must be true or false for chat"),
    (chat(top_logprobs=3), "top_logprobs is 3, needs logprobs: true"),
    (chat(logprobs=True, top_logprobs=21), "top_logprobs is 21, must be an integer from 0 to 20"),
    (chat(logprobs=True, top_logprobs=True), "top_logprobs is True, must be an integer"),
    (chat(n=129), "n is 129, must be"),
    (chat(logit_bias={"-5": 1}), "logit_bias.-5 is -5, must be"),
    (chat(logit_bias={"5": 1, "05": 1}), "logit_bias: a token is named twice"),
    (chat(logit_bias={"\u0661": 1}), "logit_bias.\u0661 is '\u0661', must be"),
    (chat(repetition_penalty=1e300), "repetition_penalty is 1e+300, must be"),
    (completion(logprobs=True), "logprobs is True, must be"),
    (completion(top_logprobs=2), "top_logprobs is 2, for chat; give logprobs a number"),
    (chat(tools=[{"type": "function"}]), "tools is [{'type': 'function'}]"),
    (chat(response_format={"type": "json_object"}), "response_format is {'type': 'json_object'}"),
    (chat(reasoning_effort="low"), "reasoning_effort: unknown option, known: frequency_penalty, "),
    ({"prompt": "a", "temprature": 1}, "temprature: unknown option, did you mean 'temperature'?"),
    (chat(temperature=-1), "temperature is -1"),
    (chat(max_tokens=16.5), "max_tokens is 16.5, must be"),
    (chat(top_p=False), "top_p is False, must be"),
    (chat(max_tokens=0), "max_tokens is 0"),
    (chat(max_tokens="16"), "max_tokens is '16'"),
    (chat(max_completion_tokens="16"), "max_tokens is '16'"),
    (chat(max_tokens=3, max_completion_tokens=4), "max_tokens is 3 but max_completion_tokens is 4"),
]


@pytest.mark.parametrize(("line", "reason"), BAD)
def test_bad_line_has_its_number_and_a_one_line_reason(tmp_path, line, reason):
    before, bad, after = read(tmp_path, {"prompt": "x"}, line, {"prompt": "y"})
    assert isinstance(before, BatchLine)
    assert isinstance(after, BatchLine)
    assert isinstance(bad, BadLine)
    assert bad.number == 2
    assert reason in bad.reason
    assert "\n" not in bad.reason
    assert len(bad.reason) < 300


def test_numbering_counts_blank_lines_and_crlf_and_bom_are_fine(tmp_path):
    lines = read(tmp_path, b'\xef\xbb\xbf{"prompt": "a"}\r', "", "  \t", {"prompt": "b"})
    assert [(x.number, x.custom_id) for x in lines] == [(1, "line-1"), (4, "line-4")]
    assert all(isinstance(x, BatchLine) for x in lines)


def test_last_line_needs_no_newline_and_no_line_is_no_error(tmp_path):
    path = tmp_path / "in.jsonl"
    path.write_text('{"prompt": "a"}')
    assert len(read_batch(path)) == 1
    path.write_text("")
    assert read_batch(str(path)) == []


def test_bad_line_keeps_its_custom_id(tmp_path):
    (bad,) = read(tmp_path, chat(n=2))
    assert bad.custom_id == "a"


def test_second_user_of_a_custom_id_is_bad_and_gets_an_id_of_its_own(tmp_path):
    first, second, third = read(tmp_path, chat(), completion(), chat())
    assert isinstance(first, BatchLine)
    for bad in (second, third):
        assert isinstance(bad, BadLine)
        assert bad.reason == "custom_id 'a' is already that of line 1, must be unique"
    assert [second.custom_id, third.custom_id] == ["line-2", "line-3"]


def test_an_id_that_looks_like_a_made_one(tmp_path):
    """A line's own id stays, and a line without one gets another, whichever comes first."""
    lines = read(
        tmp_path,
        {"prompt": "a"},
        {"prompt": "b", "custom_id": "line-1"},
        {"prompt": "c", "custom_id": "line-4"},
        {"prompt": "d"},
        {"prompt": "e", "custom_id": "line-4"},
        "no line",
        {"prompt": "f", "custom_id": "line-6"},
        {"prompt": "g", "custom_id": "line-6-unnamed"},
    )
    assert [x.custom_id for x in lines] == [
        *("line-1-unnamed", "line-1", "line-4", "line-4-unnamed", "line-5"),
        *("line-6-unnamed-unnamed", "line-6", "line-6-unnamed"),
    ]
    bad = {x.number: x.reason for x in lines if isinstance(x, BadLine)}
    assert list(bad) == [5, 6]
    assert bad[5] == "custom_id 'line-4' is already that of line 3, must be unique"


def test_a_digest_takes_in_every_byte_of_the_file(tmp_path):
    path = tmp_path / "in.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\r\n\n \n{"bad": 1}\n{"prompt": "b"}')
    with BatchFile(path) as file:
        assert len(file.number_of) == 3
        assert file.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()


def test_long_values_are_shortened(tmp_path):
    (bad,) = read(tmp_path, {"prompt": "a" * 9, "messages\n" * 50: "x" * 9999})
    assert "\n" not in bad.reason
    (bad,) = read(tmp_path, chat(response_format={"schema": "x" * 9999}))
    assert len(bad.reason) < 200


@pytest.mark.parametrize("name", ["missing.jsonl", "."])
def test_unreadable_file(tmp_path, name):
    with pytest.raises(JaxinferError, match=r"^cannot read .*: (No such file|Is a directory)"):
        read_batch(tmp_path / name)


def test_a_file_is_read_again_line_by_line(tmp_path):
    """Lines are read without those that are done or bad, and not ahead of who asks."""
    path = tmp_path / "in.jsonl"
    raw = [json.dumps({"prompt": f"text {i}"}) for i in range(6)]
    path.write_text("\n".join([raw[0], "", "bad", *raw[1:]]))
    with BatchFile(path) as file:
        assert list(file.number_of.items()) == [(f"line-{n}", n) for n in (1, 3, 4, 5, 6, 7, 8)]
        assert list(file.bad) == ["line-3"]
        skipped = {"line-4", "none"}
        lines = file.lines(skipped)
        assert next(lines).prompt == "text 0"
        assert next(lines).prompt == "text 2"
        skipped.add("line-7")
        assert [(line.number, line.prompt) for line in lines] == [(6, "text 3"), (8, "text 5")]
        # From the beginning, as often as one likes.
        assert len(list(file.lines(()))) == 6


@pytest.mark.parametrize(
    ("change", "at"),
    [
        (lambda lines: [*lines[:2], lines[2].replace("c", "C"), *lines[3:]], 3),
        (lambda lines: [*lines[:1], "", *lines[1:]], 2),
        (lambda lines: lines[:2], 3),
        (lambda lines: [lines[1], lines[0], *lines[2:]], 1),
    ],
    ids=["another letter", "a blank line", "cut", "another order"],
)
def test_a_file_that_changes_meanwhile_is_refused(tmp_path, change, at):
    path = tmp_path / "in.jsonl"
    lines = [json.dumps({"prompt": letter}) for letter in "abcd"]
    path.write_text("\n".join(lines) + "\n")
    with BatchFile(path) as file:
        path.write_text("\n".join(change(lines)) + "\n")
        numbers = []
        with pytest.raises(JaxinferError, match=f"in.jsonl has changed .*, at line {at}: leave"):
            numbers.extend(line.number for line in file.lines(()))
    assert numbers == list(range(1, at))


def test_what_comes_after_the_end_is_not_of_the_file(tmp_path):
    path = tmp_path / "in.jsonl"
    path.write_text('{"prompt": "a"}\n')
    with BatchFile(path) as file:
        with path.open("a") as more:
            more.write('{"prompt": "b"}\n')
        assert [line.prompt for line in file.lines(())] == ["a"]
