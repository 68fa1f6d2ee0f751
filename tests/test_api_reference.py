"""The script of the API reference names each module and package once."""

import importlib.util
import runpy
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_all_parts_of_the_package_are_in_the_reference() -> None:
    specs = runpy.run_path(str(ROOT / "scripts" / "docs" / "api.py"))["specs"]()
    parts = {
        path.stem
        for path in (ROOT / "jaxinfer").iterdir()
        if path.suffix == ".py" or (path / "__init__.py").is_file()
    }
    expected = {f"jaxinfer.{part}" for part in parts - {"__init__", "__main__", "ray"}}
    assert sorted(specs) == sorted({"jaxinfer", *expected})
    assert all(importlib.util.find_spec(name) for name in specs)
