"""Batch jobs that are killed: they write some lines and then wait for it."""

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

LIMITED = """
import sys, time
from jaxinfer.__main__ import main
from jaxinfer.workload.result_file import ResultFile

append, left = ResultFile.append, int(sys.argv.pop(1))

def append_some(file, record):
    global left
    if not left:
        time.sleep(3600)
    left -= 1
    append(file, record)

ResultFile.append = append_some
main()
"""


def start_limited(most: int, *arguments: str | Path) -> "subprocess.Popen[bytes]":
    """A command that writes no more than so many result lines, however late it is killed."""
    command = [sys.executable, "-c", LIMITED, str(most), *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def num_lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def wait_for_lines(job: "subprocess.Popen[Any]", path: Path, count: int) -> None:
    while num_lines(path) < count:
        assert job.poll() is None, job.returncode
        time.sleep(0.005)
