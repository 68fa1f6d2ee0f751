"""YAML files: merge keys, and what is refused in one line."""

from pathlib import Path

import pytest

from jaxinfer import JaxinferError
from jaxinfer.config.run_file import load_run_file
from jaxinfer.options.validation import parse_yaml, read_yaml

YAML = """
base: &base {page_size: 8, seed: 1}
more: &more {<<: *base, seed: 2}
far: {deep: {deeper: &deep {<<: *more, page_size: 4}}}
both: {<<: [*base, {x: 1}], seed: 3}
last: {<<: *deep}
"""


def test_merge_keys(tmp_path: Path) -> None:
    (tmp_path / "f.yaml").write_text(YAML)
    data = read_yaml(tmp_path / "f.yaml")
    assert data["more"] == {"page_size": 8, "seed": 2}
    assert data["both"] == {"page_size": 8, "x": 1, "seed": 3}
    assert data["last"] == data["far"]["deep"]["deeper"] == {"page_size": 4, "seed": 2}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\nb: {c: 1, c: 2}", "'c' stands 2 times in the mapping at line 2"),
        ("a: 1\n1: 2\n'1': 3", "'1' stands 2 times in the mapping at line 1"),
        ("a: &a {x: 1}\nb: {<<: *a, <<: *a}", "'<<' stands 2 times in the mapping at line 2"),
        ("a: {<<: 3}", "expected a mapping or list of mappings for merging"),
        ("[" * 999, "nested too deeply"),
        ("{a: " * 999, "nested too deeply"),
        (f"a: {'9' * 5000}", "not a YAML value: Exceeds the limit"),
        ("a: !!bool maybe", "not a YAML value"),
        ("a: !!timestamp x", "not a YAML value"),
        ("a: !own x", "could not determine a constructor for the tag '!own'"),
    ],
)
def test_yaml_that_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "f.yaml").write_text(text)
    with pytest.raises(JaxinferError) as caught:
        read_yaml(tmp_path / "f.yaml")
    (line,) = str(caught.value).splitlines()
    assert line.startswith(f"{tmp_path}/f.yaml: ")
    assert message in line
    with pytest.raises(JaxinferError) as caught:
        load_run_file(tmp_path / "f.yaml")
    assert str(caught.value) == f"run file {line}"


def test_yaml_that_is_not_there_or_not_text(tmp_path: Path) -> None:
    with pytest.raises(JaxinferError, match=r"none\.yaml: No such file"):
        read_yaml(tmp_path / "none.yaml")
    (tmp_path / "f.yaml").write_bytes(b"\xff")
    with pytest.raises(JaxinferError, match=r"f\.yaml: not UTF-8 text"):
        read_yaml(tmp_path / "f.yaml")
    assert parse_yaml("") is None
