"""Tokenizers and streaming decoding, against Hugging Face's ids and whole decoding."""

import dataclasses
import json
import subprocess
import sys
from datetime import datetime, timedelta
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from properties import examples
from tokenizer_checks import (
    USER,
    check_stream,
    demo,
    demo_checkpoint,
    error_of,
    pieces,
    tiny_vocabulary,
)
from transformers import PreTrainedTokenizerFast

from jaxinfer.errors import JaxinferError
from jaxinfer.text.tokenizer import Tokenizer, load_tokenizer

CASES = json.loads((Path(__file__).parents[1] / "data" / "smollm2_golden.json").read_text())[
    "cases"
]


@cache
def sentencepiece_style() -> Tokenizer:
    """A tokenizer like Llama 2's: U+2581 between words, <0x..> bytes, a leading space cut."""
    letters = ["▁", "a", "b", "▁a", "▁b", "ab", "\ufffd", "é"]
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *letters]
    merges = [("▁", "a"), ("▁", "b"), ("a", "b")]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    backend = tokenizers.Tokenizer(
        tokenizers.models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True)
    )
    backend.decoder = tokenizers.decoders.Sequence(
        [
            tokenizers.decoders.Replace("▁", " "),
            tokenizers.decoders.ByteFallback(),
            tokenizers.decoders.Fuse(),
            tokenizers.decoders.Strip(" ", 1, 0),
        ]
    )
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend), "sp", (2,))


@cache
def byte_level_with_plain_tokens() -> Tokenizer:
    """Byte-level with added tokens that are plain text, not GPT-2's byte alphabet."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(
        tokenizers.models.BPE({char: index for index, char in enumerate(alphabet)}, [])
    )
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_tokens(["<tool call>", "é x", "日本", "plain"])
    backend.add_special_tokens(["<end>"])
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend), "bytes", ())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's tokenizer as Hugging Face saves it."""
    path = tmp_path_factory.mktemp("tokenizer")
    demo()._wrapped.save_pretrained(path)
    return path


class TestGolden:
    @pytest.mark.parametrize("case", CASES, ids=lambda case: case["prompt"])
    def test_prompt_ids(self, case: dict[str, Any]) -> None:
        if case["kind"] == "chat":
            ids = demo().encode_chat([{"role": "user", "content": case["prompt"]}])
        else:
            ids = demo().encode(case["prompt"])
        assert ids == case["prompt_ids"]

    @pytest.mark.parametrize("case", CASES, ids=lambda case: case["prompt"])
    def test_output_text(self, case: dict[str, Any]) -> None:
        text = case["output_text"].removesuffix("<|im_end|>")
        assert demo().decode(case["output_ids"]) == text
        stream = demo().open_stream()
        assert "".join(stream.add(token_id) for token_id in case["output_ids"]) == text


class TestEncode:
    def test_special_tokens_in_text_are_parsed(self) -> None:
        assert demo().encode("<|im_start|>user<|im_end|>") == [1, 4093, 2]

    def test_digits_stand_alone(self) -> None:
        assert pieces(demo(), "12345") == ["1", "2", "3", "4", "5"]

    def test_sizes(self) -> None:
        assert demo().vocab_size == 49152
        assert demo().eos_token_ids == (2, 0, 4)

    @given(
        st.text(
            st.characters(min_codepoint=32, max_codepoint=0xFFFF, exclude_categories=["Cs", "Cc"])
        )
    )
    @examples(150)
    def test_round_trip(self, text: str) -> None:
        assert demo().decode(demo().encode(text)) == text


class TestChat:
    def test_system_message_replaces_the_default(self) -> None:
        ids = demo().encode_chat([{"role": "system", "content": "Be brief."}, USER])
        assert ids == demo().encode(
            "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
            "<|im_start|>assistant\n"
        )

    def test_what_begins_a_text_is_the_template_s_to_write(self) -> None:
        backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<s>": 0, "Hi": 1}, "<s>"))
        backend.post_processor = tokenizers.processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", 0)]
        )
        wrapped = PreTrainedTokenizerFast(
            tokenizer_object=backend, chat_template="{{ messages[0].content }}"
        )
        tokenizer = Tokenizer(wrapped, "with BOS", ())
        assert tokenizer.encode("Hi") == [0, 1]
        assert tokenizer.encode_chat([USER]) == [1]

    def test_a_template_s_date_is_that_of_loading(self) -> None:
        """Equal conversations have equal tokens, whatever the day; a caller may set another."""
        template = "{% macro day() %}{{ strftime_now('%d %b %Y') }}{% endmacro %}{{ day() }}"
        tokenizer = load_tokenizer(tiny_vocabulary(chat_template=template))
        assert abs(datetime.now() - tokenizer.now) < timedelta(minutes=5)
        tokenizer.now = datetime(2024, 7, 26, 23, 59)
        assert tokenizer._render([USER]) == "26 Jul 2024"

    @pytest.mark.parametrize(
        "template",
        [
            "{{ bos_token }}{% for m in messages %}{{ m.role | upper }}: "
            "{{ m['content'] | tojson }}{% endfor %}{% if tools %}T{% endif %}"
            "{% if add_generation_prompt %}>{% endif %}",
            "{% for m in messages %}\n  {% if loop.first %}{% continue %}{% endif %}{{ m.content }}"
            "\n{% endfor %}{{ documents is none }}{{ eos_token is defined }}",
        ],
    )
    def test_as_transformers_renders(self, template: str) -> None:
        tokenizer = load_tokenizer(tiny_vocabulary(chat_template=template))
        messages = [{"role": "system", "content": "<&\u00e9"}, USER]
        wanted = tokenizer._wrapped.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )
        assert tokenizer._render(messages) == wanted

    def test_model_without_template(self) -> None:
        tokenizer = load_tokenizer(tiny_vocabulary(chat_template=None))
        with pytest.raises(JaxinferError, match="has no chat template"):
            tokenizer.encode_chat([USER])

    def test_template_that_raises(self) -> None:
        template = "{{ raise_exception('roles must\nalternate') }}"
        tokenizer = load_tokenizer(tiny_vocabulary(chat_template=template))
        with pytest.raises(JaxinferError, match="refuses the messages: roles must alternate"):
            tokenizer.encode_chat([USER])

    @pytest.mark.parametrize(
        ("messages", "fragment"),
        [
            ([{"role": "user"}], "'content'"),
            ([{"role": "user", "content": "a\ud800b"}], "holds '\\ud800', which is half of a surr"),
            ([{"role": "user", "content": 3}], "refuses the messages"),
        ],
    )
    def test_bad_messages(self, messages: list[Any], fragment: str) -> None:
        with pytest.raises(JaxinferError) as caught:
            demo().encode_chat(messages)
        assert fragment in str(caught.value)
        assert "\n" not in str(caught.value)


class TestStream:
    @given(st.lists(st.integers(0, 49151), max_size=60))
    @examples(200)
    def test_random_ids(self, ids: list[int]) -> None:
        check_stream(demo(), ids)

    @given(st.text(max_size=40))
    @examples(200)
    def test_random_text(self, text: str) -> None:
        ids = demo().encode(text)
        check_stream(demo(), ids)

    @given(st.lists(st.integers(0, 265), max_size=40))
    @examples(300)
    def test_random_bytes_and_plain_tokens(self, ids: list[int]) -> None:
        tokenizer = byte_level_with_plain_tokens()
        check_stream(tokenizer, ids)

    @given(st.lists(st.integers(0, 270) | st.integers(255, 267), max_size=40))
    @examples(300)
    def test_random_sentencepiece_ids(self, ids: list[int]) -> None:
        tokenizer = sentencepiece_style()
        check_stream(tokenizer, ids)

    def test_a_character_of_several_tokens_comes_whole(self) -> None:
        ids = demo().encode("🦙")
        assert len(ids) > 1
        stream = demo().open_stream()
        assert [stream.add(token_id) for token_id in ids] == [""] * (len(ids) - 1) + ["🦙"]

    def test_invalid_bytes_are_not_held_back(self) -> None:
        (stray,) = [
            token_id
            for token_id in range(256)
            if byte_level_with_plain_tokens()._backend.id_to_token(token_id) == "ÿ"
        ]
        stream = byte_level_with_plain_tokens().open_stream()
        assert [stream.add(stray) for _ in range(3)] == ["\ufffd"] * 3

    @pytest.mark.parametrize("text", ["\n", "é€", "a\n\nb"])
    def test_bytes_come_with_the_token_that_completes_them(self, text: str) -> None:
        tokenizer, stream = sentencepiece_style(), sentencepiece_style().open_stream()
        by_bytes = [3 + byte for byte in text.encode()]
        pieces = [stream.add(token_id) for token_id in by_bytes]
        assert "".join(pieces) == tokenizer.decode(by_bytes) == text
        assert [piece for piece in pieces if piece] == list(text)

    def test_unknown_and_special_ids_are_skipped(self) -> None:
        stream = demo().open_stream()
        text = "".join(stream.add(token_id) for token_id in [504, 2, 60000, 1, 3575])
        assert text == demo().decode([504, 3575])


class TestFolder:
    def load(self, folder: Path) -> Tokenizer:
        source = dataclasses.replace(demo_checkpoint(), path=folder, tokenizer_source=folder)
        return load_tokenizer(source)

    def test_same_ids_as_from_gguf(self, folder: Path) -> None:
        tokenizer = self.load(folder)
        for case in CASES:
            assert tokenizer.encode(case["prompt"]) == demo().encode(case["prompt"])
        assert tokenizer.encode_chat([USER]) == demo().encode_chat([USER])

    @pytest.mark.parametrize(
        ("end", "ends"),
        [
            ("<|im_start|>", (2, 0, 4, 1)),  # Of the tokenizer alone.
            ("<|im_end|>", (2, 0, 4)),
            ({"__type": "AddedToken", "content": "<|im_start|>"}, (2, 0, 4, 1)),
            ("<none of the vocabulary>", (2, 0, 4)),  # It gets an id that no model can draw.
            (None, (2, 0, 4)),
        ],
    )
    def test_its_end_is_one_besides_the_configuration_s(
        self, folder: Path, tmp_path: Path, end: Any, ends: tuple[int, ...]
    ) -> None:
        config = json.loads((folder / "tokenizer_config.json").read_text()) | {"eos_token": end}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
        (tmp_path / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
        assert self.load(tmp_path).eos_token_ids == ends

    def test_template_in_tokenizer_config(self, folder: Path, tmp_path: Path) -> None:
        config = json.loads((folder / "tokenizer_config.json").read_text())
        config["chat_template"] = "{{ messages[0]['content'] }}!"
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
        (tmp_path / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
        assert self.load(tmp_path).encode_chat([USER]) == demo().encode("Hi!")

    def test_class_named_in_the_config_does_not_change_the_splitting(
        self, folder: Path, tmp_path: Path
    ) -> None:
        config = json.loads((folder / "tokenizer_config.json").read_text())
        config["tokenizer_class"] = "GPT2Tokenizer"
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
        (tmp_path / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
        assert pieces(self.load(tmp_path), "1969") == ["1", "9", "6", "9"]

    def test_truncation_in_the_file_is_ignored(self, folder: Path, tmp_path: Path) -> None:
        backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        backend.enable_truncation(4)
        backend.save(str(tmp_path / "tokenizer.json"))
        assert len(self.load(tmp_path).encode("1 2 3 4 5 6 7")) == 13

    def test_missing(self, tmp_path: Path) -> None:
        source = dataclasses.replace(demo_checkpoint(), path=tmp_path, tokenizer_source=tmp_path)
        assert "has no tokenizer.json" in error_of(source)

    @pytest.mark.parametrize("content", ["{", "{}", "[]", '{"model": 1}', '{"added_tokens": []}'])
    def test_damaged(self, tmp_path: Path, content: str) -> None:
        (tmp_path / "tokenizer.json").write_text(content)
        source = dataclasses.replace(demo_checkpoint(), path=tmp_path, tokenizer_source=tmp_path)
        assert "tokenizer.json: cannot read the tokenizer" in error_of(source)


def test_quiet_and_without_jax() -> None:
    """Loading prints nothing, and neither transformers nor JAX comes with the import."""
    script = (
        "import sys; from jaxinfer.text.tokenizer import load_tokenizer;"
        "from jaxinfer.checkpoints.checkpoint import open_checkpoint;"
        "assert not {'jax', 'transformers'} & set(sys.modules);"
        "load_tokenizer(open_checkpoint('smollm2-135m-instruct'));"
        "assert 'jax' not in sys.modules"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=root, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
