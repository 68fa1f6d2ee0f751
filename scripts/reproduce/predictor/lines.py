"""Prompts for a predictor of lengths, as lines of a batch."""

import gzip
import json
import random
from collections import Counter, defaultdict
from itertools import zip_longest
from pathlib import Path

from scripts.tables import Row

SEED = 0
# Largest numbers of characters of a prompt, of prompts of each kind of source, and of tokens of an
# answer.
MOST_CHARACTERS, OF_EACH, CAP = 300, 360, 128


def lines(prompts: Path, out: Path) -> list[Row]:
    """Return different prompts as lines of a batch, one of each kind of source in turn.

    The kind of a source is its first word. Any first part of the lines therefore has equally many
    of each kind.
    """
    opened = gzip.open if prompts.suffix == ".gz" else open
    with opened(prompts, "rt", encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    random.Random(SEED).shuffle(rows)
    by_kind: defaultdict[str, dict[str, None]] = defaultdict(dict)
    counts: Counter[str] = Counter()
    for row in rows:
        text = row["prompt"].strip()
        if len(text) <= MOST_CHARACTERS:
            by_kind[row["source"].split()[0]].setdefault(text)
    turns = zip_longest(*([*by_kind[kind]][:OF_EACH] for kind in sorted(by_kind)))
    with out.open("w", encoding="utf-8") as file:
        for turn in turns:
            for kind, text in zip(sorted(by_kind), turn, strict=True):
                if text is not None:
                    file.write(json.dumps(_line(kind, text)) + "\n")
                    counts[kind] += 1
    return [{"source": kind, "prompts": count} for kind, count in counts.items()]


def _line(kind: str, text: str) -> dict[str, object]:
    return {
        "messages": [{"role": "user", "content": text}],
        "max_completion_tokens": CAP,
        "temperature": 0,
        "metadata": {"source": kind},
    }
