"""Inputs of ``LLM.generate`` and ``LLM.chat``: prompts, conversations and sampling parameters."""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice, repeat, zip_longest
from numbers import Integral
from typing import Any, TypedDict

from jaxinfer.errors import JaxinferError
from jaxinfer.files.json_lines import shorten
from jaxinfer.request import SamplingParams


class TokensPrompt(TypedDict):
    """A prompt as token ids: Python or numpy integers, or an array of integers."""

    prompt_token_ids: Sequence[int]


class TextPrompt(TypedDict):
    """A prompt as text, as in vLLM."""

    prompt: str


Prompt = str | TextPrompt | TokensPrompt
Messages = Sequence[Mapping[str, Any]]
Params = SamplingParams | Iterable[SamplingParams]


def model_name(model: object) -> str:
    """Return the name or path of an ``LLM``'s model as a string.

    Raises:
        JaxinferError: ``model`` is neither a string nor a path, or is empty.
    """
    if not isinstance(model, str | os.PathLike) or not os.fspath(model):
        raise JaxinferError(
            f"model is {shorten(model)}, must be a demo's name, a file, a folder or a hub id"
        )
    return os.fspath(model)


def each_prompt(prompts: object) -> Iterable[Any]:
    """Return one or several prompts as an iterable.

    Raises:
        JaxinferError: ``prompts`` is neither a prompt nor an iterable.
    """
    one = isinstance(prompts, str | bytes | Mapping)
    return [prompts] if one else iterable("prompts", prompts)


def each_conversation(messages: object) -> Iterable[Any]:
    """Return one or several conversations as an iterable.

    Raises:
        JaxinferError: ``messages`` is neither a conversation nor an iterable.
    """
    if isinstance(messages, str | bytes | Mapping):
        return [messages]
    many = iterable("messages", messages)
    if not isinstance(many, Sequence):
        several = iter(many)
        beginning = list(islice(several, 1))
        many = chain(beginning, several)
    else:
        beginning = list(many[:1])
    one = bool(beginning) and isinstance(beginning[0], Mapping)
    return [list(many)] if one else many


def paired(prompts: Iterable[Any], params: Params) -> Iterator[tuple[Any, SamplingParams]]:
    """Pair prompts with their sampling parameters; both are read one by one.

    Raises:
        JaxinferError: some parameters are not ``SamplingParams``, or their number is not that of
            the prompts.
    """
    if isinstance(params, SamplingParams):
        yield from zip(prompts, repeat(params))
        return
    many = [params] if isinstance(params, str | Mapping) else iterable("sampling_params", params)
    missing: Any = object()
    for index, (prompt, given) in enumerate(zip_longest(prompts, many, fillvalue=missing)):
        if prompt is missing:
            raise JaxinferError(f"{index} prompts, but more sampling_params")
        if given is missing:
            raise JaxinferError(f"{index} sampling_params, but more prompts")
        check_params(given)
        yield prompt, given


def text_or_token_ids(prompt: object) -> str | list[int]:
    """Return the text or the token ids of a prompt.

    Raises:
        JaxinferError: ``prompt`` is not a prompt.
    """
    match prompt:
        case str():
            return prompt
        case {"prompt": str() as text, **rest} if not rest:
            return text_or_token_ids(text)
        case {"prompt_token_ids": given, **rest} if not rest:
            return token_ids(given)
    raise JaxinferError(
        f"{shorten(prompt)} must be a text, {{'prompt': text}} or "
        "{'prompt_token_ids': [integers]}"
    )


def token_ids(given: object) -> list[int]:
    """Convert a list, tuple or array of integers of any type to a list of Python integers.

    Raises:
        JaxinferError: ``given`` is something else.
    """
    values = given.tolist() if hasattr(given, "tolist") else given
    if isinstance(values, list | tuple):
        kinds = {type(value) for value in values}
        # True is also an integer.
        if all(kind is not bool and issubclass(kind, Integral) for kind in kinds):
            return [int(value) for value in values]
    raise JaxinferError(f"prompt_token_ids is {shorten(given)}, must be a list of integers")


def check_params(given: object) -> None:
    """Raise JaxinferError if sampling parameters have an invalid type."""
    if not isinstance(given, SamplingParams):
        raise JaxinferError(
            f"sampling_params is {shorten(given)}, must be SamplingParams(...), or one of them "
            "for each prompt"
        )


def iterable(name: str, given: object) -> Iterable[Any]:
    """Return the argument if it is iterable.

    Raises:
        JaxinferError: ``given`` is not iterable.
    """
    if not isinstance(given, Iterable):
        raise JaxinferError(f"{name} is {shorten(given)}, must be one or a list of them")
    return given
