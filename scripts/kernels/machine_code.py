"""Counts instructions in a kernel's loop over tiles, with NVIDIA's disassembler."""

import re
import subprocess
from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

# Kinds by the first letters of instructions: products of matrices, powers of two and reciprocals,
# waits for copies in flight, barriers, copies to and from shared memory, and spills to memory.
PRODUCTS = ("HGMMA", "HMMA", "IGMMA", "IMMA", "QGMMA")
COUNTED = {
    "products": PRODUCTS,
    "MUFU": ("MUFU",),
    "waits": ("WARPGROUP.DEPBAR", "DEPBAR", "LDGDEPBAR", "SYNCS.PHASECHK"),
    "barriers": ("BAR", "WARPSYNC"),
    "STS": ("STS", "STSM"),
    "LDS": ("LDS", "LDSM"),
    "LDG": ("LDG", "LDGSTS", "UTMALDG"),
    "local": ("STL", "LDL"),
}
_INSTRUCTION = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)([^;]*);")
_LABEL = re.compile(r"^(\.L_[\w$]+):")


class Instruction(NamedTuple):
    """The name of an instruction; for a jump, also its target."""

    name: str
    target: str | None


def disassembler() -> Path | None:
    """Return the path of nvdisasm in its wheel (``nvidia-cuda-nvdisasm``); None without it."""
    package = find_spec("nvidia")
    folders = package.submodule_search_locations or () if package else ()
    return next((found for root in folders for found in Path(root).glob("*/bin/nvdisasm")), None)


def tile_loop(text: str) -> dict[str, int] | None:
    """Count the instructions of the shortest loop with products; None if there is no such loop.

    Args:
        text: machine code of one kernel, as nvdisasm prints it. A loop is the code between a label
            and a jump back to it. Code in which the program ends is no loop; it stands before the
            places where waits continue.
    """
    labels: dict[str, int] = {}
    code: list[Instruction] = []
    for line in text.splitlines():
        if label := _LABEL.match(line):
            labels[label[1]] = len(code)
        elif found := _INSTRUCTION.search(line):
            jump = re.search(r"\.L_[\w$]+", found[3]) if found[2].startswith("BRA") else None
            code.append(Instruction(found[2], jump[0] if jump else None))
    loops = []
    for end, instruction in enumerate(code):
        begin = labels.get(instruction.target or "", end + 1)
        names = [one.name for one in code[begin : end + 1]]
        if any(name.startswith(PRODUCTS) for name in names) and "EXIT" not in names:
            loops.append(names)
    if not loops:
        return None
    names = min(loops, key=len)
    counts = Counter(what for name in names for what, of in COUNTED.items() if _is(name, of))
    return {"instructions": len(names), **{what: counts[what] for what in COUNTED}}


def _is(name: str, names: tuple[str, ...]) -> bool:
    return any(name == one or name.startswith(f"{one}.") for one in names)


def disassemble(cubin: Path) -> str:
    """Return machine code as text.

    Raises:
        CalledProcessError: the disassembler does not know the file's GPU.
    """
    tool = disassembler()
    assert tool
    done = subprocess.run([tool, "-c", cubin], check=True, capture_output=True, text=True)
    return done.stdout
