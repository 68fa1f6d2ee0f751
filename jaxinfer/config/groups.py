"""The run file's groups: equal devices, and the process that has them."""

import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from jaxinfer.errors import JaxinferError
from jaxinfer.options.validation import OptionError, Options, did_you_mean, split_address


class Emulate(Options):
    """Emulation of slower devices on the group's own.

    Attributes:
        slowdown: Factor by which a step takes longer than in its profile.
    """

    slowdown: float = Field(ge=1)


class RayDemands(Options):
    """Resources that Ray must find on a node, and reserves for a process there.

    Attributes:
        num_cpus: CPUs that a node must have free.
        num_gpus: GPUs that a node must have free; by default the group's devices if they are GPUs.
        resources: Other resources of a node, such as ``accelerator_type:A10``.
    """

    num_cpus: float = Field(default=1, ge=0)
    num_gpus: float | None = Field(default=None, ge=0)
    resources: dict[str, float] = Field(default_factory=dict)


class GroupConfig(Options):
    """Equal devices. Each stage on the group takes the next ``tensor_parallel_size`` of them.

    Attributes:
        platform: Kind of devices; by default, JAX's choice on this machine.
        kind: Part of the devices' name, such as ``H100``; in a simulation, a name in
            ``configs/gpus.yaml``.
        devices: Number of devices.
        tensor_parallel_size: Devices of one stage; by default all.
        mesh: Mesh axes of a stage's devices, outermost first, such as ``{x: 2, y: 4}``; by default
            one axis, ``tp``.
        emulate: ``{slowdown: N}`` makes the group behave like slower devices: each step takes N
            times its profiled time. Steps that take longer are counted as ``overruns``.
        shares: Group whose first ``devices`` devices this group also uses, instead of having its
            own.
        process: ``own`` gives the group its own process; JAX can use only one kind of GPU per
            process.
        host: ``HOST:PORT`` of the ``jaxinfer worker`` that starts the process.
        ray: Resources by which Ray chooses a host: ``num_cpus`` (default 1), ``num_gpus`` and
            ``resources``, or ``{}``.
        environment: Environment variables of the group's process, set before JAX starts.
        restart: How many times a lost process is restarted.
    """

    platform: Literal["cpu", "gpu"] | None = None
    kind: str | None = None
    devices: int = Field(default=1, ge=1)
    tensor_parallel_size: int | None = Field(default=None, ge=1)
    mesh: dict[str, Annotated[int, Field(ge=1)]] | None = None
    emulate: Emulate | None = None
    shares: str | None = None
    process: Literal["own"] | None = None
    host: str | None = None
    ray: RayDemands | None = None
    environment: dict[str, str] = Field(default_factory=dict)
    restart: int = Field(default=0, ge=0)

    def model_post_init(self, context: Any, /) -> None:
        """Refuse combinations that cannot work."""
        if sum(each is not None for each in (self.process, self.host, self.ray)) > 1:
            raise OptionError("process, host, ray: a group has one of them, which says where it is")
        if self.environment and not self.is_apart:
            raise OptionError("environment: for a group with process: own, host or ray")
        if self.restart and not self.is_apart:
            raise OptionError(
                f"restart is {self.restart}, must be 0 without process: own, host or ray: what "
                "fails in the loop's process is not started again"
            )
        if self.shares:
            self._check_sharing()
        if self.stage_devices > self.devices:
            raise OptionError(
                f"tensor_parallel_size is {self.tensor_parallel_size}, "
                f"the group has {self.devices} devices"
            )
        if self.mesh is not None and math.prod(self.mesh.values()) != self.stage_devices:
            raise OptionError(
                f"mesh is {self.mesh}, {math.prod(self.mesh.values())} devices, must be of the "
                f"{self.stage_devices} of a stage"
            )

    def _check_sharing(self) -> None:
        """Refuse options that the group whose devices are shared must set."""
        if self.is_apart:
            raise OptionError(
                f"shares is {self.shares}: groups that share devices are in the loop's process: "
                "leave out process, host and ray"
            )
        for name in ("platform", "kind"):
            if getattr(self, name) is not None:
                raise OptionError(f"{name}: leave it out, the devices are those of {self.shares}")

    @field_validator("host")
    @classmethod
    def _as_address(cls, value: str | None) -> str | None:
        try:
            if value is not None and split_address(value)[1] == 0:
                raise JaxinferError(f"must be a port that a worker listens at, not {value}")
        except JaxinferError as error:
            raise ValueError(error) from None
        return value

    @property
    def is_apart(self) -> bool:
        """True if the group has its own process, on any host."""
        return bool(self.process or self.host or self.ray)

    @property
    def slowdown(self) -> float:
        """Slowdown of the emulated devices; 1 without emulation."""
        return self.emulate.slowdown if self.emulate else 1.0

    @property
    def stage_devices(self) -> int:
        """Number of devices of one stage."""
        return self.tensor_parallel_size or self.devices


def check_shared(groups: Mapping[str, GroupConfig]) -> None:
    """Check that groups share only devices that are another group's own.

    Raises:
        JaxinferError: a group shares unknown or borrowed devices; the message names the group.
    """
    for name, group in groups.items():
        if not group.shares:
            continue
        where, lender = f"groups.{name}.shares", groups.get(group.shares)
        if lender is None:
            near = did_you_mean(group.shares, groups)
            raise JaxinferError(f"{where}: no group {group.shares!r}: {near}")
        if group.shares == name or lender.shares:
            raise JaxinferError(
                f"{where} is {group.shares}, which has no devices of its own: name a group that has"
            )
        if lender.is_apart:
            raise JaxinferError(
                f"{where} is {group.shares}, which has a process of its own: groups that share "
                "devices are in the loop's process"
            )
        if group.devices > lender.devices:
            raise JaxinferError(
                f"groups.{name}.devices is {group.devices}, {group.shares} has {lender.devices}"
            )
