"""Lines of results: OpenAI's format, and nothing in it but what follows from the request."""

import hashlib
from typing import Any

import pytest

from jaxinfer.request import (
    CompletionOutput,
    Logprob,
    RequestMetrics,
    RequestOutput,
    SamplingParams,
)
from jaxinfer.workload.batch_input import BadLine, BatchLine
from jaxinfer.workload.batch_output import error_line, result_line
from jaxinfer.workload.conversation import Conversation


def output_of(text: str, token_ids: list[int], prompt: list[int]) -> RequestOutput:
    choice = CompletionOutput(0, text, token_ids, None, finish_reason="stop", stop_reason="END")
    return RequestOutput("r", None, prompt, [choice], True, RequestMetrics(arrival=0.0))


def line_for(prompt: str | list[int] | Conversation) -> BatchLine:
    return BatchLine(3, "mine", prompt, SamplingParams())


def test_chat_result_line():
    line = line_for(Conversation([{"role": "user", "content": "Hi"}]))
    result = result_line(line, output_of("Yo", [5, 6], [1, 2, 3]), "tiny")
    body = result["response"]["body"]
    assert result["custom_id"] == "mine"
    assert result["error"] is None
    assert result["id"].startswith("batch_req_")
    assert result["response"]["status_code"] == 200
    assert body["object"] == "chat.completion"
    assert body["model"] == "tiny"
    assert body["usage"] == {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
    assert body["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "Yo"},
            "logprobs": None,
            "finish_reason": "stop",
            "stop_reason": "END",
        }
    ]


def test_usage_counts_the_prompt_once_and_the_tokens_of_all_choices():
    choices = [
        CompletionOutput(i, "x", tokens, None, finish_reason="length")
        for i, tokens in enumerate(([5, 6], [7], [8, 9, 10]))
    ]
    output = RequestOutput("r", None, [1, 2, 3, 4], choices, True, RequestMetrics(arrival=0.0))
    body = result_line(line_for("Hi"), output, "tiny")["response"]["body"]
    assert body["usage"] == {"prompt_tokens": 4, "completion_tokens": 6, "total_tokens": 10}
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]


def logprob(value: float, rank: int, text: str, content: bytes | None = None) -> Logprob:
    return Logprob(value, rank, text, text.encode() if content is None else content)


def output_with(text: str, drawn: list[int], found: list[dict[int, Logprob]]) -> RequestOutput:
    choice = CompletionOutput(0, text, drawn, None, found, "stop")
    return RequestOutput("r", None, [1], [choice], True, RequestMetrics(arrival=0.0))


def logprobs_of(output: RequestOutput, count: int, chat: bool = False) -> dict[str, Any]:
    prompt = Conversation([{"role": "user", "content": "Hi"}]) if chat else "Hi"
    line = BatchLine(1, "a", prompt, SamplingParams(logprobs=count))
    found: dict[str, Any] = result_line(line, output, "m")["response"]["body"]["choices"][0]
    return found["logprobs"]


# "a", then U+1F600 of two tokens, then the end; beside them what else was likely.
EMOJI = output_with(
    "a😀",
    [7, 8, 9, 2],
    [
        {7: logprob(-0.5, 1, "a"), 6: logprob(-1.5, 2, "b")},
        {
            8: logprob(-1.0, 1, "", b"\xf0\x9f"),
            5: logprob(-2.0, 2, "\ufffd", b"\xf0"),
            2: logprob(-3.0, 3, "<end>", b""),
        },
        {9: logprob(-4.0, 30, "😀", b"\x98\x80"), 4: logprob(-0.1, 1, "😀")},
        {2: logprob(-0.2, 1, "<end>", b""), 3: logprob(-0.3, 2, "", b"")},
    ],
)


def test_logprobs_of_completions():
    """Tokens together are the text; likely ones have names of their own."""
    assert logprobs_of(EMOJI, 3) == {
        "tokens": ["a", "", "😀", ""],
        "token_logprobs": [-0.5, -1.0, -4.0, -0.2],
        "top_logprobs": [
            {"a": -0.5, "b": -1.5},
            {"bytes:\\xf0\\x9f": -1.0, "bytes:\\xf0": -2.0, "<end>": -3.0},
            # The drawn token ends this character, and has its name.
            {"bytes:\\xf0\\x9f\\x98\\x80": -0.1},
            {"<end>": -0.2, "token_id:3": -0.3},
        ],
        "text_offset": [0, 1, 1, 2],
    }


def test_logprobs_of_chat():
    content = logprobs_of(EMOJI, 3, chat=True)["content"]
    assert [each["token"] for each in content] == [
        "a",
        "bytes:\\xf0\\x9f",
        "bytes:\\x98\\x80",
        "<end>",
    ]
    assert [each["bytes"] for each in content] == [[97], [240, 159], [152, 128], []]
    assert [each["logprob"] for each in content] == [-0.5, -1.0, -4.0, -0.2]
    assert content[1]["top_logprobs"] == [
        {"token": "bytes:\\xf0\\x9f", "logprob": -1.0, "bytes": [240, 159]},
        {"token": "bytes:\\xf0", "logprob": -2.0, "bytes": [240]},
        {"token": "<end>", "logprob": -3.0, "bytes": []},
    ]
    assert content[2]["top_logprobs"][0]["bytes"] == [240, 159, 152, 128]


def test_prompt_logprobs():
    output = output_with("a", [7], [{7: logprob(-0.5, 1, "a")}])
    output.prompt_logprobs = [None, {5: logprob(-2.0, 4, "x")}]
    body = result_line(line_for("Hi"), output, "m")["response"]["body"]
    assert body["prompt_logprobs"] == [
        None,
        {"5": {"logprob": -2.0, "rank": 4, "decoded_token": "x"}},
    ]


@pytest.mark.parametrize(
    ("text", "drawn", "pieces", "content"),
    [
        # Bytes that make up no character, in the middle and at the end.
        ("a\ufffdb", [("a", b"a"), ("\ufffd", b"\xff"), ("b", b"b")], ["a", "\ufffd", "b"], None),
        ("\ufffd", [("", b"\xf0"), ("\ufffd", b"\x9f")], ["", "\ufffd"], None),
        (
            "\ufffdé",
            [("", b"\xf0"), ("\ufffd", b"\xc3"), ("é", b"\xa9")],
            ["", "\ufffd", "é"],
            None,
        ),
        # A token that ends one character and begins the next.
        (
            "é\u20ac",
            [("", b"\xc3"), ("é", b"\xa9\xe2"), ("\u20ac", b"\x82\xac")],
            ["", "é", "\u20ac"],
            [b"\xc3", b"\xa9\xe2", b"\x82\xac"],
        ),
        # The space at a text's beginning; the cut of a stop string, within a token; its end.
        ("Paris Paris", [("Paris", b" Paris"), (" Paris", b" Paris")], ["Paris", " Paris"], None),
        ("ab", [("a", b"a"), ("bc", b"bc"), ("d", b"d")], ["a", "b", ""], None),
        ("a", [("a", b"a"), ("<x>", b""), ("", b"")], ["a", "", ""], [b"a", b"", b""]),
    ],
)
def test_tokens_and_bytes_together_are_the_text(text, drawn, pieces, content):
    found = [
        {index: logprob(-1.0, 1, piece, stored)} for index, (piece, stored) in enumerate(drawn)
    ]
    output = output_with(text, list(range(len(drawn))), found)
    completion = logprobs_of(output, 1)
    assert completion["tokens"] == pieces
    assert "".join(completion["tokens"]) == text
    for piece, offset in zip(pieces, completion["text_offset"], strict=True):
        assert text[offset : offset + len(piece)] == piece
    listed = [bytes(each["bytes"]) for each in logprobs_of(output, 1, chat=True)["content"]]
    assert b"".join(listed) == text.encode()
    assert listed == (content or [piece.encode() for piece in pieces])


def test_tokens_of_one_text_are_told_apart():
    """Tokens such as ``A`` and ``<0x41>``, and those that the tokenizer does not know."""
    position = {
        1: logprob(-1.0, 1, "A"),
        2: logprob(-2.0, 2, "A"),
        3: logprob(-3.0, 3, "A"),
        4: logprob(-4.0, 4, "", b""),
        5: logprob(-5.0, 5, "<end>", b""),
        6: logprob(-6.0, 6, "<end>"),
    }
    for drawn, names in (
        (1, ["A", "bytes:A", "token_id:3", "token_id:4", "<end>", "bytes:<end>"]),
        (3, ["bytes:A", "token_id:2", "A", "token_id:4", "<end>", "bytes:<end>"]),
    ):
        (top,) = logprobs_of(output_with("A", [drawn], [position]), 6)["top_logprobs"]
        assert list(top.items()) == list(
            zip(names, (-1.0, -2.0, -3.0, -4.0, -5.0, -6.0), strict=True)
        )
    assert list(logprobs_of(output_with("A", [3], [position]), 2)["top_logprobs"][0]) == [
        "bytes:A",
        "token_id:2",
    ]


def test_completion_result_line_has_token_ids_where_the_prompt_had():
    by_text = result_line(line_for("Hi"), output_of("Yo", [5], [1]), "tiny")["response"]["body"]
    by_tokens = result_line(line_for([1]), output_of("", [5], [1]), "tiny")["response"]["body"]
    assert by_text["object"] == by_tokens["object"] == "text_completion"
    assert by_text["choices"][0]["text"] == "Yo"
    assert "token_ids" not in by_text["choices"][0]
    assert by_tokens["choices"][0]["token_ids"] == [5]


def test_result_line_is_the_same_each_time():
    first, second = (result_line(line_for("Hi"), output_of("Yo", [5], [1]), "m") for _ in range(2))
    assert first == second
    other = BatchLine(3, "other", "Hi", SamplingParams())
    assert result_line(other, output_of("Yo", [5], [1]), "m")["id"] != first["id"]


def test_ids_follow_from_the_line_s_own():
    for custom_id in ("mine", "yours"):
        digest = hashlib.sha256(custom_id.encode()).hexdigest()[:24]
        for prompt, kind in (("Hi", "cmpl"), (Conversation([]), "chatcmpl")):
            line = BatchLine(3, custom_id, prompt, SamplingParams())
            result = result_line(line, output_of("Yo", [5], [1]), "tiny")
            found = result["id"], result["response"]["request_id"], result["response"]["body"]["id"]
            assert found == (f"batch_req_{digest}", f"req_{digest}", f"{kind}-{digest}")
        assert error_line(line, "why")["id"] == f"batch_req_{digest}"


def test_error_line_names_the_line():
    bad = BadLine(7, "line-7", "prompt is empty")
    result = error_line(bad, bad.reason)
    assert result["response"] is None
    assert result["error"] == {"code": "invalid_request", "message": "line 7: prompt is empty"}
