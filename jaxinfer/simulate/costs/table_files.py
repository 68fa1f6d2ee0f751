"""Reads and checks the files of an operator profile.

A folder has the files that LLMServingSim's profiler writes for one GPU and model: ``meta.yaml``,
and for each degree of tensor parallelism a folder such as ``tp1`` with times in microseconds of one
layer's operators:

- ``dense.csv``: layer, tokens, time_us
- ``per_sequence.csv``: layer, sequences, time_us
- ``moe.csv``, for models with experts: tokens, activated_experts, time_us
- ``attention.csv``: prefill_chunk, kv_prefill, n_decode, kv_decode, time_us, for batches of a chunk
  and decodes that all see the same context. Instead of kv_prefill it may have prefill_key: the mean
  number of entries that the tokens of all chunks see.

Points may lie anywhere; if a point occurs several times, its mean is used. Each file may be
compressed (``.csv.gz``). Other columns are ignored.
"""

import csv
import gzip
import math
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import yaml

from jaxinfer.errors import JaxinferError
from jaxinfer.hardware.catalogue import ModelShape
from jaxinfer.simulate.costs.attention_grid import At

# Number of times that an operator runs in a layer.
PER_LAYER = {
    "layernorm": 2,
    "qkv_proj": 1,
    "rotary_emb": 1,
    "o_proj": 1,
    "gate_up_proj": 1,
    "act_fn": 1,
    "down_proj": 1,
}
# Operators that some models do not have, or that some profiles do not list separately. ``qk_norm``
# is the norm of queries and keys together.
OPTIONAL = {"qk_norm": 1, "add": 1, "all_reduce": 2}
# These replace one feed-forward layer; only published tables list the router's product separately.
EXPERTS = {"router": 1, "moe": 1}
FEED_FORWARD = ("gate_up_proj", "act_fn", "down_proj")
FIRST, LAST, PER_SEQUENCE = ("embedding",), ("final_layernorm",), ("lm_head", "sampler")
# For each file, its axis, required operators, and optional ones.
_OPERATORS = {
    "dense": ("tokens", (*PER_LAYER, *FIRST, *LAST), tuple(OPTIONAL)),
    "per_sequence": ("sequences", PER_SEQUENCE, ()),
}
# Further files: corrections and whole steps, which no operator's time needs.
_UNREAD = ("skew", "skew_fit", "step", "mtp")
# Sizes that tensor parallelism divides.
_SHARDED = ("num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size")


def check_meta(folder: Path, model: ModelShape, kind: str, devices: int) -> dict[str, Any]:
    """Check that tables are for this model and GPU; return the contents of ``meta.yaml``.

    Sizes may be those of one device, at any degree of tensor parallelism that was profiled, or
    (``engine.padded``) those of the model padded for this number of ``devices``.

    Raises:
        JaxinferError: the tables are for another model or GPU, or ``meta.yaml`` does not say.
    """
    path = folder / "meta.yaml"
    try:
        meta = dict(yaml.safe_load(path.read_text(encoding="utf-8")))
        sizes = dict(meta["engine_effective"]["hf_overrides"])
        sizes |= meta.get("engine", {}).get("padded", {}).get(devices, {})
        measured = str(meta.get("hardware", kind))
    except OSError as error:
        raise JaxinferError(f"{path}: {error.strerror}") from None
    except (yaml.YAMLError, KeyError, TypeError, ValueError, AttributeError):
        raise JaxinferError(f"{path}: does not say what was profiled") from None
    letters = map(re.escape, filter(str.isalnum, measured))
    if not re.search(r"[\W_]*".join(letters) + r"(?!\d)", kind, re.IGNORECASE):
        raise JaxinferError(
            f"{path}: profiled on {measured}, the group has {kind}: its name must have the other"
        )
    ours = {name: getattr(model, name) for name in ModelShape.model_fields}
    ours["head_dim"] = model.head_size
    known = {name: size for name, size in sizes.items() if name in ours}
    known.pop("num_hidden_layers", None)
    if model.num_experts:  # It counts dense layers, and such a model has none.
        known.pop("intermediate_size", None)
    degrees = [1, *(degree for degree in _degrees(folder) if degree > 1)]
    wrong = [
        [n for n, size in known.items() if size * (d if n in _SHARDED else 1) != ours[n]]
        for d in degrees
    ]
    if all(wrong):
        name = min(wrong, key=len)[0]
        shared = f", whole or over {' or '.join(map(str, degrees[1:]))}" if degrees[1:] else ""
        raise JaxinferError(
            f"{path}: profiled with {name} {known[name]}, the model has {ours[name]}{shared}"
        )
    return meta


def _degrees(folder: Path) -> list[int]:
    return sorted(int(path.name[2:]) for path in folder.glob("tp*") if path.name[2:].isdecimal())


def find_degree(folder: Path, devices: int) -> Path:
    """Return the folder of tables for this number of devices that share each layer.

    Raises:
        JaxinferError: there is none.
    """
    path = folder / f"tp{devices}"
    if not path.is_dir():
        there = ", ".join(f"tp{degree}" for degree in _degrees(folder)) or "nothing"
        raise JaxinferError(f"{path}: no such folder; {there} was profiled")
    return path


def unread_files(folder: Path, experts: bool) -> list[str]:
    """Return the names of the folder's files on which no step's time depends.

    Args:
        experts: whether the model has experts, whose times are then in ``moe.csv``.

    Raises:
        JaxinferError: a file has unknown operators, such as those of experts.
    """
    found = sorted({path.name.partition(".")[0] for path in folder.glob("*.csv*")})
    for name in found:
        if name not in (*_OPERATORS, *_UNREAD, "attention", *["moe"] * experts):
            raise JaxinferError(f"{folder}: {name}.csv has operators that tables do not model")
    return [f"{name}.csv" for name in found if name in _UNREAD]


def operator_points(folder: Path, file: str, experts: bool) -> dict[str, dict[float, float]]:
    """Return the operators of ``dense`` or ``per_sequence``: microseconds by tokens or sequences.

    Args:
        experts: whether the model has experts instead of a feed-forward layer.

    Raises:
        JaxinferError: the file is missing or wrong, lacks an operator or has an unknown one.
    """
    _, needed, others = _OPERATORS[file]
    wanted = [name for name in needed if not (experts and name in FEED_FORWARD)]
    return named_points(folder, file, wanted, others)


def expert_points(folder: Path) -> dict[tuple[float, float], float]:
    """Return microseconds of one layer's experts on a device, by tokens and activated experts.

    Raises:
        JaxinferError: the file is missing, wrong or empty.
    """
    columns = ("tokens", "activated_experts", "time_us")
    times: dict[tuple[float, float], list[float]] = defaultdict(list)
    for _, (tokens, experts, micros) in read_rows(folder, "moe", columns, ()):
        times[tokens, experts].append(micros)
    if not times:
        raise JaxinferError(f"{folder}: moe.csv has no rows")
    return {at: fmean(found) for at, found in times.items()}


def named_points(
    folder: Path, file: str, needed: Sequence[str], others: Sequence[str] = ()
) -> dict[str, dict[float, float]]:
    """Read points as ``operator_points`` does, for operators with these names."""
    axis = _OPERATORS[file][0]
    times: dict[str, dict[float, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row, (x, micros) in read_rows(folder, file, (axis, "time_us"), ("layer",)):
        times[row["layer"]][x].append(micros)
    lacking = sorted(set(needed) - set(times))
    unknown = sorted(set(times) - {*needed, *others})
    if lacking:
        raise JaxinferError(f"{folder}: {file}.csv lacks {', '.join(lacking)}")
    if unknown:
        raise JaxinferError(
            f"{folder}: {file}.csv has {', '.join(unknown)}: how often that runs is not known; "
            f"known: {', '.join([*needed, *others])}"
        )
    return {name: {x: fmean(y) for x, y in found.items()} for name, found in times.items()}


def attention_points(folder: Path) -> tuple[dict[At, float], bool]:
    """Return microseconds by prefill_chunk, kv_prefill or prefill_key, n_decode and kv_decode.

    Returns:
        The points, and whether they are by prefill_key. Decodes of several tokens are left out.

    Raises:
        JaxinferError: the file is missing or wrong, or has an operator other than ``attention``.
    """
    header = next(_lines(folder, "attention"), [])
    entries = "prefill_key" if "prefill_key" in header else "kv_prefill"
    columns = ("prefill_chunk", entries, "n_decode", "kv_decode", "time_us")
    times: dict[At, list[float]] = defaultdict(list)
    for row, (chunk, before, decodes, context, micros) in read_rows(
        folder, "attention", columns, ()
    ):
        if (layer := row.get("layer", "attention")) != "attention":
            raise JaxinferError(
                f"{folder}: attention.csv has {layer}: how often that runs is not known"
            )
        if not micros or not (chunk or decodes):
            raise JaxinferError(f"{folder}: attention.csv has an empty batch, or one of 0 us")
        if row.get("decode_q_len", "1") == "1":
            at = chunk, before if chunk else 0.0, decodes, context if decodes else 0.0
            times[at].append(micros)
    return {at: fmean(found) for at, found in times.items()}, entries == "prefill_key"


def read_rows(
    folder: Path, file: str, numbers: Sequence[str], words: Sequence[str]
) -> Iterator[tuple[dict[str, str], list[float]]]:
    """Yield each row and its numbers."""
    lines = _lines(folder, file)
    header = next(lines, [])
    for column in (*words, *numbers):
        if column not in header:
            raise JaxinferError(f"{folder}: {file}.csv lacks the column {column}")
    for line, cells in enumerate(lines, 2):
        row = dict(zip(header, cells, strict=False))
        try:
            values = [float(row[column]) for column in numbers]
        except (KeyError, ValueError):
            values = []
        if not values or not all(0 <= value < math.inf for value in values):
            raise JaxinferError(
                f"{folder}: {file}.csv, line {line}: {', '.join(numbers)} must be numbers from 0 "
                f"on, not {','.join(cells)}"
            )
        yield row, values


def _lines(folder: Path, file: str) -> Iterator[list[str]]:
    plain, packed = folder / f"{file}.csv", folder / f"{file}.csv.gz"
    try:
        if plain.is_file() or not packed.is_file():
            with plain.open(newline="", encoding="utf-8") as opened:
                yield from csv.reader(opened)
        else:
            with gzip.open(packed, "rt", newline="", encoding="utf-8") as opened:
                yield from csv.reader(opened)
    except (OSError, EOFError, UnicodeDecodeError, csv.Error) as error:
        reason = error.strerror if isinstance(error, OSError) else None
        raise JaxinferError(f"{plain}: {reason or error}") from None
