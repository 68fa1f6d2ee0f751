"""Finds the tables of a card, backend and version in a folder in aiconfigurator's format.

``CARD.yaml`` has a card's numbers. Its tables are Parquet files, one per operator. In a snapshot
they are ``CARD/FAMILY/BACKEND/VERSION/NAME.parquet``; in a wheel they are
``data/CARD/BACKEND/VERSION/NAME.parquet`` next to ``CARD.yaml``.
"""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from jaxinfer.errors import JaxinferError

# For each file, the name of its folder.
FAMILIES = {
    "gemm_perf": "gemm",
    "context_attention_perf": "attention",
    "generation_attention_perf": "attention",
    "custom_allreduce_perf": "comm",
    "moe_perf": "moe",
}


@dataclass(frozen=True)
class Card:
    """A card with published tables: its rates, and the files with its tables.

    Attributes:
        name: name of its folder, such as ``h100_sxm``.
        bandwidth: bytes per second that an operator on vectors reaches.
        peak_bandwidth: bytes per second of the memory.
        launch_s: seconds added for the launch of such an operator.
        link: bytes per second between the cards of a node, in each direction.
        flops: peak bfloat16 FLOPs per second; infinite if the file does not say.
        has_all_reduces: whether all-reduces were measured; otherwise they are modelled.
        kinds: names of the card in ``gpus.yaml``; empty if the file does not say.
    """

    folder: Path
    name: str
    bandwidth: float
    peak_bandwidth: float
    launch_s: float
    link: float
    flops: float
    has_all_reduces: bool
    kinds: tuple[str, ...]

    def file(self, name: str, backend: str, version: str) -> Path:
        """Find a table of exactly this version.

        Raises:
            JaxinferError: it does not exist; the message names the nearest version.
        """
        there = self.versions(name, backend)
        if version in there:
            return there[version]
        family = self.folder / FAMILIES[name]
        where = family if family.is_dir() else self.folder
        if not there:
            known = sorted({path.parts[-3] for path in self._all(name)})
            hint = f"there are {', '.join(known)}" if known else "no backend has it"
            raise JaxinferError(f"{where}: no {name} of {backend}; {hint}")
        raise JaxinferError(
            f"{where}: no {name} of {backend} {version}; the nearest is "
            f"{_nearest(version, list(there))}, of {', '.join(sorted(there, key=_numbers))}"
        )

    def newest_file(self, name: str, backend: str, version: str) -> Path:
        """Find the newest table that is not newer than this version.

        Collectives are measured less often than kernels.

        Raises:
            JaxinferError: there is none.
        """
        there = self.versions(name, backend)
        older = [each for each in there if _numbers(each) <= _numbers(version)]
        return self.file(name, backend, max(older, key=_numbers) if older else version)

    def versions(self, name: str, backend: str) -> dict[str, Path]:
        """Return the files of one table of a backend, by version."""
        found = (path for path in self._all(name) if path.parts[-3] == backend)
        return {path.parts[-2]: path for path in found}

    def _all(self, name: str) -> Iterator[Path]:
        for ending in (".parquet", ".npz"):
            yield from sorted(self.folder.glob(f"*/*/{name}{ending}"))
            yield from sorted(self.folder.glob(f"{FAMILIES[name]}/*/*/{name}{ending}"))


def is_published(folder: Path) -> bool:
    """Tell whether a folder has tables in aiconfigurator's format."""
    return any(True for _ in _card_files(folder))


def find_card(folder: Path, name: str | None, kind: str) -> Card:
    """Return the card of this name; by default the one whose name begins the GPU's name.

    Raises:
        JaxinferError: there is none, or there are several, or its numbers cannot be read.
    """
    there = {path.stem: path for path in _card_files(folder)}
    plain = re.sub(r"\W+", "_", kind).lower()
    fitting = [name] if name else [card for card in there if f"{card}_".startswith(f"{plain}_")]
    if len(fitting) != 1 or fitting[0] not in there:
        asked = f"no card {name!r}" if name else f"no card whose name begins like {kind}"
        raise JaxinferError(f"{folder}: {asked}; there are {', '.join(sorted(there)) or 'none'}")
    card = _read_card(there[fitting[0]])
    if card.kinds and kind not in card.kinds:
        known = " or ".join(card.kinds)
        raise JaxinferError(f"{folder}: {card.name} is of {known}, the group has {kind}")
    return card


def cards(folder: Path) -> list[Card]:
    """Return the cards of a folder, sorted by name."""
    return [_read_card(path) for path in sorted(_card_files(folder))]


def _card_files(folder: Path) -> Iterator[Path]:
    for path in folder.glob("*.yaml"):
        if (folder / path.stem).is_dir() or (folder / "data" / path.stem).is_dir():
            yield path


def _read_card(path: Path) -> Card:
    folder = path.with_suffix("")
    if not folder.is_dir():
        folder = path.parent / "data" / path.stem
    try:
        read: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
        gpu, node = read["gpu"], read["node"]
        numbers = (
            float(gpu["mem_bw"]) * float(gpu["mem_bw_empirical_scaling_factor"]),
            float(gpu["mem_bw"]),
            float(gpu["mem_empirical_constant_latency"]),
            float(node["intra_node_bw"]),
            float(gpu.get("bfloat16_tc_flops", math.inf)),
        )
    except OSError as error:
        raise JaxinferError(f"{path}: {error.strerror}") from None
    except (yaml.YAMLError, KeyError, TypeError, ValueError):
        raise JaxinferError(
            f"{path}: must have gpu.mem_bw, gpu.mem_bw_empirical_scaling_factor, "
            "gpu.mem_empirical_constant_latency and node.intra_node_bw, all numbers"
        ) from None
    if min(numbers[0], numbers[1], numbers[3]) <= 0 or not 0 <= numbers[2] < 0.1:
        raise JaxinferError(
            f"{path}: bandwidths must be greater than 0 and mem_empirical_constant_latency seconds "
            "below 0.1"
        )
    measured = read.get("all_reduces") != "modelled"
    return Card(folder, path.stem, *numbers, measured, tuple(read.get("kinds", ())))


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(each) for each in re.findall(r"\d+", version))


def _nearest(version: str, known: list[str]) -> str:
    ordered = sorted(known, key=_numbers)
    older = [each for each in ordered if _numbers(each) <= _numbers(version)]
    return older[-1] if older else ordered[0]
