"""The tables of options in docs/ are those of the classes."""

import importlib.util
import re
from pathlib import Path
from types import ModuleType
from typing import Literal

import pytest
from pydantic import Field

from jaxinfer.options.validation import Options

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def tables() -> ModuleType:
    path = ROOT / "scripts" / "docs" / "option_tables.py"
    spec = importlib.util.spec_from_file_location("option_tables", path)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Example(Options):
    """Options.

    Attributes:
        size: Tokens, as eq. 3 has them. The second sentence is left out.
        kind: One of ``a`` | ``b``, or another
            word.
        low, from: Two of them.
    """

    size: int
    kind: Literal["a", "b"] | None = "b"
    low: float = 0.5
    from_: int = Field(default=3, alias="from")


def test_a_class_becomes_a_table(tables: ModuleType) -> None:
    assert list(tables.option_rows(Example)) == [
        ("`size`", "required", "Tokens, as eq. 3 has them"),
        ("`kind`", "`b`; `a`", "One of `a` \\| `b`, or another word"),
        ("`low`, `from`", "`0.5`, `3`", "Two of them"),
    ]


def test_an_option_without_a_word_is_refused(tables: ModuleType) -> None:
    class Silent(Example):
        """Options.

        Attributes:
            loud: There is an entry.
        """

        loud: int = 0
        silent: int = 0

    with pytest.raises(LookupError, match="silent"):
        list(tables.option_rows(Silent))


def test_the_pages_are_up_to_date(tables: ModuleType) -> None:
    """Otherwise: python -m scripts.docs.option_tables."""
    marks = 0
    for page in (ROOT / "docs").glob("*.md"):
        text = page.read_text()
        marks += len(tables.MARK.findall(text))
        assert tables.renewed(text) == text, page.name
        assert len(re.findall("^<!--", text, re.MULTILINE)) == len(tables.MARK.findall(text))
    assert marks >= 15
