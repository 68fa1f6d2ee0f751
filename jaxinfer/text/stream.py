"""Decodes tokens one by one: the text that each adds, after the tokens of a prompt."""

import codecs
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

from tokenizers import Tokenizer as Backend
from tokenizers import decoders

_REPLACEMENT = "\ufffd"
# A character has at most four bytes, each of which may be a token.
_CONTEXT = 4
_BYTE_TOKEN = re.compile("<0x[0-9A-Fa-f]{2}>")


class Stream(Protocol):
    """Decodes one sequence token by token.

    All pieces together equal ``Tokenizer.decode``, except for an incomplete character at the end.
    Bytes in tokens of their own (``<0x0A>``) are emitted as soon as they form characters. If an
    invalid one follows, ``decode`` replaces all of them by U+FFFD, in a text of equal length.
    """

    def add(self, token_id: int) -> str:
        """Return the text that ``token_id`` completes; empty while a character lacks bytes."""

    @property
    def is_within(self) -> bool:
        """True if the last token ended within a character, even if all text was emitted."""


def _byte_alphabet() -> dict[str, int]:
    """Return GPT-2's printable stand-in of each byte: itself, or one from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(0x100 + index): byte for index, byte in enumerate(others)
    }


_BYTES = _byte_alphabet()


def _stored_bytes(token: str) -> bytes:
    """Return the bytes that a token of byte-level BPE stands for."""
    try:
        return bytes([_BYTES[char] for char in token])
    except KeyError:  # An added token holds plain text.
        return token.encode()


def _byte_of(token: str) -> bytes | None:
    """Return the byte of a token such as ``<0x0A>``; None for any other."""
    return bytes([int(token[3:5], 16)]) if _BYTE_TOKEN.fullmatch(token) else None


def _num_incomplete(content: bytes) -> int:
    """Return the number of bytes at the end that begin an incomplete character."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    decoder.decode(content)
    kept = decoder.getstate()[0]
    # Half of a surrogate pair would wait for a third byte, which would not make it valid.
    return 0 if kept[:1] == b"\xed" and kept[1:] >= b"\xa0" else len(kept)


class _ByteStream:
    """A stream of byte-level BPE, whose text is the tokens' bytes as UTF-8.

    Unlike a window, it holds at most three bytes, however many invalid ones the model emits.
    """

    def __init__(self, token_of: Callable[[int], str | None], before: "_Context") -> None:
        self._token_of = token_of
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._unshown = ""
        for token_id in before.ids:
            self.add(token_id)
        self._unshown = before.unshown

    def add(self, token_id: int) -> str:
        token = self._token_of(token_id)
        piece = "" if token is None else self._decoder.decode(_stored_bytes(token))
        if piece and self._unshown:
            piece, self._unshown = piece.removeprefix(self._unshown), ""
        return piece

    @property
    def is_within(self) -> bool:
        return bool(self._decoder.getstate()[0])


class _WindowStream:
    """A stream of any other decoder: decodes the last tokens with and without the new ones.

    ``ids[:read]`` has been emitted; it stays as context, since decoders treat the first token
    differently (they strip its leading space).
    """

    is_within = False  # Text within a character is held back with the whole token.

    def __init__(
        self, backend: Backend, token_of: Callable[[int], str | None], before: "_Context"
    ) -> None:
        self._backend = backend
        self._token_of = token_of
        self._ids = list(before.ids)
        self._read = 0
        self._context = before.text
        self._unshown = before.unshown

    def add(self, token_id: int) -> str:
        token = self._token_of(token_id)
        if token is None:
            return ""
        self._ids.append(token_id)
        text = self._backend.decode(self._ids)
        if text.endswith(_REPLACEMENT) or len(text) <= len(self._context):
            return ""
        piece = text[len(self._context) :].removeprefix(self._unshown)
        self._unshown = ""
        if _byte_of(token):
            # It stays whole, because an invalid byte would make all bytes of the run invalid.
            self._context = text
            return piece
        self._ids = self._ids[self._read :]
        self._read = len(self._ids)
        self._context = self._backend.decode(self._ids)
        return piece


@dataclass(frozen=True)
class _Context:
    """The last tokens before a text that affect how it begins.

    Attributes:
        text: their text, without an incomplete character at the end.
        unshown: replacement of that character if it stays incomplete.
    """

    ids: tuple[int, ...] = ()
    text: str = ""
    unshown: str = ""


class Detokenizer:
    """Turns tokens into text as ``tokenizers`` decodes them, but skips special and unknown tokens.

    If tokens follow others, their text is that of both together, without the text of the others.
    Some decoders strip the space at the beginning of a text, and a character may begin in one part
    and end in the other.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        added = backend.get_added_tokens_decoder()
        self._special_ids = frozenset(id for id, token in added.items() if token.special)
        self._byte_level = isinstance(backend.decoder, decoders.ByteLevel)
        # The cache is limited by the vocabulary.
        self._found: dict[int, tuple[str, bytes]] = {}

    def decode(self, token_ids: Sequence[int], after: Sequence[int] = ()) -> str:
        """Return the text of ``token_ids``, which follow the tokens ``after``."""
        before = self._context(after)
        text = self._backend.decode([*before.ids, *token_ids], skip_special_tokens=True)
        return text[len(before.text) :].removeprefix(before.unshown)

    def open_stream(self, after: Sequence[int] = ()) -> Stream:
        """Return a new incremental decoder for the tokens that follow ``after``."""
        before = self._context(after)
        if self._byte_level:
            return _ByteStream(self._token_of, before)
        return _WindowStream(self._backend, self._token_of, before)

    def token(self, token_id: int) -> tuple[str, bytes]:
        """Return a token's text, and the bytes that it adds to a text.

        The text of a special token is its name, and it adds nothing; an unknown one has neither. A
        part of a character is shown as U+FFFD.
        """
        if token_id not in self._found:
            content = self._content(token_id)
            name = self._backend.id_to_token(token_id) or ""
            self._found[token_id] = content.decode(errors="replace") or name, content
        return self._found[token_id]

    def _content(self, token_id: int) -> bytes:
        token = self._token_of(token_id)
        if token is None:
            return b""
        if self._byte_level:
            return _stored_bytes(token)
        if self._has_bytes and (byte := _byte_of(token)):
            return byte
        return self.decode([token_id], after=self._anything).encode()

    @cached_property
    def _has_bytes(self) -> bool:
        """True if tokens such as ``<0x41>`` stand for bytes."""
        letter = self._backend.token_to_id("<0x41>")
        return letter is not None and self._backend.decode([letter]) == "A"

    @cached_property
    def _anything(self) -> tuple[int, ...]:
        """Return a token of plain text, after which others decode as in the middle of a text."""
        for token_id in range(self._backend.get_vocab_size()):
            token = self._token_of(token_id)
            if token is not None and not _byte_of(token):
                text = self._backend.decode([token_id])
                if text and _REPLACEMENT not in text:
                    return (token_id,)
        return ()

    def _token_of(self, token_id: int) -> str | None:
        """Return the token in the vocabulary; None if it never appears in a text."""
        return None if token_id in self._special_ids else self._backend.id_to_token(token_id)

    def _context(self, after: Sequence[int]) -> _Context:
        ids: list[int] = []
        tokens: list[str] = []
        for token_id in reversed(after):
            if (token := self._token_of(token_id)) is not None:
                ids.insert(0, token_id)
                tokens.insert(0, token)
                # Successive bytes become characters together or not at all.
                if len(ids) >= _CONTEXT and (self._byte_level or not _byte_of(token)):
                    break
        text = self._backend.decode(ids)
        if self._byte_level:
            within = _num_incomplete(b"".join(map(_stored_bytes, tokens)))
            return _Context(tuple(ids), text[:-1], text[-1:]) if within else _Context()
        run = b""
        for token in reversed(tokens if self._has_bytes else ()):
            if not (byte := _byte_of(token)):
                break
            run = byte + run
        within = _num_incomplete(run)
        shown = self._backend.decode(ids[:-within]) if within else text
        return _Context(tuple(ids), shown, text[len(shown) :])
