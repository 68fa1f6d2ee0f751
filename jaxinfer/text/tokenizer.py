"""A checkpoint's tokenizer, chat template and streaming decoder."""

import logging
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from tokenizers import Tokenizer as Backend

from jaxinfer.checkpoints.open_tensors import Checkpoint
from jaxinfer.errors import JaxinferError, one_line
from jaxinfer.text.stream import Detokenizer, Stream
from jaxinfer.text.tokenizer_gguf import read_gguf_tokenizer


class Tokenizer:
    """A model's tokenizer.

    Attributes:
        name: the model, for error messages.
        eos_token_ids: tokens that end a text.
        vocab_size: number of tokens that the tokenizer knows; the model's vocabulary may be padded.
        now: time for chat templates that include a date. It is the time of loading, so that equal
            conversations have equal tokens.
    """

    def __init__(self, wrapped: Any, name: str, eos_token_ids: tuple[int, ...]) -> None:
        """Take a ``transformers.PreTrainedTokenizerFast``."""
        self.name = name
        self.eos_token_ids = eos_token_ids
        self.vocab_size = len(wrapped)
        self.now = datetime.now()
        self._wrapped = wrapped
        # Called directly, because the wrapper takes three times as long.
        self._backend: Backend = wrapped.backend_tokenizer
        self._backend.no_truncation()
        self._backend.no_padding()
        self._detokenizer = Detokenizer(self._backend)

    def encode(self, text: str) -> list[int]:
        """Return the token ids of ``text``, with BOS if the model's tokenizer adds one.

        Special tokens written in the text become those tokens.

        Raises:
            JaxinferError: the text contains half of a surrogate pair.
        """
        return self._ids(text, add_special_tokens=True)

    def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Return the token ids of a chat up to where the assistant begins to answer.

        Args:
            messages: at least one ``{"role": ..., "content": ...}``.

        Raises:
            JaxinferError: the model has no chat template, or its template refuses the messages.
        """
        if not self._wrapped.chat_template:
            raise JaxinferError(f"model {self.name!r} has no chat template; use a plain prompt")
        try:
            text = self._render(messages)
        # A value of a wrong type raises TypeError in the template. Several templates without a
        # default raise ValueError.
        except (TemplateError, TypeError, ValueError) as error:
            raise JaxinferError(
                f"the chat template of {self.name!r} refuses the messages: {one_line(error)}"
            ) from None
        return self._ids(text, add_special_tokens=False)

    def _render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """Render as transformers' ``apply_chat_template`` does, but with our own clock."""
        from transformers.utils.chat_template_utils import _compile_jinja_template

        template = _compile_jinja_template(self._wrapped.get_chat_template())
        text: str = template.render(
            messages=list(messages),
            tools=None,
            documents=None,
            add_generation_prompt=True,
            strftime_now=self.now.strftime,
            **self._wrapped.special_tokens_map,
        )
        return text

    def _ids(self, text: str, add_special_tokens: bool) -> list[int]:
        try:
            return self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        except TypeError:
            half = re.search("[\ud800-\udfff]", text)
            if not half:
                raise
            raise JaxinferError(
                f"the text holds {half[0]!r}, which is half of a surrogate pair"
            ) from None

    def decode(self, token_ids: Sequence[int], after: Sequence[int] = ()) -> str:
        """Return the text of ``token_ids``, which follow ``after``; see ``Detokenizer``."""
        return self._detokenizer.decode(token_ids, after)

    def token(self, token_id: int) -> tuple[str, bytes]:
        """Return a token's text, and the bytes that it adds to a text; see ``Detokenizer``."""
        return self._detokenizer.token(token_id)

    def save(self, folder: Path) -> None:
        """Write the tokenizer's files for Hugging Face's tools."""
        self._wrapped.save_pretrained(folder)

    def open_stream(self, after: Sequence[int] = ()) -> Stream:
        """Return a new incremental decoder for the tokens that follow ``after``."""
        return self._detokenizer.open_stream(after)


class NoTokenizer(Tokenizer):
    """Tokenizer of a model without one: prompts are token ids, and outputs have no text."""

    def __init__(self, name: str, eos_token_ids: tuple[int, ...]) -> None:
        self.name, self.eos_token_ids, self.vocab_size = name, eos_token_ids, 0

    def encode(self, text: str) -> list[int]:
        """Raise JaxinferError: the model has no tokenizer."""
        raise JaxinferError(
            f"model {self.name!r} has no tokenizer for a text: give prompt_token_ids"
        )

    def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Raise JaxinferError: the model has no tokenizer."""
        return self.encode("")

    def decode(self, token_ids: Sequence[int], after: Sequence[int] = ()) -> str:
        """Return the empty text."""
        return ""

    def token(self, token_id: int) -> tuple[str, bytes]:
        """Return the empty text."""
        return "", b""

    def open_stream(self, after: Sequence[int] = ()) -> Stream:
        """Raise JaxinferError: the model has no tokenizer."""
        raise JaxinferError(
            f"model {self.name!r} has no tokenizer for stop strings: give stop_token_ids"
        )


def load_tokenizer(
    checkpoint: Checkpoint, required: bool = True, more_ends: Sequence[int] = ()
) -> Tokenizer:
    """Return the tokenizer of ``checkpoint``, with its chat template if it has one.

    A text ends at the tokens that the configurations name, and at the tokenizer's own EOS.

    Args:
        required: whether a folder without a tokenizer is an error.
        more_ends: further tokens that end a text.

    Raises:
        JaxinferError: the tokenizer is missing, damaged, or of a kind that is not supported.
    """
    source, ends = checkpoint.tokenizer_source, (*checkpoint.config.eos_token_ids, *more_ends)
    if not required and isinstance(source, Path) and not _tokenizer_file(source).exists():
        return NoTokenizer(checkpoint.name, ends)
    wrapped = (
        _from_folder(source) if isinstance(source, Path) else _from_gguf(source, checkpoint.path)
    )
    own = wrapped.eos_token_id
    if own is not None and own < checkpoint.config.vocab_size:  # Otherwise, no model can sample it.
        ends = (*ends, own)
    return Tokenizer(wrapped, checkpoint.name, tuple(dict.fromkeys(ends)))


def folder_tokenizer(path: str) -> Tokenizer | None:
    """Return a folder's tokenizer, or None if it has none; the folder need not contain a model.

    Raises:
        JaxinferError: the tokenizer is damaged, or of a kind that is not supported.
    """
    folder = Path(path).expanduser()
    found = _tokenizer_file(folder).is_file()
    return Tokenizer(_from_folder(folder), path, ()) if found else None


def _tokenizer_file(folder: Path) -> Path:
    return folder / "tokenizer.json"


def _from_folder(folder: Path) -> Any:
    path = _tokenizer_file(folder)
    if not path.is_file():
        raise JaxinferError(f"{folder}: has no tokenizer.json, from which the tokenizer is read")
    fast_tokenizer = _fast_tokenizer_class()
    try:
        # Not AutoTokenizer: some of its classes rebuild the tokenizer from the vocabulary, and lose
        # the pre-tokenisation of tokenizer.json.
        return fast_tokenizer.from_pretrained(folder, local_files_only=True)
    # The tokenizers library raises plain Exception for anything that it cannot read.
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise JaxinferError(f"{path}: cannot read the tokenizer: {reason}") from error


def _from_gguf(metadata: Mapping[str, Any], path: Path) -> Any:
    backend, options = read_gguf_tokenizer(metadata, path)
    return _fast_tokenizer_class()(tokenizer_object=backend, **options)


def _fast_tokenizer_class() -> Any:
    """Return ``transformers.PreTrainedTokenizerFast``, without the advice to install PyTorch."""
    logger = logging.getLogger("transformers")

    def is_no_advice(record: logging.LogRecord) -> bool:
        return "PyTorch was not found" not in record.getMessage()

    logger.addFilter(is_no_advice)
    try:
        from transformers import PreTrainedTokenizerFast  # It is slow to import: 0.7 s.
    finally:
        logger.removeFilter(is_no_advice)
    return PreTrainedTokenizerFast
