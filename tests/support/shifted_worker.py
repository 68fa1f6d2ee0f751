"""A worker whose host's clock began at another moment; its processes run this file, too."""

import runpy
import sys
import time

AHEAD_S = 1000.0

if __name__ == "__main__":
    clock = time.perf_counter
    time.perf_counter = lambda: clock() + AHEAD_S
    if sys.argv[1] == "--listen":
        import subprocess

        start = subprocess.Popen

        def start_shifted(command, **options):  # type: ignore[no-untyped-def]
            return start([command[0], __file__, *command[1:]], **options)

        subprocess.Popen = start_shifted  # type: ignore[assignment,misc]
        sys.argv[1:1] = ["worker"]
        runpy.run_module("jaxinfer", run_name="__main__")
    else:
        # As started by start_worker: -m, a module, and its arguments.
        sys.argv[:] = sys.argv[sys.argv.index("-m") + 1 :]
        runpy.run_module(sys.argv[0], run_name="__main__")
