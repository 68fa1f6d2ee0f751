"""Clusters of nodes: which node each group is on, the paths between nodes, price and power."""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import Field, model_validator

from jaxinfer.config.cluster import ClusterConfig
from jaxinfer.config.costs import SimulateOptions, measured_kind
from jaxinfer.config.replicas import replicate
from jaxinfer.errors import JaxinferError
from jaxinfer.hardware.catalogue import Catalogue, Gpu, ModelShape, sum_known
from jaxinfer.hardware.network import Link
from jaxinfer.options.validation import Named, OptionError, Options, did_you_mean, read_yaml


class NodeOptions(Options):
    """A node: a machine with GPUs.

    Attributes:
        gpu: name of the GPU in ``configs/gpus.yaml`` or a section ``gpus``.
        gpus: number of GPUs.
        nic_gb_s: bandwidth of all GPUs together to other nodes, in 10^9 bytes per second in each
            direction.
        link_gb_s: bandwidth between its GPUs, in 10^9 bytes per second in each direction; by
            default the GPU's own.
        all_reduce_gb_s: bandwidth of all-reduces on this node's link, as for a GPU.
        all_reduce_s: fixed seconds of all-reduces on this node's link, as for a GPU.
        usd_per_hour: price of the whole node.
        watts: power of all its GPUs; by default the sum of their limits.
        flops_scale: fraction of the peak FLOPs that remains under a power cap.
    """

    gpu: str
    gpus: int = Field(ge=1)
    nic_gb_s: float = Field(gt=0)
    link_gb_s: float | None = Field(default=None, gt=0)
    all_reduce_gb_s: float | None = Field(default=None, gt=0)
    all_reduce_s: float | None = Field(default=None, ge=0)
    usd_per_hour: float | None = Field(default=None, ge=0)
    watts: float | None = Field(default=None, gt=0)
    flops_scale: float = Field(default=1.0, gt=0, le=1)

    def as_gpu(self, known: Catalogue) -> Gpu:
        """Return the node's GPU; numbers that the node states replace the GPU's.

        Raises:
            JaxinferError: the GPU's name is unknown.
        """
        gpu = known.gpu(self.gpu)
        own: dict[str, object] = {
            "bf16_tflops": gpu.bf16_tflops * self.flops_scale,
            "domain": None,  # A node's link joins all of its GPUs.
        }
        if self.link_gb_s is not None:
            # The collectives' rates of the GPU's own link do not apply to this one.
            own |= {"link_gb_s": self.link_gb_s, "all_reduce_gb_s": None}
        for name in ("all_reduce_gb_s", "all_reduce_s"):
            if (value := getattr(self, name)) is not None:
                own[name] = value
        return gpu.model_copy(update=own)

    def total_watts(self, known: Catalogue) -> float | None:
        """Return the watts of its GPUs together; None if unknown."""
        return self.watts or sum_known([known.gpu(self.gpu).watts] * self.gpus)


class NodeLink(Options):
    """A link between two nodes that replaces their network cards.

    Attributes:
        between: names of the two nodes.
        gb_s: bandwidth in 10^9 bytes per second in each direction.
        latency_s: seconds until the first byte; by default that of all nodes.
    """

    between: tuple[str, str] = Field(strict=False)
    gb_s: float = Field(gt=0)
    latency_s: float | None = Field(default=None, ge=0)


class Hardware(Options):
    """A hardware file.

    Attributes:
        source: source of the numbers, and assumptions.
        latency_s: seconds until the first byte between nodes.
        nodes: nodes by name; one named x with ``replicas: 3`` becomes x0, x1 and x2.
        links: links between pairs of nodes, in place of their network cards.
        gpus: GPUs that are not shipped, by name.
        models: models that are not shipped, by name.
    """

    source: str
    latency_s: float = Field(ge=0)
    nodes: Named[NodeOptions] = Field(min_length=1)
    links: tuple[NodeLink, ...] = Field(default=(), strict=False)
    gpus: Named[Gpu] = Field(default_factory=dict)
    models: Named[ModelShape] = Field(default_factory=dict)

    @model_validator(mode="before")
    @classmethod
    def _replicate(cls, data: Any) -> Any:
        if not isinstance(data, dict) or not isinstance(data.get("nodes"), dict):
            return data
        nodes, _ = replicate("nodes", data["nodes"])
        return {**data, "nodes": nodes}

    def model_post_init(self, context: Any, /) -> None:
        """Refuse links of unknown nodes, and two links between one pair of nodes."""
        pairs = set()
        for number, link in enumerate(self.links):
            where = f"links[{number}].between"
            for name in link.between:
                if name not in self.nodes:
                    raise OptionError(
                        f"{where}: no node {name!r}: {did_you_mean(name, self.nodes)}"
                    )
            pair = frozenset(link.between)
            if len(pair) == 1:
                raise OptionError(
                    f"{where}: {link.between[0]} twice; within a node it is the node's link_gb_s"
                )
            if pair in pairs:
                raise OptionError(f"{where}: {' and '.join(sorted(pair))} have a link already")
            pairs.add(pair)

    def link(self, here: str, there: str) -> NodeLink | None:
        """Return the link that the file gives for a pair of nodes, or None."""
        ends = {here, there}
        return next((link for link in self.links if set(link.between) == ends), None)


@dataclass(frozen=True)
class NetworkPath:
    """The path from one group to another.

    Attributes:
        links: links of the path, with their bytes per second.
        latency_s: seconds until the first byte lands.
    """

    links: Mapping[Link, float]
    latency_s: float

    @property
    def rate(self) -> float:
        """Bytes per second of a flow that has the path to itself."""
        return min(self.links.values())


@dataclass(frozen=True)
class Placement:
    """A run file's groups on the nodes of a hardware file.

    Attributes:
        file: path of the hardware file.
        cluster: cluster of the run file; each group has its ``kind``.
        node_of: name of each group's node.
        known: shipped GPUs and models and those of both files.
    """

    file: str
    hardware: Hardware
    cluster: ClusterConfig
    node_of: Mapping[str, str]
    known: Catalogue

    def node(self, group: str) -> NodeOptions:
        """Return the node of a group."""
        return self.hardware.nodes[self.node_of[group]]

    def gpu(self, group: str) -> Gpu:
        """Return the GPU of a group."""
        return self.node(group).as_gpu(self.known)

    def path(self, source: str, dest: str, gpu_pairs: int = 1) -> NetworkPath:
        """Return the path between groups: within a node, or between nodes by link or network cards.

        Args:
            gpu_pairs: number of pairs of GPUs that send at the same time, within a node.
        """
        here, there = self.node_of[source], self.node_of[dest]
        if here == there:
            return NetworkPath({(source, dest): gpu_pairs * self.gpu(source).link_gb_s * 1e9}, 0.0)
        if link := self.hardware.link(here, there):
            latency = self.hardware.latency_s if link.latency_s is None else link.latency_s
            return NetworkPath({("link", here, there): link.gb_s * 1e9}, latency)
        out, into = self.node(source).nic_gb_s, self.node(dest).nic_gb_s
        links: dict[Link, float] = {
            ("nic", here, "out"): out * 1e9,
            ("nic", there, "in"): into * 1e9,
        }
        return NetworkPath(links, self.hardware.latency_s)

    @property
    def used(self) -> Mapping[str, NodeOptions]:
        """Nodes that have a group."""
        names = set(self.node_of.values())
        return {name: node for name, node in self.hardware.nodes.items() if name in names}

    @property
    def usd_per_hour(self) -> float | None:
        """Dollars per hour for the used nodes; None if a price is unknown."""
        return sum_known(node.usd_per_hour for node in self.used.values())

    @property
    def watts(self) -> float | None:
        """Watts of all GPUs of the used nodes; None if the watts of a node are unknown."""
        return sum_known(node.total_watts(self.known) for node in self.used.values())

    def describe(self) -> dict[str, object]:
        """Return the used nodes and the sums of their prices and watts, as JSON values."""
        return {
            "file": self.file,
            "source": self.hardware.source,
            "nodes": {
                name: {
                    "gpu": node.gpu,
                    "gpus": node.gpus,
                    "usd_per_hour": node.usd_per_hour,
                    "watts": node.total_watts(self.known),
                }
                for name, node in self.used.items()
            },
            "usd_per_hour": self.usd_per_hour,
            "watts": self.watts,
        }


def read_hardware(file: str, known: Catalogue | None = None) -> Hardware:
    """Read a hardware file (YAML), whose path is relative to the working directory.

    Args:
        known: GPUs and models of the run file.

    Raises:
        JaxinferError: the file cannot be read, or is not valid.
    """
    try:
        data = read_yaml(Path(file))
    except JaxinferError as error:
        raise JaxinferError(f"simulate.hardware: {error}") from None
    try:
        hardware = Hardware.model_validate(data)
        together = _together(hardware, known)
        for name, node in hardware.nodes.items():
            _check_gpu(name, node, together)
        return hardware
    except JaxinferError as error:
        raise JaxinferError(f"simulate.hardware: {file}: {error}") from None


def _together(hardware: Hardware, known: Catalogue | None) -> Catalogue:
    own = Catalogue(hardware.gpus, hardware.models)
    return (known or Catalogue()).and_those_of("the run file", own)


def _check_gpu(name: str, node: NodeOptions, known: Catalogue) -> None:
    try:
        known.gpu(node.gpu)
    except JaxinferError as error:
        # The catalogue names the option of a group.
        reason = str(error).removeprefix("kind: ")
        raise JaxinferError(f"nodes.{name}.gpu: {reason}") from None


def place_groups(
    cluster: ClusterConfig, options: SimulateOptions, known: Catalogue | None = None
) -> Placement | None:
    """Place all groups on the nodes of the hardware file; return None if there is no file.

    Args:
        known: GPUs and models of the run file.

    Raises:
        JaxinferError: the file is wrong, a group has no node or is of another kind, a node has too
            few GPUs, or the run file also has links.
    """
    file = options.hardware
    if file is None:
        return None
    hardware = read_hardware(file, known)
    for name, group in cluster.groups.items():
        if group.shares:
            raise JaxinferError(
                f"groups.{name}.shares is {group.shares}: groups on nodes of {file} have GPUs of "
                "their own; leave out shares or hardware"
            )
    if cluster.links:
        raise JaxinferError(f"links: follow from the nodes of {file}; leave out links or hardware")
    node_of = {group: _node_of(group, options, hardware) for group in cluster.groups}
    groups = {}
    for name, group in cluster.groups.items():
        node = hardware.nodes[node_of[name]]
        if group.kind not in (None, node.gpu):
            raise JaxinferError(
                f"groups.{name}.kind is {group.kind}, node {node_of[name]} of {file} has "
                f"{node.gpu}; leave out kind"
            )
        if (kind := measured_kind(options.of(name))) and node.flops_scale != 1:
            raise JaxinferError(
                f"groups.{name}: {kind} are of an uncapped GPU, node {node_of[name]} of {file} "
                f"has flops_scale {node.flops_scale:g}; give flops in their place"
            )
        groups[name] = group.model_copy(update={"kind": node.gpu})
    _check_counts(file, hardware, cluster, node_of)
    placed = cluster.model_copy(update={"groups": groups})
    return Placement(file, hardware, placed, node_of, _together(hardware, known))


def _node_of(group: str, options: SimulateOptions, hardware: Hardware) -> str:
    node = options.groups[group].node if group in options.groups else None
    if node is None:
        known = ", ".join(sorted(hardware.nodes))
        raise JaxinferError(
            f"simulate.groups.{group}.node is missing, one of {options.hardware}: {known}"
        )
    if node not in hardware.nodes:
        hint = did_you_mean(node, hardware.nodes)
        if f"{node}0" in hardware.nodes:
            hint = (
                f"its replicas are {node}0, ...; of a group with replicas, {node}* has its number"
            )
        raise JaxinferError(
            f"simulate.groups.{group}.node is {node!r}, not in {options.hardware}: {hint}"
        )
    return node


def _check_counts(
    file: str, hardware: Hardware, cluster: ClusterConfig, node_of: Mapping[str, str]
) -> None:
    standing: dict[str, dict[str, int]] = defaultdict(dict)
    for name, group in cluster.groups.items():
        standing[node_of[name]][name] = group.devices
    for node, devices in standing.items():
        there = hardware.nodes[node].gpus
        for group_name, count in devices.items():
            if count > there:
                raise JaxinferError(
                    f"groups.{group_name}.devices is {count}, node {node} of {file} has {there} "
                    "GPUs; a group stands on one node: use several groups as stages"
                )
        if (needed := sum(devices.values())) > there:
            each = ", ".join(f"{name} {count}" for name, count in devices.items())
            raise JaxinferError(
                f"simulate.groups: node {node} of {file} has {there} GPUs, its groups need "
                f"{needed} ({each})"
            )
