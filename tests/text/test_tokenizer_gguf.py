"""Tokenizers from GGUF metadata, against the ids of SentencePiece and of transformers' classes."""

import dataclasses
import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import transformers
from hypothesis import given
from hypothesis import strategies as st
from properties import examples
from tokenizer_checks import (
    USER,
    check_stream,
    demo_checkpoint,
    error_of,
    pieces,
    tiny_vocabulary,
    with_metadata,
)

from jaxinfer.checkpoints.checkpoint import demo_files
from jaxinfer.checkpoints.gguf_file import read_gguf
from jaxinfer.errors import JaxinferError
from jaxinfer.request import SamplingParams
from jaxinfer.runtime.requests import RequestMaker
from jaxinfer.text.prompts import text_or_token_ids
from jaxinfer.text.tokenizer import Tokenizer, load_tokenizer

DATA = Path(__file__).parents[1] / "data"
KINDS = ("llama", "gemma")
TEXTS = [
    "DON'T pay 12345\n\n now",
    "e\u0301 is \u00e9, \u1100\u1161 is \uac00",
    "नमस्ते दुनिया, สวัสดี ชาวโลก",
    "  a  12 \t\r\n !!\n x",
    "a\u0301\u0302b !\u0301 1\u0301",
]


class TestByteLevel:
    def test_pre_tokenisers(self) -> None:
        digits = {}
        for pre in ("smollm", "gpt-2", "llama-bpe"):
            checkpoint = tiny_vocabulary(**{"ggml.pre": pre, "ggml.add_bos_token": False})
            digits[pre] = pieces(load_tokenizer(checkpoint), "1234 a")
        assert digits["smollm"] == ["1", "2", "3", "4", " a"]
        assert digits["gpt-2"] == ["123", "4", " a"]
        assert digits["llama-bpe"] == ["123", "4", " a"]

    def test_llama3_splits_digits_in_threes_and_contractions_of_any_case(self) -> None:
        tokenizer = load_tokenizer(tiny_vocabulary(**{"ggml.pre": "llama-bpe"}))
        split = tokenizer._backend.pre_tokenizer.pre_tokenize_str("DON'T pay 12345\n\n now")
        words = [word for word, _ in split]
        assert words == ["DON", "'T", "Ġpay", "Ġ", "123", "45", "ĊĊ", "Ġnow"]

    def test_bos_only_where_the_model_adds_it(self) -> None:
        with_bos = load_tokenizer(tiny_vocabulary(**{"ggml.add_bos_token": True}))
        without = load_tokenizer(tiny_vocabulary(**{"ggml.add_bos_token": False}))
        (bos_id,) = without.encode("<bos>")
        assert with_bos.encode("a") == [bos_id, *without.encode("a")]
        llama3 = load_tokenizer(
            tiny_vocabulary(**{"ggml.pre": "llama-bpe", "ggml.add_bos_token": None})
        )
        assert llama3.encode("a")[0] == bos_id
        assert with_bos.encode("") == [bos_id]
        assert without.encode("") == []
        # The template writes BOS itself.
        assert with_bos.encode_chat([USER]).count(bos_id) == 0

    def test_without_a_pre_tokeniser_it_is_the_default_with_a_warning(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        """Files from before April 2024 have none."""
        tokenizer = load_tokenizer(tiny_vocabulary(**{"ggml.pre": None}))
        (record,) = caplog.records
        assert "lacks tokenizer.ggml.pre" in record.getMessage()
        assert str(demo_checkpoint().path) in record.getMessage()
        default = load_tokenizer(tiny_vocabulary(**{"ggml.pre": "default"}))
        assert len(caplog.records) == 1
        for text in TEXTS:
            assert tokenizer.encode(text) == default.encode(text)

    def test_user_defined_tokens_are_kept_in_the_text(self) -> None:
        tokenizer = load_tokenizer(tiny_vocabulary())
        ids = tokenizer.encode("<tool><eos>")
        assert len(ids) == 2
        assert tokenizer.decode(ids) == "<tool>"

    @pytest.mark.parametrize(
        ("changes", "fragment"),
        [
            ({"ggml.model": "t5"}, "tokenizer.ggml.model is 't5', must be 'gpt2'"),
            ({"ggml.model": None}, "tokenizer.ggml.model is None"),
            ({"ggml.pre": "dbrx"}, "tokenizer.ggml.pre is 'dbrx', must be one of: smollm, gpt-2"),
            ({"ggml.tokens": None}, "lacks 'tokenizer.ggml.tokens'"),
            ({"ggml.merges": None}, "lacks 'tokenizer.ggml.merges'"),
            ({"ggml.merges": ["1 9"]}, "merge '1 9'"),
            ({"ggml.merges": ["12"]}, "merge '12'"),
            ({"ggml.add_eos_token": True}, "tokenizer.ggml.add_eos_token is true, must be false"),
            ({"ggml.bos_token_id": 100000}, "tokenizer.ggml.bos_token_id is 100000"),
            ({"ggml.bos_token_id": None, "ggml.add_bos_token": True}, "bos_token_id"),
        ],
    )
    def test_bad_metadata(self, changes: dict[str, Any], fragment: str) -> None:
        assert fragment in error_of(tiny_vocabulary(**changes))

    @pytest.mark.parametrize("text", TEXTS)
    def test_qwen_is_as_in_transformers(self, text: str) -> None:
        checkpoint = tiny_vocabulary(**{"ggml.pre": "qwen2", "ggml.add_bos_token": None})
        source = checkpoint.tokenizer_source
        assert not isinstance(source, Path)
        merges = [tuple(merge.split(" ")) for merge in source["tokenizer.ggml.merges"]]
        vocabulary = {token: i for i, token in enumerate(source["tokenizer.ggml.tokens"])}
        tokenizer = transformers.Qwen2Tokenizer(vocab=vocabulary, merges=merges)
        wanted = tokenizer.backend_tokenizer
        backend = load_tokenizer(checkpoint)._backend
        normal = wanted.normalizer.normalize_str(text)
        assert backend.normalizer.normalize_str(text) == normal
        assert backend.pre_tokenizer.pre_tokenize_str(
            normal
        ) == wanted.pre_tokenizer.pre_tokenize_str(normal)
        assert backend.encode(text).ids == wanted.encode(text).ids


@cache
def golden(kind: str) -> dict[str, Any]:
    """Written by scripts/golden/tokenizer.py."""
    content: dict[str, Any] = json.loads((DATA / f"tiny_{kind}_tokenizer.json").read_text())
    return content


def tiny_metadata(kind: str, **changes: Any) -> dict[str, Any]:
    """``with_metadata``'s changes to one of the two tiny vocabularies."""
    own = {key.removeprefix("tokenizer."): v for key, v in golden(kind)["metadata"].items()}
    other = ("add_bos_token", "eos_token_id", "merges", "padding_token_id", "pre")
    absent = dict.fromkeys(["chat_template", *(f"ggml.{key}" for key in other)])
    return absent | own | changes


@cache
def tiny(kind: str) -> Tokenizer:
    return load_tokenizer(with_metadata(**tiny_metadata(kind)))


def golden_cases() -> list[Any]:
    return [
        pytest.param(kind, case["text"], case["ids"], id=f"{kind}-{case['text']!r}")
        for kind in KINDS
        for case in golden(kind)["cases"]
    ]


class TestSentencePiece:
    @pytest.mark.parametrize(("kind", "text", "ids"), golden_cases())
    def test_ids_of_sentencepiece(self, kind: str, text: str, ids: list[int]) -> None:
        assert tiny(kind).encode(text) == ids

    @pytest.mark.parametrize("kind", KINDS)
    def test_texts_come_back(self, kind: str) -> None:
        for case in golden(kind)["cases"]:
            if "\u2581" not in case["text"] and "<s>" not in case["text"]:
                assert tiny(kind).decode(case["ids"]) == case["text"]

    @given(st.sampled_from(KINDS), st.lists(st.integers(0, 450) | st.integers(3, 270)))
    @examples(300)
    def test_stream_of_random_ids(self, kind: str, ids: list[int]) -> None:
        check_stream(tiny(kind), ids)

    @given(st.sampled_from(KINDS), st.text(max_size=40))
    @examples(200)
    def test_stream_of_random_text(self, kind: str, text: str) -> None:
        ids = tiny(kind).encode(text)
        check_stream(tiny(kind), ids)

    @pytest.mark.parametrize("kind", KINDS)
    def test_saved_folder_gives_the_same_ids(self, tmp_path: Path, kind: str) -> None:
        tiny(kind).save(tmp_path)
        saved = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
        for case in golden(kind)["cases"]:
            assert saved.encode(case["text"]) == case["ids"]

    def test_space_prefix_is_the_default(self) -> None:
        changed = tiny_metadata("llama", **{"ggml.add_space_prefix": None})
        tokenizer = load_tokenizer(with_metadata(**changed))
        for case in golden("llama")["cases"]:
            assert tokenizer.encode(case["text"]) == case["ids"]

    def test_unknown_token_is_known_by_its_type(self) -> None:
        changed = tiny_metadata("llama", **{"ggml.unknown_token_id": None})
        tokenizer = load_tokenizer(with_metadata(**changed))
        types = golden("llama")["metadata"]["tokenizer.ggml.token_type"]
        assert tokenizer.encode("<unk>")[1:] == [types.index(2)]

    def test_an_empty_prompt_is_bos(self) -> None:
        """SentencePiece and Hugging Face do so: no space is put before nothing."""
        bos = golden("llama")["metadata"]["tokenizer.ggml.bos_token_id"]
        prompt = text_or_token_ids("")
        assert isinstance(prompt, str)
        maker = RequestMaker(tiny("llama"), vocab_size=428, max_model_len=16, seed=0)
        (request,) = maker.make("r", tiny("llama").encode(prompt), SamplingParams())
        assert (request.prompt_token_ids, request.prompt_len) == ([bos], 1)

    def test_bos_can_be_switched_off(self) -> None:
        changed = tiny_metadata("llama", **{"ggml.add_bos_token": False})
        tokenizer = load_tokenizer(with_metadata(**changed))
        for case in golden("llama")["cases"]:
            assert tokenizer.encode(case["text"]) == case["ids"][1:]

    def test_stand_in_for_spaces_in_user_defined_tokens(self) -> None:
        """Files of older converters spell them so."""
        types = golden("gemma")["metadata"]["tokenizer.ggml.token_type"]
        tokens = [
            token.replace(" ", "\u2581") if kind == 4 else token
            for token, kind in zip(
                golden("gemma")["metadata"]["tokenizer.ggml.tokens"], types, strict=True
            )
        ]
        assert "\u2581\u2581\u2581" in tokens
        changed = tiny_metadata("gemma", **{"ggml.tokens": tokens})
        tokenizer = load_tokenizer(with_metadata(**changed))
        for case in golden("gemma")["cases"]:
            assert tokenizer.encode(case["text"]) == case["ids"]

    @pytest.mark.parametrize(
        ("changes", "fragment"),
        [
            ({"ggml.scores": None}, "lacks 'tokenizer.ggml.scores', a list of numbers"),
            ({"ggml.scores": [0.0, 1.0]}, "tokenizer.ggml.scores has 2 entries, must have 428"),
            ({"ggml.token_type": ["x"]}, "lacks 'tokenizer.ggml.token_type', a list of numbers"),
            ({"ggml.tokens": ["a"] * 428}, "tokenizer.ggml.tokens has 'a' 428 times"),
            ({"ggml.unknown_token_id": 428}, "unknown_token_id is 428, must be below 428"),
            ({"ggml.add_eos_token": True}, "tokenizer.ggml.add_eos_token is true"),
            ({"ggml.bos_token_id": None}, "lacks tokenizer.ggml.bos_token_id"),
        ],
    )
    def test_bad_metadata(self, changes: dict[str, Any], fragment: str) -> None:
        assert fragment in error_of(with_metadata(**tiny_metadata("llama", **changes)))


@pytest.fixture(scope="module")
def gemma() -> Tokenizer:
    """The real one; building it takes seconds."""
    try:
        metadata = read_gguf(*demo_files("gemma3-270m")).metadata
    except JaxinferError as error:
        pytest.skip(str(error))
    return load_tokenizer(dataclasses.replace(demo_checkpoint(), tokenizer_source=metadata))


class TestGemma:
    def test_ids_of_sentencepiece(self, gemma: Tokenizer) -> None:
        cases = json.loads((DATA / "gemma3_tokenizer_golden.json").read_text())["cases"]
        assert len(cases) > 20
        assert {case["text"]: gemma.encode(case["text"]) for case in cases} == {
            case["text"]: case["ids"] for case in cases
        }

    def test_streams(self, gemma: Tokenizer) -> None:
        for case in json.loads((DATA / "gemma3_tokenizer_golden.json").read_text())["cases"]:
            check_stream(gemma, case["ids"])

    @given(st.lists(st.integers(0, 262144) | st.integers(0, 520), max_size=40))
    @examples(200)
    def test_stream_of_random_ids(self, gemma: Tokenizer, ids: list[int]) -> None:
        check_stream(gemma, ids)

    @given(st.text(max_size=60))
    @examples(200)
    def test_round_trip(self, gemma: Tokenizer, text: str) -> None:
        assert gemma.decode(gemma.encode(text)) == text.replace("\u2581", " ")
