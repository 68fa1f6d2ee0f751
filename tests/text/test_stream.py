"""Text that follows a prompt, against whole decoding of both; and single tokens' bytes."""

from functools import cache
from itertools import product

import pytest
import tokenizers
from hypothesis import example, given
from hypothesis import strategies as st
from properties import examples
from tokenizers import AddedToken, decoders, models

from jaxinfer.text.stream import Detokenizer, _num_incomplete

WORDS = ["▁", "a", "▁a", "▁b", "b", "é", "▁日", "##a", "\ufffd"]
SPECIAL = ["<unk>", "<s>", "</s>"]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
TOKENS = [*SPECIAL, *BYTES, *WORDS]
IDS = {token: index for index, token in enumerate(TOKENS)}
TO_TEXT = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
DECODERS = {
    "llama": decoders.Sequence([*TO_TEXT, decoders.Strip(" ", 1, 0)]),
    "gemma": decoders.Sequence(TO_TEXT),
    "metaspace": decoders.Metaspace(),
    "wordpiece": decoders.WordPiece(cleanup=False),
    "none": None,
}


@cache
def backend(kind: str) -> tokenizers.Tokenizer:
    found = tokenizers.Tokenizer(models.BPE(IDS, [], unk_token="<unk>", byte_fallback=True))
    if DECODERS[kind] is not None:
        found.decoder = DECODERS[kind]
    found.add_special_tokens(SPECIAL)
    return found


@cache
def byte_level() -> tokenizers.Tokenizer:
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    found = tokenizers.Tokenizer(models.BPE({char: i for i, char in enumerate(alphabet)}, []))
    found.decoder = decoders.ByteLevel()
    found.add_tokens([AddedToken("plain text"), AddedToken("日本")])
    found.add_special_tokens(["<end>"])
    return found


def ids(text: str) -> list[int]:
    """Tokens by name, with a space between; the bytes of what is no token."""
    found: list[int] = []
    for name in text.split():
        found += [IDS[name]] if name in IDS else [3 + byte for byte in name.encode()]
    return found


def check(found: tokenizers.Tokenizer, prompt: list[int], output: list[int]) -> None:
    """Check both together, less the prompt: as vLLM has it."""
    detokenizer = Detokenizer(found)
    wanted = found.decode(prompt + output)[len(found.decode(prompt)) :]
    assert detokenizer.decode(output, after=prompt) == wanted
    stream = detokenizer.open_stream(prompt)
    text = "".join(stream.add(token) for token in output)
    assert set(wanted[len(text) :]) <= {"\ufffd"}
    assert all(a in (b, "\ufffd") for a, b in zip(wanted, text, strict=False))


@pytest.mark.parametrize("kind", DECODERS)
@given(prompt=st.lists(st.sampled_from([*SPECIAL, *WORDS, "<0x41>"])), data=st.data())
@examples(60)
def test_what_follows_a_prompt(kind: str, prompt: list[str], data: st.DataObject) -> None:
    names = [*SPECIAL, *WORDS, "<0x41>", "<0xE6>", "<0x97>", "<0xA5>"]
    if kind in ("wordpiece", "none"):
        names.remove("\ufffd")  # With its space, it looks like part of a character.
    output = data.draw(st.lists(st.sampled_from(names)))
    check(backend(kind), [IDS[name] for name in prompt], [IDS[name] for name in output])


@given(st.lists(st.integers(0, 127) | st.integers(256, 258)), st.lists(st.integers(0, 258)))
@examples(100)
def test_what_follows_a_prompt_by_bytes(prompt: list[int], output: list[int]) -> None:
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    ascii_only = [t for t in prompt if t >= 256 or sorted(alphabet)[t] < "\x7f"]
    check(byte_level(), ascii_only, output)


@pytest.mark.parametrize(
    ("prompt", "text"),
    [
        ("", "a b"),
        ("<s>", "a b"),
        ("<s> ▁a", " a b"),
        ("<s> ▁a </s>", " a b"),
        ("▁a ▁", " a b"),
        ("<0x41>", " a b"),
        ("<0x41> <0x0A> <0x0A> <0x0A> <0x0A> <0x0A>", " a b"),
    ],
)
def test_the_first_space(prompt: str, text: str) -> None:
    """The space is cut only where the whole text begins."""
    detokenizer = Detokenizer(backend("llama"))
    assert detokenizer.decode(ids("▁a ▁b"), after=ids(prompt)) == text
    stream = detokenizer.open_stream(ids(prompt))
    assert "".join(map(stream.add, ids("▁a ▁b"))) == text


@pytest.mark.parametrize("cut", range(1, 8))
def test_a_character_that_begins_in_the_prompt(cut: int) -> None:
    """The output has all of it: the prompt shows nothing of it that could be taken off."""
    whole = "日😀"
    byte_tokens = [byte_level().token_to_id(char) for char in _stand_ins(whole.encode())]
    for found, tokens in ((byte_level(), byte_tokens), (backend("llama"), ids("▁a " + whole))):
        at = cut + (found is not byte_level())
        detokenizer = Detokenizer(found)
        wanted = whole if cut < 3 else whole[1:] if cut < 7 else ""
        assert detokenizer.decode(tokens[at:], after=tokens[:at]) == wanted
        stream = detokenizer.open_stream(tokens[:at])
        assert "".join(map(stream.add, tokens[at:])) == wanted


@given(st.lists(st.integers(0, 258)), st.lists(st.integers(0, 127)))
@example([169, 94], [])  # Half of a surrogate pair.
@examples(100)
def test_a_character_that_stays_incomplete(prompt: list[int], output: list[int]) -> None:
    """The character is the prompt's."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    first = [alphabet.index("a")]
    check(byte_level(), prompt, first + output)
    check(
        backend("llama"), [3 + t for t in prompt if t < 256], [IDS["a"], *(3 + t for t in output)]
    )
    for begun in ("<0xF0>", "<0xF0> <0x9F>", "▁日 <0xF0>", "日 <0xF0> <0x9F>"):
        check(backend("llama"), ids(begun), ids("<0x41> a"))


def test_which_bytes_begin_a_character() -> None:
    """The beginnings are those in Python's encodings, with the last byte in steps of 64."""
    points = (n for n in range(0x80, 0x110000, 64) if not 0xD800 <= n < 0xE000)
    begun = {chr(n).encode()[:size] for n in points for size in (1, 2, 3)}
    begun = {content for content in begun if not _is_whole(content)}
    lead, second, third = range(0xBE, 0x100), range(0x7E, 0xC2), (None, 0x41, 0x80, 0xBF, 0xE6)
    for a, b, c in product((0x41, *lead), (0x41, *second), third):
        content = bytes([a, b] if c is None else [a, b, c])
        wanted = next((n for n in (3, 2, 1) if content[-n:] in begun and n <= len(content)), 0)
        assert _num_incomplete(content) == wanted, content


def _is_whole(content: bytes) -> bool:
    try:
        return len(content.decode()) == 1
    except UnicodeDecodeError:
        return False


def _stand_ins(content: bytes) -> list[str]:
    """GPT-2's letters, by the library's own pre-tokeniser."""
    split = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return list(split.pre_tokenize_str(content.decode())[0][0])


@pytest.mark.parametrize(
    ("kind", "token", "text", "content"),
    [
        ("llama", "▁a", " a", b" a"),
        ("llama", "▁日", " 日", " 日".encode()),
        ("llama", "<0x41>", "A", b"A"),
        ("llama", "<0xE6>", "\ufffd", b"\xe6"),
        ("llama", "</s>", "</s>", b""),
        ("gemma", "▁a", " a", b" a"),
        ("metaspace", "▁a", " a", b" a"),
        ("metaspace", "<0x41>", "<0x41>", b"<0x41>"),
        ("wordpiece", "##a", "a", b"a"),
        ("wordpiece", "a", " a", b" a"),
        ("none", "a", " a", b" a"),
    ],
)
def test_a_token_amid_a_text(kind: str, token: str, text: str, content: bytes) -> None:
    assert Detokenizer(backend(kind)).token(IDS[token]) == (text, content)


def test_tokens_of_byte_level() -> None:
    detokenizer = Detokenizer(byte_level())
    for byte, stand_in in enumerate(_alphabet()):
        token = byte_level().token_to_id(stand_in)
        assert detokenizer.token(token)[1] == bytes([byte])
    assert detokenizer.token(256) == ("plain text", b"plain text")
    assert detokenizer.token(258) == ("<end>", b"")
    assert detokenizer.token(999) == ("", b"")


def _alphabet() -> list[str]:
    """Return the alphabet of GPT-2's encoder.py: printable bytes stay, others follow U+0100."""
    kept = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), 256)]
    following = iter(range(256, 512))
    return [chr(byte) if byte in kept else chr(next(following)) for byte in range(256)]
