"""What ``LLM.generate`` and ``LLM.chat`` are handed: prompts, conversations and how to sample."""

import os
from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral
from typing import Any, TypedDict

from jaxinfer.errors import JaxinferError
from jaxinfer.request import SamplingParams
from jaxinfer.workload.json_lines import shorten


class TokensPrompt(TypedDict):
    """A prompt that is tokenised already: integers of Python's or numpy's, or an array of them."""

    prompt_token_ids: Sequence[int]


Prompt = str | TokensPrompt
Messages = Sequence[Mapping[str, Any]]
Params = SamplingParams | Iterable[SamplingParams] | None


def model_name(model: object) -> str:
    """The model that an ``LLM`` is to have.

    Raises:
        JaxinferError: it is no text and no path.
    """
    if not isinstance(model, str | os.PathLike):
        raise JaxinferError(
            f"model is {shorten(model)}, must be a demo's name, a file, a folder or a hub id"
        )
    return os.fspath(model)


def listed_prompts(prompts: object) -> list[Any]:
    """One prompt or several, as a list.

    Raises:
        JaxinferError: it is no prompt and nothing that has some.
    """
    one = isinstance(prompts, str | bytes | Mapping)
    return [prompts] if one else _listed("prompts", prompts)


def listed_conversations(messages: object) -> list[Any]:
    """One conversation or several, as a list.

    Raises:
        JaxinferError: it is no conversation and nothing that has some.
    """
    if isinstance(messages, str | bytes | Mapping):
        return [messages]
    many = _listed("messages", messages)
    return [many] if many and isinstance(many[0], Mapping) else many


def paired(prompts: Sequence[Any], params: Params) -> list[tuple[Any, SamplingParams]]:
    """Each prompt with its sampling parameters.

    Raises:
        JaxinferError: some are no ``SamplingParams``, or there are more or fewer than prompts.
    """
    if params is None or isinstance(params, SamplingParams):
        params = [params or SamplingParams()] * len(prompts)
    many = [params] if isinstance(params, str | Mapping) else _listed("sampling_params", params)
    for given in many:
        if not isinstance(given, SamplingParams):
            raise JaxinferError(
                f"sampling_params is {shorten(given)}, must be SamplingParams(...), or one of "
                "them for each prompt"
            )
    if len(many) != len(prompts):
        raise JaxinferError(f"{len(prompts)} prompts, but {len(many)} sampling_params")
    return list(zip(prompts, many, strict=True))


def text_or_token_ids(prompt: object) -> str | list[int]:
    """What a prompt holds.

    Raises:
        JaxinferError: it is no prompt, or an empty text.
    """
    match prompt:
        case str():
            if not prompt:
                raise JaxinferError("the prompt is empty")
            return prompt
        case {"prompt_token_ids": given, **rest} if not rest:
            if (tokens := _token_ids(given)) is not None:
                return tokens
    raise JaxinferError(
        f"{str(prompt)[:60]!r} must be a text or {{'prompt_token_ids': [integers]}}"
    )


def _token_ids(given: object) -> list[int] | None:
    values = given.tolist() if hasattr(given, "tolist") else given
    if not isinstance(values, list | tuple):
        return None
    for kind in {type(value) for value in values}:
        if kind is bool or not issubclass(kind, Integral):
            return None
    return [int(value) for value in values]


def _listed(name: str, given: object) -> list[Any]:
    if not isinstance(given, Iterable):
        raise JaxinferError(f"{name} is {shorten(given)}, must be one or a list of them")
    return list(given)
