"""Ends of commands: by a signal, a full disk, or a mistake in the first moments."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from waiting import HANG_S

WORDS = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated"}
# A command that sends itself a signal when it imports a module.
WHILE_IMPORTING = """
import os, sys

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "{module}":
            os.kill(os.getpid(), {number:d})

sys.meta_path.insert(0, Finder())
sys.argv = ["jaxinfer", "run", "no-such-file.yaml"]
from jaxinfer.__main__ import main
main()
"""
# One that takes the exception for nothing, as a callback from C++ may.
DEAF = """
import os, sys, time
from jaxinfer.commands import signals

signals.GRACE_S = 0.2
signals.end_on_signals()

class Deaf:
    def __del__(self):
        os.kill(os.getpid(), {number:d})
        time.sleep(0.01)

Deaf()
time.sleep(600)
"""


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=HANG_S
    )


@pytest.mark.parametrize("number", WORDS)
@pytest.mark.parametrize("module", ["jaxinfer.commands.app", "yaml"])
def test_a_signal_while_importing(number: signal.Signals, module: str) -> None:
    done = run(WHILE_IMPORTING.format(module=module, number=number))
    assert (done.stderr, done.returncode) == (f"jaxinfer: {WORDS[number]}\n", 128 + number)


@pytest.mark.parametrize("number", WORDS)
def test_a_signal_that_got_lost(number: signal.Signals) -> None:
    done = run(DEAF.format(number=number))
    assert (done.stderr, done.returncode) == (f"jaxinfer: {WORDS[number]}\n", 128 + number)


def test_little_is_imported_before_signals_are_looked_after() -> None:
    code = "import sys, jaxinfer.__main__; print(*sys.modules)"
    loaded = set(run(code).stdout.split())
    assert "jaxinfer.commands.signals" in loaded
    assert not {"pydantic", "click", "rich", "yaml", "numpy", "jax"} & loaded


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("options", [["--help"], ["configs"]])
def test_output_to_a_full_disk(options: list[str], unbuffered: str) -> None:
    command = [sys.executable, "-m", "jaxinfer", *options]
    env = os.environ | {"PYTHONUNBUFFERED": unbuffered}
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, env=env)
    assert done.stderr == "jaxinfer: cannot write the output: No space left on device\n"
    assert done.returncode == 2


def test_names_of_the_package_and_what_they_load() -> None:
    code = "import sys, jaxinfer; print(*dir(jaxinfer)); print(*sys.modules)"
    names, loaded = (set(line.split()) for line in run(code).stdout.splitlines())
    assert {"LLM", "SamplingParams", "RequestOutput", "CompletionOutput", "JaxinferError"} <= names
    assert not {"jax", "numpy"} & loaded
