"""Run files: everything that a user may set, checked before anything is loaded."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import Field, model_validator

from jaxinfer.config.cluster import (
    ClusterConfig,
    InstanceConfig,
    LinkConfig,
    TransportChoice,
    one_engine,
)
from jaxinfer.config.costs import SimulateOptions
from jaxinfer.config.engine import EngineOptions
from jaxinfer.config.groups import GroupConfig
from jaxinfer.config.replicas import replicate_cluster
from jaxinfer.config.workload import Workload
from jaxinfer.errors import JaxinferError
from jaxinfer.hardware.catalogue import Catalogue, Gpu, ModelShape
from jaxinfer.options.validation import (
    ByName,
    Named,
    OptionError,
    Options,
    did_you_mean,
    parse_yaml,
    read_yaml,
    shown,
)
from jaxinfer.systems.registry import make_system
from jaxinfer.workload.lengths import BenchRequest

# Groups of options that a single value may replace, and the option that it then sets.
SHORT = {"system": "name", "workload.arrivals": "kind", "workload.synthetic": "lengths"}


class MetricOptions(Options):
    """Options that decide what figures mean.

    Attributes:
        ttft_counts_transfer: Whether the first token of a request that is then handed over counts
            only once the KV has arrived; by default, the system decides (true for
            ``disaggregated``).
    """

    ttft_counts_transfer: bool | None = None


class RunFile(Options):
    """A YAML file that says what to run.

    Attributes:
        model: Model to serve: a name, a file, a folder or a hub id.
        engine: Options that all instances share.
        groups, instances, links: Parts of the cluster; you choose their names. See
            ``ClusterConfig``; groups and instances may have ``replicas`` (see ``replicas.py``).
        system: Name of the serving system, with its options, or ``my_module:MySystem``; by default
            ``single``.
        workload: Requests, and when they arrive.
        watchdog_s: Seconds after which an instance that has work but does not answer is declared
            lost.
        verify_transfers: Compare checksums of all KV that is handed over. A difference ends the run
            and names the request, layer and page; needs ``kv_cache_dtype: auto``.
        transport: How KV is sent between processes: through ``host`` memory or with JAX's
            ``transfer_server``; ``auto`` uses the faster of the two between GPUs, and host memory
            otherwise.
        ray: Address of a Ray cluster's head node, ``HOST:PORT``; by default, the cluster that this
            host belongs to.
        ledger: Record all scheduling decisions in a ledger, which a replay can check
            (docs/proof.md).
        metrics: ``{ttft_counts_transfer: true}`` counts a first token only once its KV has arrived
            at the next instance.
        simulate: Step times and other costs of a modelled cluster.
        gpus, models: Definitions, by name, of further GPUs and models for simulations.
    """

    model: str | None = None
    engine: EngineOptions = EngineOptions()
    groups: Named[GroupConfig] = Field(default_factory=dict)
    instances: Named[InstanceConfig] = Field(default_factory=dict)
    links: tuple[LinkConfig, ...] = Field(default=(), strict=False)
    system: ByName = Field(default_factory=lambda: {"name": "single"})
    verify_transfers: bool = False
    ray: str | None = None
    transport: TransportChoice = "auto"
    watchdog_s: float = Field(default=600, gt=0)
    workload: Workload = Workload()
    simulate: SimulateOptions = SimulateOptions()
    ledger: bool = False
    metrics: MetricOptions = MetricOptions()
    gpus: Named[Gpu] = Field(default_factory=dict)
    models: Named[ModelShape] = Field(default_factory=dict)

    @model_validator(mode="before")
    @classmethod
    def _replicate(cls, data: Any) -> Any:
        """Replace entries by their replicas."""
        return replicate_cluster(data) if isinstance(data, dict) else data

    @model_validator(mode="before")
    @classmethod
    def _share_engine(cls, data: Any) -> Any:
        """Give instances the engine's options, except those that they set themselves."""
        if not isinstance(data, dict) or not isinstance(data.get("instances"), dict):
            return data
        common = _given(data.get("engine", {}))
        if not isinstance(common, dict):
            return data
        own = {name: _given(instance) for name, instance in data["instances"].items()}
        return data | {
            "instances": {
                name: {**common, **value} if isinstance(value, dict) else value
                for name, value in own.items()
            }
        }

    def model_post_init(self, context: Any, /) -> None:
        """Refuse names of GPUs and models that are shipped."""
        Catalogue(self.gpus, self.models)

    @property
    def own(self) -> Catalogue:
        """The GPUs and models that the file defines in addition to the shipped ones."""
        return Catalogue(self.gpus, self.models)

    def require_model(self) -> str:
        """Return the model.

        Raises:
            JaxinferError: the file names none.
        """
        if self.model is None:
            raise JaxinferError(
                "model is missing: name one in the run file, or by --model or --set model=NAME "
                "where a command has these"
            )
        return self.model

    def with_workload(self, **options: object) -> "RunFile":
        """Return a copy of the run file in which these options of the workload are replaced."""
        return self.model_copy(update={"workload": self.workload.model_copy(update=options)})

    def requests(
        self, note: Callable[[str], None] = lambda text: None, searched: bool = False
    ) -> list[BenchRequest]:
        """Return the requests for the file's model; see ``Workload.requests``."""
        return self.workload.requests(self.model, note, searched)

    def cluster(self) -> ClusterConfig:
        """Return groups, instances and links.

        Raises:
            JaxinferError: they do not fit together.
        """
        cluster = self._cluster()
        for group in self.simulate.groups:
            if group not in cluster.groups:
                known = did_you_mean(group, cluster.groups)
                raise JaxinferError(f"simulate.groups.{group}: no such group: {known}")
        return cluster

    def _cluster(self) -> ClusterConfig:
        by_ray = any(group.ray for group in self.groups.values())
        if self.ray and not by_ray:
            raise OptionError(
                f"ray is {self.ray}: no group asks for it, as groups.x.ray: {{}} does"
            )
        if not self.instances:
            if self.groups or self.links:
                raise JaxinferError("groups and links need instances that stand on them")
            return one_engine(self.engine)
        for name, instance in self.instances.items():
            if instance.seed != self.engine.seed:
                raise JaxinferError(
                    f"instances.{name}.seed is {instance.seed}, must be engine.seed's "
                    f"{self.engine.seed}: tokens, and random weights, are the same on each instance"
                )
            if instance.generation_config != self.engine.generation_config:
                raise JaxinferError(
                    f"instances.{name}.generation_config is {instance.generation_config}, must be "
                    f"engine.generation_config's {self.engine.generation_config}: it is of requests"
                )
            if self.verify_transfers and instance.kv_cache_dtype != "auto":
                raise JaxinferError(
                    f"instances.{name}.kv_cache_dtype is {instance.kv_cache_dtype}, must be auto: "
                    "verify_transfers compares bits, which entries of 8 bits do not keep"
                )
        return ClusterConfig(
            groups=self.groups,
            instances=self.instances,
            links=self.links,
            ray=self.ray or "auto" if by_ray else None,
        )


def load_run_file(path: str | Path | None, settings: Sequence[str] = ()) -> RunFile:
    """Read a run file, or begin with an empty one, and apply settings such as ``engine.seed=1``.

    Raises:
        JaxinferError: the file or a setting is wrong.
    """
    data = read_run_file(Path(path)) if path else {}
    for setting in settings:
        apply_setting(data, setting)
    try:
        config = as_run_file(data)
        make_system(config.system, config.cluster().computing)
        return config
    except JaxinferError as error:
        raise JaxinferError(f"{path}: {error}" if path else str(error)) from None


def as_run_file(data: Mapping[str, Any]) -> RunFile:
    """Make a run file from the contents of a YAML or JSON file."""
    return RunFile.model_validate(data)


def _given(options: object) -> Any:
    """Return the options that were set, as a mapping; return anything else unchanged."""
    if not isinstance(options, Options):
        return options
    return {name: getattr(options, name) for name in options.model_fields_set}


def read_run_file(path: Path) -> dict[str, Any]:
    """Read the contents of a run file without checking its options.

    Raises:
        JaxinferError: the file cannot be read, or is not a mapping.
    """
    try:
        data = read_yaml(path)
    except JaxinferError as error:
        raise JaxinferError(f"run file {error}") from None
    if not isinstance(data, dict):
        raise JaxinferError(f"run file {path}: must be a mapping of model, engine, workload")
    return data


def apply_setting(data: dict[str, Any], setting: str) -> None:
    """Add a setting such as ``engine.seed=1`` to a file's contents.

    Raises:
        JaxinferError: the setting is malformed, or leads through a value without options.
    """
    key, equals, value = setting.partition("=")
    if not equals and "[" not in key:
        raise JaxinferError(f"--set {setting!r}: must look like engine.max_num_seqs=16")
    try:
        parsed = parse_yaml(value)
    except JaxinferError as error:
        raise JaxinferError(f"--set {shown(setting)}: {error}") from None
    try:
        put_option(data, key, parsed)
    except JaxinferError as error:
        raise JaxinferError(f"--set {setting!r}: {error}") from None


def put_option(data: dict[str, Any], key: str, value: Any) -> None:
    """Store a value at a dotted key, such as ``engine.seed`` or ``axes.engine.seed``.

    Raises:
        JaxinferError: the key is malformed, or leads through a value without options.
    """
    *path, last = key.split(".")
    if "axes" in path:  # Names in plan and sweep files are dotted keys.
        until = path.index("axes") + 1
        path, last = path[:until], ".".join([*path[until:], last])
    if "[" in key:
        name = key.partition("[")[0]
        raise JaxinferError(f"a list is set as a whole: {name}=[...]")
    if not all([*path, last]):
        raise JaxinferError("must look like engine.max_num_seqs=16")
    at = data
    for depth, name in enumerate(path, 1):
        where = ".".join(path[:depth])
        inner = at.setdefault(name, {})
        short = SHORT.get(where)
        if short and isinstance(inner, str):
            inner = {short: inner}
        if not isinstance(inner, dict):
            raise JaxinferError(f"{where} is {shown(inner)}, has no options")
        # Copied, because an alias in YAML is one mapping in several places.
        at[name] = dict(inner)
        at = at[name]
    at[last] = value
