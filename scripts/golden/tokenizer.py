"""Write the ids of SentencePiece itself, for the tests of tokenizers from GGUF files.

    python -m scripts.golden.tokenizer

This needs the packages sentencepiece, protobuf and those of the demo model gemma3-270m. Gemma's
model is built from the pieces, scores and types of its GGUF file. Two tiny models are trained here,
and written in the same way as llama.cpp's converter does.
"""

# ruff: noqa: RUF001

import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from jaxinfer.checkpoints.checkpoint import demo_files
from jaxinfer.checkpoints.gguf_file import read_gguf

DATA = Path(__file__).parents[2] / "tests" / "data"
NORMAL, USER_DEFINED = 1, 4
# They lead to a byte token's name, which no text may become.
BYTE_LIKE = ["<", "0", "A", ">", "<0", "<0x", "<0x0", "<0x0A"]
CORPUS = [
    "the quick brown fox jumps over the lazy dog and the other dogs",
    "a tokenizer cuts a text into tokens, and then joins them to a text again",
    "der schnelle braune Fuchs springt über den faulen Hund",
    "print(x, y) if x == 12 else 345; return banana + ananas",
    "être ou ne pas être, voilà la question",
]
TEXTS = [
    "Hello, world!",
    " leading and trailing ",
    "  two   three    spaces     five",
    " " * 40 + "x",
    "line\nbreaks\n\n\nand\r\nmore\n",
    "\ttabs\t\tand\t \tspaces",
    "1234567890 3.14159 1,000,000 ٣٤٥ ⅷ ½",
    "don't DON'T we've O'Neill's",
    "der Fuchs über Straßenäpfel, être, ñandú, Ångström",
    "Привет, мир! Γειά σου Κόσμε",
    "你好，世界。日本語のテキスト。한국어 문장",
    "مرحبا بالعالم שלום עולם",
    "नमस्ते दुनिया สวัสดีชาวโลก",
    "🦙 👩‍👩‍👧‍👦 🏳️‍🌈 é vs e\u0301",
    "\U00013000\U0001f9ff\U000e0041 \u0378 \ufffd \ufeff \u00a0 \u200b \u2028",
    "def f(x):\n    if x > 0:\n        return {'a': [1, 2]}\n",
    '<div class="a"><p>text</p></div>',
    "<0x0A> is no byte, a▁b is no space",
    "banana ananas anananas bananananas",
    "aaaaaaa aaaaaaaaaaaaaaa ------- ========== !!!!!",
    "https://example.org/a?b=c&d=%20#e",
    "x",
    " ",
    "\n",
    "",
]


def model_of(metadata: Mapping[str, Any]) -> Any:
    """Return SentencePiece's model for a GGUF file's metadata."""
    import sentencepiece
    from sentencepiece import sentencepiece_model_pb2

    proto = sentencepiece_model_pb2.ModelProto()
    columns = (metadata[f"tokenizer.ggml.{key}"] for key in ("tokens", "scores", "token_type"))
    for index, (piece, score, kind) in enumerate(zip(*columns, strict=True)):
        # It requires the type of the unknown token, and its own spelling of spaces.
        kind = 2 if index == metadata["tokenizer.ggml.unknown_token_id"] else kind
        proto.pieces.add(piece=piece.replace(" ", "\u2581"), score=score, type=kind)
    proto.trainer_spec.model_type = proto.trainer_spec.BPE
    proto.trainer_spec.byte_fallback = True
    for role in ("unk", "bos", "eos", "pad"):
        key = {"unk": "unknown", "pad": "padding"}.get(role, role)
        setattr(
            proto.trainer_spec, f"{role}_id", metadata.get(f"tokenizer.ggml.{key}_token_id", -1)
        )
    proto.normalizer_spec.name = "identity"
    proto.normalizer_spec.remove_extra_whitespaces = False
    proto.normalizer_spec.add_dummy_prefix = metadata["tokenizer.ggml.add_space_prefix"]
    return sentencepiece.SentencePieceProcessor(model_proto=proto.SerializeToString())


def train(vocab_size: int, prefix: bool, **options: Any) -> dict[str, Any]:
    """Return the metadata of a GGUF file of a model trained on ``CORPUS``."""
    import sentencepiece
    from sentencepiece import sentencepiece_model_pb2

    written = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS),
        model_writer=written,
        vocab_size=vocab_size,
        model_type="bpe",
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        add_dummy_prefix=prefix,
        num_threads=1,
        minloglevel=2,
        **options,
    )
    proto = sentencepiece_model_pb2.ModelProto.FromString(written.getvalue())
    known = {piece.piece for piece in proto.pieces}
    for piece in (piece for piece in BYTE_LIKE if piece not in known):
        proto.pieces.add(piece=piece, score=-len(proto.pieces), type=NORMAL)
    user = [piece.type == USER_DEFINED for piece in proto.pieces]
    roles = {"unknown": proto.trainer_spec.unk_id, "bos": proto.trainer_spec.bos_id}
    metadata = {
        "tokens": [
            piece.piece.replace("\u2581", " ") if own else piece.piece
            for piece, own in zip(proto.pieces, user, strict=True)
        ],
        "scores": [
            -1000.0 if own else piece.score for piece, own in zip(proto.pieces, user, strict=True)
        ],
        "token_type": [piece.type for piece in proto.pieces],
        "add_space_prefix": prefix,
    } | {f"{role}_token_id": index for role, index in roles.items()}
    return {"model": "llama"} | metadata


def cases(metadata: Mapping[str, Any], controls: Sequence[str]) -> list[dict[str, Any]]:
    """Return texts and their ids, BOS first.

    Some have control tokens, which SentencePiece never reads.
    """
    model = model_of(metadata)
    tokens = metadata["tokenizer.ggml.tokens"]
    bos = metadata["tokenizer.ggml.bos_token_id"]
    chat = [controls[0], "user\nHi there ", controls[1], "\n", controls[0], controls[0], " x"]
    result = []
    for parts in [*([text] for text in TEXTS), chat]:
        ids = [bos]
        for part in parts:
            ids += [tokens.index(part)] if part in controls else model.encode(part)
        result.append({"text": "".join(parts), "ids": ids})
    return result


def write(name: str, content: Mapping[str, Any]) -> None:
    """Write a JSON file in which changes are whole lines."""
    lines = []
    for key, value in content.items():
        if isinstance(value, list):
            items = ",\n".join(json.dumps(item, ensure_ascii=False) for item in value)
            lines.append(f"{json.dumps(key)}: [\n{items}\n]")
        else:
            lines.append(f"{json.dumps(key)}: {json.dumps(value, ensure_ascii=False)}")
    (DATA / name).write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


@click.command()
def main() -> None:
    """Write all three files."""
    gemma = read_gguf(*demo_files("gemma3-270m")).metadata
    found = cases(gemma, ["<start_of_turn>", "<end_of_turn>"])
    write("gemma3_tokenizer_golden.json", {"cases": found})
    tiny = {
        "tiny_llama_tokenizer.json": train(420, prefix=True),
        "tiny_gemma_tokenizer.json": train(
            440,
            prefix=False,
            pad_id=0,
            eos_id=1,
            bos_id=2,
            unk_id=3,
            user_defined_symbols=["\n", "\n\n", "▁▁", "▁▁▁", "<p>", "</p>"],
        ),
    }
    for name, metadata in tiny.items():
        full = {f"tokenizer.ggml.{key}": value for key, value in metadata.items()}
        write(name, {"metadata": full, "cases": cases(full, ["<s>", "</s>"])})


if __name__ == "__main__":
    main()
