"""Commands in the docs: options that exist, files that are there, outputs that git ignores."""

import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from jaxinfer.cli import cli
from jaxinfer.config import as_run_file, load_run_file
from jaxinfer.models.sharding import load_rules
from jaxinfer.workload.lengths import read_workload

ROOT = Path(__file__).parents[1]
DOCS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
# What each command writes to.
OUTPUTS = ("output_path", "json_path", "out", "destination")


def commands() -> Iterator[str]:
    """Those that stand in a block of their own, backslashes joined."""
    for path in DOCS:
        for line in path.read_text().replace("\\\n", " ").splitlines():
            if line.startswith("    jaxinfer "):
                yield line.strip()


COMMANDS = list(commands())


def test_there_are_some() -> None:
    named = {shlex.split(command)[1] for command in COMMANDS}
    assert named == set(cli.commands)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_of_the_docs(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    _, name, *arguments = shlex.split(command)
    with cli.commands[name].make_context(name, arguments) as context:
        given = context.params
    for output in OUTPUTS:
        if given.get(output):
            assert str(given[output]).startswith("runs/"), output
    paths = [word for word in arguments if word.startswith("configs/")]
    for path in paths:
        assert Path(path).is_file(), path
        if path.endswith(".yaml"):
            load_run_file(path, given.get("settings", ()))
        if path.endswith(".py"):
            assert load_rules(path)
    if given.get("workload"):
        assert read_workload(given["workload"])
    for name in (given.get("systems") or "").split(","):
        assert not name or Path(f"configs/cpu/{name}.yaml").is_file()


def test_the_first_run_file_in_the_docs() -> None:
    text = (ROOT / "docs" / "run-file.md").read_text()
    config = as_run_file(yaml.safe_load(text.split("```yaml\n")[1].split("```")[0]))
    assert (ROOT / str(config.workload.input)).is_file()
    assert str(config.workload.output).startswith("runs/")


def test_git_ignores_where_they_write() -> None:
    assert "/runs/" in (ROOT / ".gitignore").read_text().splitlines()
