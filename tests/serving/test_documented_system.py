"""The class in docs/adding-a-system.md, as it stands there."""

import re
from pathlib import Path

import pytest
from serving_checks import Run, make_kv, make_requests, new_instance

from jaxinfer.systems.registry import make_system

DOC = Path(__file__).parents[2] / "docs" / "adding-a-system.md"


def test_the_class_in_the_docs_serves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (block,) = re.findall(r"```python\n(.*?)```", DOC.read_text(), re.DOTALL)
    (tmp_path / "system_of_the_docs.py").write_text(block)
    monkeypatch.syspath_prepend(tmp_path)
    instances = ["prefill", "decode"]
    system = make_system({"name": "system_of_the_docs:PrefillThenDecode"}, instances)
    pool = [new_instance(name, make_kv(9, 4)) for name in instances]
    outcome = Run(system, pool, make_requests([(6, 3)])).verify()
    assert outcome.route_of("r0") == [("prefill", 6), ("decode", 2)]
