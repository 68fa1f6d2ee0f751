"""``jaxinfer check``: its help, and the names that earlier versions had for checks."""

from pathlib import Path

import pytest
from test_cli import jaxinfer


@pytest.mark.parametrize("group", [[], ["check"]])
def test_a_group_without_a_command_prints_its_help(group: list[str]) -> None:
    done = jaxinfer(*group)
    assert (done.returncode, done.stdout) == (2, "")
    assert "\nCommands:\n" in done.stderr


def test_names_of_earlier_versions_run_the_checks(tmp_path: Path) -> None:
    for words, new in ((["rerun"], "rerun"), (["replay", "--check"], "decisions")):
        notice, reason = jaxinfer(*words, tmp_path).stderr.splitlines()
        assert notice == f"jaxinfer: {words[0]} is now `jaxinfer check {new}`"
        assert reason == jaxinfer("check", new, tmp_path).stderr.strip()
    olds = {"replay": "replay", "validate": "points", "conformance": "hand-offs"}
    for old, new in olds.items():
        shown = jaxinfer(old, "--help")
        assert shown.stderr == f"jaxinfer: {old} is now `jaxinfer check {new}`\n"
        assert shown.stdout == jaxinfer("check", new, "--help").stdout
