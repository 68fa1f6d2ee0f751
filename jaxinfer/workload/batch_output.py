"""Results of a batch: lines in OpenAI's format.

A line is a function of its request and its tokens alone (no clock, no random ids), so that an
interrupted and resumed job writes the very lines of an uninterrupted one; the last digits of log
probabilities, if asked for, may differ.
"""

import hashlib
from dataclasses import asdict
from itertools import accumulate

from jaxinfer.request import CompletionOutput, Logprob, RequestOutput
from jaxinfer.workload.batch_input import BadLine, BatchLine
from jaxinfer.workload.conversation import Conversation

Record = dict[str, object]


def result_line(line: BatchLine, output: RequestOutput, model: str) -> Record:
    """OpenAI's result line for a request that ended by ``stop`` or ``length``.

    A conversation is answered by a ``chat.completion``, other prompts by a
    ``text_completion``; who asked in token ids also gets ``token_ids``. ``created`` is 0.
    """
    chat = isinstance(line.prompt, Conversation)
    digest = _digest(line.custom_id)
    num_prompt = len(output.prompt_token_ids)
    num_output = sum(len(choice.token_ids) for choice in output.outputs)
    body: Record = {
        "id": f"{'chatcmpl' if chat else 'cmpl'}-{digest}",
        "object": "chat.completion" if chat else "text_completion",
        "created": 0,
        "model": model,
        "choices": [_choice(line, choice) for choice in output.outputs],
        "usage": {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_output,
            "total_tokens": num_prompt + num_output,
        },
    }
    if output.prompt_logprobs is not None:
        body["prompt_logprobs"] = [
            None if position is None else {str(t): asdict(found) for t, found in position.items()}
            for position in output.prompt_logprobs
        ]
    response = {"status_code": 200, "request_id": f"req_{digest}", "body": body}
    return _record(line.custom_id, response, None)


def error_line(line: BatchLine | BadLine, reason: str) -> Record:
    """OpenAI's result line for a request that failed because of ``reason``."""
    error = {"code": "invalid_request", "message": f"line {line.number}: {reason}"}
    return _record(line.custom_id, None, error)


def _record(custom_id: str, response: Record | None, error: dict[str, str] | None) -> Record:
    return {
        "id": f"batch_req_{_digest(custom_id)}",
        "custom_id": custom_id,
        "response": response,
        "error": error,
    }


def _choice(line: BatchLine, output: CompletionOutput) -> Record:
    choice: Record = {"index": output.index}
    if isinstance(line.prompt, Conversation):
        choice["message"] = {"role": "assistant", "content": output.text}
    else:
        choice["text"] = output.text
    if isinstance(line.prompt, list):
        choice["token_ids"] = output.token_ids
    count = line.sampling.logprobs
    style = _chat_logprobs if isinstance(line.prompt, Conversation) else _completion_logprobs
    choice["logprobs"] = None if count is None else style(output, count)
    choice["finish_reason"] = output.finish_reason
    choice["stop_reason"] = output.stop_reason
    return choice


def _chat_logprobs(output: CompletionOutput, count: int) -> Record:
    assert output.logprobs is not None
    content = [
        _token_record(position[token])
        | {"top_logprobs": [_token_record(each) for each in _likeliest(position, count)]}
        for token, position in zip(output.token_ids, output.logprobs, strict=True)
    ]
    return {"content": content}


def _token_record(found: Logprob) -> Record:
    text = found.decoded_token or ""
    # Part of a character has no text of its own.
    as_bytes = None if "\ufffd" in text else list(text.encode())
    return {"token": text, "logprob": found.logprob, "bytes": as_bytes}


def _completion_logprobs(output: CompletionOutput, count: int) -> Record:
    assert output.logprobs is not None
    drawn = [p[token] for token, p in zip(output.token_ids, output.logprobs, strict=True)]
    texts = [each.decoded_token or "" for each in drawn]
    return {
        "tokens": texts,
        "token_logprobs": [each.logprob for each in drawn],
        "top_logprobs": [
            {each.decoded_token or "": each.logprob for each in _likeliest(position, count)}
            for position in output.logprobs
        ],
        "text_offset": [0, *accumulate(map(len, texts))][: len(texts)],
    }


def _likeliest(position: dict[int, Logprob], count: int) -> list[Logprob]:
    return sorted((p for p in position.values() if p.rank <= count), key=lambda p: p.rank)


def _digest(custom_id: str) -> str:
    return hashlib.sha256(custom_id.encode()).hexdigest()[:24]
