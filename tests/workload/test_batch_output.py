"""Lines of results: OpenAI's format, and nothing in it but what follows from the request."""

import hashlib

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


def test_logprobs_in_both_formats():
    found = [
        {7: Logprob(-0.5, 1, "Yo"), 8: Logprob(-1.5, 2, "No")},
        {9: Logprob(-4.0, 30, "\ufffd"), 8: Logprob(-0.1, 1, "é"), 7: Logprob(-3.0, 2, "Yo")},
    ]
    choice = CompletionOutput(0, "Yo?", [7, 9], None, found, "stop")
    output = RequestOutput("r", None, [1], [choice], True, RequestMetrics(arrival=0.0))
    params = SamplingParams(logprobs=2)
    chat = BatchLine(1, "a", Conversation([{"role": "user", "content": "Hi"}]), params)
    body = result_line(chat, output, "m")["response"]["body"]
    assert body["choices"][0]["logprobs"]["content"][1] == {
        "token": "\ufffd",
        "logprob": -4.0,
        "bytes": None,
        "top_logprobs": [
            {"token": "é", "logprob": -0.1, "bytes": [195, 169]},
            {"token": "Yo", "logprob": -3.0, "bytes": [89, 111]},
        ],
    }
    output.prompt_logprobs = [None, {5: Logprob(-2.0, 4, "x")}]
    text = BatchLine(1, "a", "Hi", params)
    body = result_line(text, output, "m")["response"]["body"]
    assert body["choices"][0]["logprobs"] == {
        "tokens": ["Yo", "\ufffd"],
        "token_logprobs": [-0.5, -4.0],
        "top_logprobs": [{"Yo": -0.5, "No": -1.5}, {"é": -0.1, "Yo": -3.0}],
        "text_offset": [0, 2],
    }
    assert body["prompt_logprobs"] == [
        None, {"5": {"logprob": -2.0, "rank": 4, "decoded_token": "x"}}
    ]  # fmt: skip


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
