"""A conversation from a line of a batch or from ``LLM.chat``."""

from collections.abc import Mapping
from dataclasses import dataclass

from jaxinfer.errors import JaxinferError
from jaxinfer.files.json_lines import shorten


@dataclass(frozen=True)
class Conversation:
    """Messages for a chat template: ``role``, ``content`` and perhaps ``name``, all strings."""

    messages: list[dict[str, str]]


def read_conversation(value: object) -> Conversation:
    """Read a list of messages, whose contents are strings or lists of text parts.

    Null means absent. Text parts are joined by line breaks, as in vLLM.

    Raises:
        JaxinferError: it is something else; the message names the wrong element.
    """
    if not isinstance(value, list | tuple) or not value:
        raise JaxinferError(f"messages is {shorten(value)}, must be a non-empty list of messages")
    return Conversation([_message(item, f"messages[{i}]") for i, item in enumerate(value)])


def _message(value: object, name: str) -> dict[str, str]:
    if not isinstance(value, Mapping):
        raise JaxinferError(f"{name} is {shorten(value)}, must be an object with role and content")
    # OpenAI's answers have empty lists, and users send them back as messages.
    message = {
        key: item
        for key, item in value.items()
        if item is not None and not (key in ("annotations", "tool_calls") and item == [])
    }
    for key in message:
        if key not in ("role", "content", "name"):
            raise JaxinferError(f"{name} has {shorten(key)}, can only have role, content and name")
    role, speaker = message.get("role"), message.get("name", "")
    if not isinstance(role, str) or not role:
        raise JaxinferError(f"{name} has role {shorten(role)}, must be a non-empty string")
    if not isinstance(speaker, str):
        raise JaxinferError(f"{name} has name {shorten(speaker)}, must be a string")
    return message | {"content": _content(message.get("content"), name)}


def _content(value: object, name: str) -> str:
    if isinstance(value, str):
        return value
    if not isinstance(value, list | tuple) or not value:
        raise JaxinferError(
            f"{name} has content {shorten(value)}, must be a string or a list of text parts"
        )
    texts = []
    for part in value:
        text = part.get("text") if isinstance(part, Mapping) else None
        if not isinstance(text, str) or part != {"type": "text", "text": text}:
            raise JaxinferError(
                f"{name} has content part {shorten(part)}, "
                'must be {"type": "text", "text": "..."}'
            )
        texts.append(text)
    return "\n".join(texts)
