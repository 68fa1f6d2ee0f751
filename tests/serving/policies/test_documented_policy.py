"""The policy in docs/adding-a-policy.md, as it stands there."""

import re
from pathlib import Path

import pytest
from policy_cases import Instant

DOC = Path(__file__).parents[3] / "docs" / "adding-a-policy.md"


def test_the_policy_of_the_docs_caps_prompt_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (source,) = re.findall(r"```python\n(.*?)```", DOC.read_text(), re.DOTALL)
    (tmp_path / "policy_of_the_docs.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    run = Instant(batching={"name": "policy_of_the_docs:CappedChunks", "tokens": 4})
    run.add((3, 3), (6, 2))
    assert [run.step() for _ in range(4)] == [
        {"r0": 3, "r1": 1},
        {"r0": 1, "r1": 4},
        {"r0": 1, "r1": 1},
        {"r1": 1},
    ]
