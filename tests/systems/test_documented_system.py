"""The classes in docs/adding-a-system.md, as they stand there."""

import re
from pathlib import Path

import pytest
from serving_checks import Outcome, Run, make_kv, make_requests, new_instance

from jaxinfer.systems.registry import make_system

DOC = Path(__file__).parents[2] / "docs" / "adding-a-system.md"
INSTANCES = ["prefill", "decode"]


def outcome_of(system: dict[str, object], *lengths: tuple[int, int]) -> Outcome:
    pool = [new_instance(name, make_kv(9, 4)) for name in INSTANCES]
    return Run(make_system(system, INSTANCES), pool, make_requests(lengths)).verify()


def test_the_classes_in_the_docs_serve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = re.findall(r"```python\n(.*?)```", DOC.read_text(), re.DOTALL)
    (tmp_path / "system_of_the_docs.py").write_text(first + second)
    monkeypatch.syspath_prepend(tmp_path)
    outcome = outcome_of({"name": "system_of_the_docs:PrefillThenDecode"}, (6, 3))
    assert outcome.route_of("r0") == [("prefill", 6), ("decode", 2)]
    outcome = outcome_of({"name": "system_of_the_docs:ShortHere", "until": 5}, (5, 2), (6, 2))
    assert [outcome.route_of(r)[0][0] for r in ("r0", "r1")] == ["decode", "prefill"]
