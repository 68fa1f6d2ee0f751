"""The example of an adapter: its hand-off passes, and its fault is named."""

import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).parents[2] / "examples" / "conformance_numpy.py"


def test_it_names_the_fault() -> None:
    ran = subprocess.run([sys.executable, EXAMPLE], capture_output=True, text=True, check=True)
    well, fault = ran.stdout.splitlines()
    assert well == "all is well"
    assert fault.startswith("page offset off by one: request 0, layer 0, keys, token 1, head 0")
