"""vLLM's own scheduler on workloads that come as lines of JSON; for vLLM's Python.

For each line, its decisions are written as lines, then the ends of its requests. Nothing of
jaxinfer is imported, and no model is loaded.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path


def main() -> None:
    """Answer each line of the standard input."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.parse_args()
    from scripts.validate.vllm_scheduler.vllm_engine import MODEL, Engine

    out = sys.stdout
    sys.stdout = sys.stderr
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(MODEL), encoding="utf-8")
        for line in sys.stdin:
            engine = Engine(json.loads(line), folder)
            for decision in engine.run():
                out.write(json.dumps(decision, separators=(",", ":")) + "\n")
            out.write(json.dumps({"ended": engine.ended}) + "\n")
            out.flush()


if __name__ == "__main__":
    main()
