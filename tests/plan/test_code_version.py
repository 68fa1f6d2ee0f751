"""Kept simulations know all code and files that a simulation loads."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from published_cases import make_card, wanted

from jaxinfer.files.contents import contents
from jaxinfer.files.made_from import PACKAGE, code_version, digest_of
from jaxinfer.simulate.costs import kept_operators
from jaxinfer.simulate.costs.kept_operators import published_operators

# Simulates all run files that ship and can be simulated, and one by tables and layouts each; loads
# all planners. Prints the modules of ours that are loaded then, and files of the package that were
# opened and that no run file names.
SIMULATE = """
import json, os, sys

opened = set()

def hear(event, arguments):
    if event == "open" and isinstance(arguments[0], (str, os.PathLike)):
        opened.add(str(arguments[0]))

sys.addaudithook(hear)
from jaxinfer.files.contents import contents
from jaxinfer.files.shipped import SHIPPED
from jaxinfer.files.made_from import PACKAGE
from jaxinfer.options.validation import import_own, read_yaml
from jaxinfer.lab.plan.registry import PLANNERS
from jaxinfer.lab.plan.sweep.sweep import PointRun, simulate_point

one = {"groups": {"g": {"kind": "H100-SXM", "devices": 2}}, "instances": {"i": {"group": "g"}}}
datas = [
    one | {"simulate": {"tables": "h100"}},
    one | {"simulate": {"step_s": 0.001}, "engine": {"layout": "sequence_parallel"}},
    one | {"model": "mixtral-8x7b", "engine": {"layout": "expert_parallel", "mesh": {"x": 2}}},
]
for path in SHIPPED.rglob("*.yaml"):
    data = read_yaml(path)
    if isinstance(data, dict) and "instances" in data and "groups" in data:
        datas.append(data)
for target in PLANNERS.values():
    import_own(target)
served, named = 0, set()
opened.clear()
for data in datas:
    lengths = {"input_len": 100, "output_len": 3, "count": 3}
    data = {"model": "llama-3-8b"} | data | {"workload": {"synthetic": lengths}}
    served += "refused" not in simulate_point(PointRun(data))
    named |= contents(data).keys()
inside = [path for path in opened if path.startswith(f"{PACKAGE}{os.sep}") and path not in named]
modules = [name for name in sys.modules if name.split(".")[0] in ("jaxinfer", "jax")]
print(json.dumps([served, inside, modules]))
"""


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> tuple[int, list[str], list[str]]:
    home = tmp_path_factory.mktemp("home")
    paths = os.pathsep.join(path for path in sys.path if path)
    environment = {**os.environ, "HOME": str(home), "PYTHONPATH": paths}
    done = subprocess.run(
        [sys.executable, "-c", SIMULATE],
        capture_output=True,
        text=True,
        check=True,
        env=environment,
        cwd=home,
    )
    served, inside, modules = json.loads(done.stdout.splitlines()[-1])
    return served, inside, modules


def test_what_the_version_leaves_out_is_loaded_by_no_simulation(
    loaded: tuple[int, list[str], list[str]],
) -> None:
    served, _, modules = loaded
    assert served > 30
    assert "jaxinfer.models.layouts" in modules
    assert "jaxinfer.models.layout_files" in modules
    assert "jaxinfer.simulate.published.convert" in modules
    assert code_version() == digest_of(PACKAGE, ("pallas_kernels",))
    assert [name for name in modules if name.startswith(("jax.", "jaxinfer.pallas_kernels"))] == []


def test_all_files_that_a_simulation_opens_are_known(
    loaded: tuple[int, list[str], list[str]],
) -> None:
    """By the digest of the package's code and facts, or by the contents of what is named."""
    _, inside, _ = loaded
    unknown = [
        path
        for path in map(Path, inside)
        if path.suffix not in (".py", ".pyc")
        and not (path.suffix == ".yaml" and path.parent == PACKAGE / "configs")
    ]
    assert unknown == []


def test_converted_tables_depend_on_all_that_simulations_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shapes of models count operators, too."""
    monkeypatch.setattr(kept_operators, "FOLDER", tmp_path / "kept")
    root = make_card(tmp_path / "t")
    for version in ("1", "1", "2"):
        monkeypatch.setattr(kept_operators, "code_version", lambda version=version: version)
        published_operators.cache_clear()
        published_operators(wanted(root))
    assert len(list((tmp_path / "kept").glob("*.npz"))) == 2


@pytest.fixture
def layout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A layout of one's own, in a folder that is not on the module search path."""
    for name, text in {
        "layouts/mine.py": "from rules.common import RULES\nimport os, numpy, jaxinfer.models\n",
        "rules/__init__.py": "",
        "rules/common.py": "from .letters import F\nfrom jaxinfer.models.layouts import Rule\n"
        "RULES = (Rule('*', {F: 'x'}),)\n",
        "rules/letters.py": "import far.away\nF = 'F'\n",
        "far/away.py": "",
        "far/unused.py": "",
        "layouts/beside.py": "",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    return str(tmp_path / "layouts" / "mine.py")


def test_a_layout_is_known_with_all_that_it_imports(layout: str, tmp_path: Path) -> None:
    found = contents({"engine": {"layout": layout}})
    assert {str(Path(path).relative_to(tmp_path)) for path in found} == {
        "layouts/mine.py",
        "layouts/beside.py",  # Names of imports may be computed.
        "rules/__init__.py",
        "rules/common.py",
        "rules/letters.py",
        "far/away.py",
    }
    assert list(contents(layout, beside=False)) == [layout]
    letters = tmp_path / "rules" / "letters.py"
    letters.write_text("F = 'G'\n")
    os.utime(letters, ns=(1, 1))
    assert contents({"engine": {"layout": layout}}) != found


def test_a_module_that_is_no_python_is_known_by_itself(layout: str) -> None:
    Path(layout).write_text("not python")
    assert layout in contents(layout)
