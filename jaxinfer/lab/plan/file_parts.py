"""Merges the models and workloads of run files with those of a plan or sweep file.

Options of the plan or sweep file take precedence.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from jaxinfer.config.run_file import SHORT
from jaxinfer.errors import JaxinferError
from jaxinfer.options.validation import OptionError, read_yaml

# Options of a workload that select its requests, and those of them that name their source.
REQUESTS = ("trace", "tokenizer", "synthetic", "only", "limit", "order", "arrivals")
SOURCES = ("trace", "synthetic")
# Options that make a group another kind of group; the file's other options of the group are then
# dropped.
_DECIDES = {
    "arrivals": ("kind",),
    "synthetic": ("lengths", "input_len", "output_len"),
}


def read_file(file: str) -> dict[str, Any]:
    """Read a run file as a mapping.

    Raises:
        JaxinferError: the file cannot be read, or is not a mapping.
    """
    data = read_yaml(Path(file))
    if not isinstance(data, dict):
        raise JaxinferError(f"{file}: must be a run file")
    return data


def with_workload(data: Mapping[str, Any], run: Mapping[str, Any]) -> dict[str, Any]:
    """Return a run file's contents, with model and workload from ``run`` or else from the file.

    Args:
        run: options that all candidates have in common.
    """
    found = dict(data)
    if run.get("model") is not None:
        found["model"] = run["model"]
    own, common = data.get("workload"), run.get("workload")
    if isinstance(own, Mapping) and isinstance(common, Mapping):
        found["workload"] = joined(own, common)
    elif common is not None:
        found["workload"] = common
    return found


def without_requests(data: Mapping[str, Any], run: Mapping[str, Any]) -> dict[str, Any]:
    """Return a candidate's part of a run file; of the file's workload, it keeps only options."""
    found = {name: value for name, value in data.items() if name != "workload"}
    if run.get("model") is not None:
        found.pop("model", None)
    own, common = data.get("workload"), run.get("workload")
    common = common if isinstance(common, Mapping) else {}
    if isinstance(own, Mapping):
        told = {k: v for k, v in own.items() if k not in (*REQUESTS, *common, "input", "output")}
        if told:
            found["workload"] = told
    return found


def joined(own: Mapping[str, Any], common: Mapping[str, Any]) -> dict[str, Any]:
    """Merge a file's workload with the common one, which takes precedence.

    If the common workload has a trace or lengths, those of the file are removed; if it has arrivals
    of another kind, they replace the file's.
    """
    found = dict(own)
    if any(common.get(name) is not None for name in SOURCES):
        found = {name: value for name, value in own.items() if name not in SOURCES}
        kept = own.get("synthetic")
        if common.get("trace") is None and kept is not None:
            found["synthetic"] = kept
    for name, value in common.items():
        mine, new = _as_mapping(name, found.get(name)), _as_mapping(name, value)
        if isinstance(mine, Mapping) and isinstance(new, Mapping):
            other = any(key in new and new[key] != mine.get(key) for key in _DECIDES.get(name, ()))
            found[name] = new if other else {**mine, **new}
        else:
            found[name] = value
    return found


def common_of(
    files: Iterable[str], run: Mapping[str, Any], with_times: bool
) -> tuple[Any, Mapping[str, Any] | None]:
    """Return the model and the workload that all files share, if ``run`` has none.

    Args:
        with_times: whether arrivals must be equal.

    Raises:
        OptionError: files have different requests, or one cannot be read.
    """
    datas = {file: read_file(file) for file in files}
    models = {str(data.get("model")): data.get("model") for data in datas.values()}
    model = next(iter(models.values())) if len(models) == 1 else None
    common = run.get("workload")
    common = common if isinstance(common, Mapping) else {}
    if any(common.get(name) is not None for name in SOURCES):
        return model, None
    asked: dict[str, dict[str, Any]] = {}
    for file, data in datas.items():
        own = data.get("workload")
        both = joined(own if isinstance(own, Mapping) else {}, common)
        counts = [name for name in REQUESTS if with_times or name != "arrivals"]
        asked[file] = {n: _as_mapping(n, both[n]) for n in counts if both.get(n) is not None}
    if not asked:
        return model, None
    first, *others = asked
    for other in others:
        for name in REQUESTS:
            if asked[first].get(name) != asked[other].get(name):
                raise OptionError(
                    f"run.workload: {first} and {other} differ in workload.{name}, and all "
                    "candidates serve the same requests: give run.workload a trace or synthetic"
                )
    return model, {**asked[first], **common} if asked[first] else None


def _as_mapping(name: str, value: Any) -> Any:
    short = SHORT.get(f"workload.{name}")
    return {short: value} if short and isinstance(value, str) else value
