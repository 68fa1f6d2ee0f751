"""The floors of the package: no import runs upward or round in a circle, no folder is crowded."""

import ast
import functools
import re
from collections.abc import Iterator, Mapping, Set
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# From the ground up; docs/architecture.md shows the same. A package or a file at the top imports
# what lies on lower floors alone, at its head or inside of functions.
FLOORS = (
    ("errors",),
    ("files",),
    ("options",),
    ("request", "hardware", "pallas_kernels"),
    ("serving", "models"),
    (
        *("systems", "caches", "ledger", "steps", "workload", "checkpoints", "sharding"),
        "simulate.published",
    ),
    ("text",),
    ("config",),
    ("report", "simulate.costs", "runtime.stage"),
    ("simulate", "runtime.kv"),
    ("runtime.spread",),
    ("runtime.processes", "runtime.ffn"),
    ("runtime",),
    ("runtime.profiling",),
    ("llm", "convert"),
    ("ray", "lab.conformance", "lab.sharding"),
    ("lab.hand_offs", "lab.operators", "lab.predict"),
    ("lab",),
    ("lab.validate", "lab.plan"),
    ("lab.plan.planners",),
    ("lab.plan.replan", "lab.plan.sweep", "papers"),
    ("commands",),
)
FLOOR = {room: number for number, floor in enumerate(FLOORS) for room in floor}
WINGS = ("lab", "papers", "commands")  # All other rooms are the core.
LINKED = ("models", "pallas_kernels")  # Folders at the top of the repository.
MOST_FILES = 24


def module_of(path: Path) -> str:
    """The name of a module, without ``jaxinfer.`` and ``__init__``."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    parts = parts if parts[0] in LINKED else parts[1:]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def files() -> Iterator[Path]:
    for top in ("jaxinfer", *LINKED):  # Links are not followed.
        for path in (ROOT / top).rglob("*.py"):
            folders = path.relative_to(ROOT).parts
            if top != "jaxinfer" or folders[1] not in ("configs", *LINKED):
                yield path


MODULES = {module_of(path): path for path in files()}
PACKAGES = {module for module, path in MODULES.items() if path.name == "__init__.py"}


def imports(tree: ast.AST, modules: Set[str]) -> Iterator[str]:
    """Modules of ours that are imported, wherever it is said; the version at the top is none."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            top, _, inner = name.partition(".")
            if top == "jaxinfer":
                found = inner if inner in modules else inner.rpartition(".")[0]
                if found:
                    yield found


@functools.cache
def all_imports() -> dict[str, set[str]]:
    """Find the imports of each module but the package's top and its command."""
    return {
        module: set(imports(ast.parse(path.read_text(encoding="utf-8")), MODULES.keys()))
        for module, path in MODULES.items()
        if module not in ("", "__main__")
    }


def room_of(module: str) -> str:
    """The longest name of FLOORS that a module lies below; a package's own is its last but one."""
    parts = module.split(".")
    names = (".".join(parts[:count]) for count in range(len(parts), 0, -1))
    return next(name for name in names if name in FLOOR)


def upward(found: Mapping[str, Set[str]]) -> list[str]:
    """Imports from a room into another that does not lie lower."""
    return [
        f"{module} imports {other}"
        for module, others in found.items()
        for other in sorted(others)
        if (room := room_of(module)) != (there := room_of(other)) and FLOOR[there] >= FLOOR[room]
    ]


def test_no_import_runs_upward() -> None:
    assert upward(all_imports()) == []


def test_the_core_imports_no_other_wing() -> None:
    """And no wing but the commands imports the commands."""
    for module, others in all_imports().items():
        wing = module.partition(".")[0]
        there = {other.partition(".")[0] for other in others} & {*WINGS}
        allowed = {"lab": {"lab"}, "papers": {"lab", "papers"}, "commands": {*WINGS}}
        assert there <= allowed.get(wing, set()), f"{module} imports {sorted(others)}"


def test_each_package_has_a_floor_of_its_own() -> None:
    """But for rooms of papers, features of ``serving``, and checks among the commands."""
    inside = ("papers.", "serving.features", "commands.check")
    named = {package for package in PACKAGES if package and not package.startswith(inside)}
    assert named <= FLOOR.keys()
    assert all(room in MODULES for room in FLOOR)


def test_no_files_import_each_other_in_a_circle() -> None:
    list(TopologicalSorter(all_imports()).static_order())


def test_a_paper_is_imported_by_itself_alone() -> None:
    for module, others in all_imports().items():
        for other in others:
            if other.startswith("papers."):
                assert module.split(".")[:2] == other.split(".")[:2], f"{module} imports {other}"


@pytest.mark.parametrize(
    ("module", "text", "found"),
    [
        ("serving.loop", "from jaxinfer.simulate.world import X", ["simulate.world"]),
        ("serving.loop", "def f():\n  from jaxinfer.simulate import world", ["simulate.world"]),
        ("serving.loop", "import jaxinfer.lab.plan.search as s", ["plan.search"]),
        ("simulate.run", "from jaxinfer import __version__", []),
        ("config.nodes", "from jaxinfer.serving.loop import X", []),
        ("simulate.costs.model", "from jaxinfer.simulate.run import X", ["simulate.run"]),
        ("runtime.kv.slab", "from jaxinfer.runtime.spread.slice_move import X", ["runtime.spread"]),
    ],
)
def test_imports_upward_are_seen(module: str, text: str, found: list[str]) -> None:
    seen = upward({module: set(imports(ast.parse(text), MODULES.keys()))})
    assert len(seen) == len(found)
    assert all(other in told for other, told in zip(found, seen, strict=True))


def test_no_folder_has_more_files_than_one_can_look_through() -> None:
    for folder in {path.parent for path in MODULES.values()}:
        assert len(list(folder.glob("*.py"))) <= MOST_FILES, folder


def test_the_docs_show_the_floors() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    table = page.split("| floor | packages |\n|---|---|\n")[1].split("\n\n")[0]
    rooms = [re.findall(r"`(.*?)`", row) for row in table.splitlines()]
    assert rooms == [[room.replace(".", "/") for room in floor] for floor in FLOORS[::-1]]
