"""Results of a batch: lines in OpenAI's format.

A line depends only on its request and its tokens (no clock, no random ids), so that an interrupted
and resumed job writes exactly the lines of an uninterrupted one. The last digits of log
probabilities, if requested, may differ.
"""

import hashlib
from itertools import accumulate

from jaxinfer.request import CompletionOutput, Logprob, RequestOutput
from jaxinfer.workload.batch_input import BadLine, BatchLine
from jaxinfer.workload.conversation import Conversation

Record = dict[str, object]


def result_line(line: BatchLine, output: RequestOutput, model: str) -> Record:
    """Return OpenAI's result line for a request that ended by ``stop`` or ``length``.

    A conversation is answered by a ``chat.completion``, other prompts by a ``text_completion``;
    answers to prompts in token ids also have ``token_ids``. ``created`` is 0.
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
            None if position is None else {str(t): _prompt_record(p) for t, p in position.items()}
            for position in output.prompt_logprobs
        ]
    response = {"status_code": 200, "request_id": f"req_{digest}", "body": body}
    return _record(line.custom_id, response, None)


def error_line(line: BatchLine | BadLine, reason: str) -> Record:
    """Return OpenAI's result line for a request that failed because of ``reason``."""
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


def _prompt_record(found: Logprob) -> Record:
    return {
        "logprob": found.logprob,
        "rank": found.rank,
        "decoded_token": found.decoded_token,
    }


def _chat_logprobs(output: CompletionOutput, count: int) -> Record:
    assert output.logprobs is not None
    content = []
    drawn = zip(output.token_ids, output.logprobs, _text_bytes(output), strict=True)
    for token, position, as_bytes in drawn:
        names = _names(position)
        likeliest = [
            _token_record(names[each], position[each], position[each].token_bytes or b"")
            for each in _likeliest(position, count)
        ]
        record = _token_record(names[token], position[token], as_bytes)
        content.append(record | {"top_logprobs": likeliest})
    return {"content": content}


def _token_record(name: str, found: Logprob, as_bytes: bytes) -> Record:
    return {"token": name, "logprob": found.logprob, "bytes": list(as_bytes)}


def _completion_logprobs(output: CompletionOutput, count: int) -> Record:
    assert output.logprobs is not None
    pieces = _pieces(output)
    top = []
    for token, piece, position in zip(output.token_ids, pieces, output.logprobs, strict=True):
        names = _names(position, {token: piece} if piece else {})
        top.append({names[each]: position[each].logprob for each in _likeliest(position, count)})
    return {
        "tokens": pieces,
        "token_logprobs": [
            position[token].logprob
            for token, position in zip(output.token_ids, output.logprobs, strict=True)
        ],
        "top_logprobs": top,
        "text_offset": [0, *accumulate(map(len, pieces))][: len(pieces)],
    }


def _likeliest(position: dict[int, Logprob], count: int) -> list[int]:
    found = [token for token in position if position[token].rank <= count]
    return sorted(found, key=lambda token: position[token].rank)


def _pieces(output: CompletionOutput) -> list[str]:
    """Return the text that each token adds; joined, they are the text."""
    assert output.logprobs is not None
    pieces, end = [], 0
    for token, position in zip(output.token_ids, output.logprobs, strict=True):
        # The text does not have special tokens, or anything that a stop string cuts off.
        piece = (position[token].decoded_token or "") if position[token].token_bytes else ""
        pieces.append(output.text[end : end + len(piece)])
        end += len(piece)
    return pieces


def _text_bytes(output: CompletionOutput) -> list[bytes]:
    """Return the bytes that each token adds to the text; joined, they are the text's UTF-8.

    They are the token's own, unless the text has something else in their place: U+FFFD for bytes
    that form no character, or nothing for a space at its very beginning.
    """
    assert output.logprobs is not None
    found: list[bytes] = []
    own, shown = [], []
    for token, position, piece in zip(
        output.token_ids, output.logprobs, _pieces(output), strict=True
    ):
        own.append(position[token].token_bytes or b"")
        shown.append(piece.encode())
        stored, there = b"".join(own), b"".join(shown)
        if stored == there or not stored.startswith(there):
            found += own if stored == there else shown
            own, shown = [], []
    return found + shown


def _names(position: dict[int, Logprob], taken: dict[int, str] | None = None) -> dict[int, str]:
    """Return a unique name for each token: its text, or else its bytes, or else its number.

    Args:
        taken: names already in use.
    """
    names = dict(taken or {})
    for token in sorted(position, key=lambda token: position[token].rank):
        if token not in names:
            text, as_bytes = _own_text(position[token]), _escaped(position[token])
            used = {"", *names.values()}
            names[token] = next(
                name for name in (text, as_bytes, f"token_id:{token}") if name not in used
            )
    return names


def _own_text(found: Logprob) -> str:
    """Return whole characters, or a special token's name; empty if there is neither."""
    if not found.token_bytes:
        return found.decoded_token or ""
    try:
        return found.token_bytes.decode()
    except UnicodeDecodeError:
        return ""


def _escaped(found: Logprob) -> str:
    """Return bytes as OpenAI's completions name them, such as ``bytes:\\xf0\\x9f``; or empty."""
    if not found.token_bytes:
        return ""
    printable = range(0x20, 0x7F)
    shown = (chr(byte) if byte in printable else f"\\x{byte:02x}" for byte in found.token_bytes)
    return "bytes:" + "".join(shown)


def _digest(custom_id: str) -> str:
    return hashlib.sha256(custom_id.encode()).hexdigest()[:24]
