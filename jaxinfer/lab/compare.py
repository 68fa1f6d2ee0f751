"""Runs or simulates several systems on one workload, for ``jaxinfer compare``."""

import gc
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from jaxinfer.config.run_file import RunFile, load_run_file, read_run_file
from jaxinfer.config.workload import Workload
from jaxinfer.errors import JaxinferError
from jaxinfer.files.shipped import data_path
from jaxinfer.options.validation import did_you_mean
from jaxinfer.report.records import RunRecord, read_run
from jaxinfer.simulate.run import simulate
from jaxinfer.workload.lengths import BenchRequest


def _refuse_missing(paths: Sequence[Path]) -> None:
    first = data_path(paths[0])
    for path in paths:
        if not data_path(path).exists() and first.exists():
            there = did_you_mean(path.stem, (file.stem for file in first.parent.glob("*.yaml")))
            raise JaxinferError(f"--systems {path.stem}: there is no run file {path}, {there}")


def load_systems(
    run_files: Sequence[str], systems: Sequence[str], settings: Sequence[str] = ()
) -> dict[str, RunFile]:
    """Load the run files to compare, by file name; all of them get the workload of the first one.

    If ``settings`` replace a file's system, the new system's name is used instead.

    Args:
        systems: names of more run files in the first one's folder. The first one stays first, or is
            placed where its own name occurs in the list.
        settings: as in ``load_run_file``, applied to each.

    Raises:
        JaxinferError: a file cannot be read, or two have one name.
    """
    first = Path(run_files[0])
    paths = [Path(path) for path in run_files]
    if systems and len(run_files) > 1:
        raise JaxinferError(
            f"--systems names files in the folder of {run_files[0]}: give only this run file"
        )
    if systems:
        names = systems if first.stem in systems else [first.stem, *systems]
        paths = [first if name == first.stem else first.with_name(f"{name}.yaml") for name in names]
        _refuse_missing(paths)
    loaded = {path.stem: _load(path, paths, settings) for path in paths}
    if len(loaded) < len(paths):
        raise JaxinferError(f"two of {', '.join(map(str, paths))} have one name")
    configs = _all_serving(loaded, loaded[first.stem].workload)
    if not any(re.match(r"system(\.name)?=", setting) for setting in settings):
        return configs
    names = [_label(path, configs[path.stem]) for path in paths]
    if len(set(names)) < len(names):  # The new system on several files' clusters.
        names = [
            path.stem if name == path.stem else f"{name}_{path.stem}"
            for name, path in zip(names, paths, strict=True)
        ]
    return dict(zip(names, configs.values(), strict=True))


def _load(path: Path, paths: Sequence[Path], settings: Sequence[str]) -> RunFile:
    """Load one of the run files; if it cannot be, say which setting is for another file's part."""
    try:
        return load_run_file(path, settings)
    except JaxinferError as error:
        for setting in settings:
            _refuse_lacking(path, paths, setting, str(error))
        raise


def _refuse_lacking(path: Path, paths: Sequence[Path], setting: str, error: str) -> None:
    """Refuse a setting of a group or instance that the file lacks, and another file has."""
    found = re.match(r"(groups|instances)\.([^.=]+)\.", setting)
    if not found or found[0].rstrip(".") not in error:
        return
    section, name = found.groups()
    names = {each: list(read_run_file(each).get(section) or ()) for each in paths}
    if name not in names[path] and any(name in there for there in names.values()):
        raise JaxinferError(
            f"--set {setting}: {path} has no {section[:-1]} {name!r}: "
            f"{did_you_mean(name, names[path])}"
        )


def _label(path: Path, config: RunFile) -> str:
    """Return the file's name, or the system's if it was replaced."""
    system = str(config.system["name"])
    own = read_run_file(path).get("system", "single")
    own = own.get("name") if isinstance(own, dict) else own
    return path.stem if own == system else system.rpartition(":")[2]


def _all_serving(
    configs: Mapping[str, RunFile], workload: Workload | None = None
) -> dict[str, RunFile]:
    """Return systems with one workload for all, by default the first one's."""
    each = workload or next((config.workload for config in configs.values()), Workload())
    return {name: _serving(config, each) for name, config in configs.items()}


def _serving(config: RunFile, workload: Workload) -> RunFile:
    """Return the run file with another's requests, but its own ``max_tokens`` and ``predictor``."""
    own = {name: getattr(config.workload, name) for name in ("max_tokens", "predictor")}
    changed = {name: value for name, value in own.items() if value != getattr(workload, name)}
    return config.model_copy(update={"workload": workload.model_copy(update=changed)})


def compare_systems(
    configs: Mapping[str, RunFile],
    work: Sequence[BenchRequest],
    folder: str | Path,
    rounds: int = 1,
    progress: bool = True,
    one_by_one: bool = False,
) -> dict[str, list[RunRecord]]:
    """Run each system on the same requests, in turn.

    Args:
        configs: run files by name of the system; ``work`` is the first one's workload.
        folder: gets ``runs/NAME/N`` with each run's files.
        one_by_one: run all rounds of a system before the next one is loaded, so that only one is in
            memory. Otherwise all are loaded at once, and rounds interleave.

    Returns:
        Each system's runs, in the order of the rounds.

    Raises:
        JaxinferError: a system cannot be loaded, or a request cannot be run.
    """
    # A comparison of modelled clusters does not need JAX.
    from jaxinfer.lab.measure import measure
    from jaxinfer.llm import LLM
    from jaxinfer.runtime.stage.devices import count_cpu_devices

    configs = _all_serving(configs)
    count_cpu_devices(config.cluster() for config in configs.values())
    runs: dict[str, list[RunRecord]] = {name: [] for name in configs}
    together = [{name: config} for name, config in configs.items()] if one_by_one else [configs]
    for part in together:
        loaded = LLM.load_all(part, progress=progress)
        for number in range(1, rounds + 1):
            for name in part:
                run_dir = Path(folder) / "runs" / name
                measure(loaded[name], work, name, str(run_dir))
                runs[name].append(read_run(run_dir / str(number), name))
        del loaded
        gc.collect()  # The memory that a system had on the devices is free only now.
    return runs


def simulate_systems(
    configs: Mapping[str, RunFile], work: Sequence[BenchRequest], folder: str | Path
) -> dict[str, list[RunRecord]]:
    """Simulate each system once on the same requests.

    Args:
        configs: see ``compare_systems``; their groups name GPUs.
        folder: gets ``runs/NAME/1`` with each run's files.

    Raises:
        JaxinferError: a run file does not describe a valid cluster, or a request cannot be run.
    """
    runs = {}
    for name, config in _all_serving(configs).items():
        run_dir = Path(folder) / "runs" / name
        simulate(config, work, run_dir)
        runs[name] = [read_run(run_dir / "1", name)]
    return runs
