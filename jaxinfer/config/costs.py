"""The run file's section ``simulate``: costs that do not follow from the GPUs' data sheets."""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PrivateAttr, field_validator

from jaxinfer.config.published import PublishedTables, shipped_tables
from jaxinfer.config.step_costs import CurveCosts, LinearCosts, PhaseCosts
from jaxinfer.errors import JaxinferError
from jaxinfer.options.validation import Named, OptionError, Options, shown

# Kinds of costs that replace the roofline's, and the options that then have no effect.
MEASURED = {
    "tables": ("flops", "bandwidth"),
    "linear": ("flops", "bandwidth", "step_s", "sequence_s", "skew"),
    "phases": ("flops", "bandwidth", "step_s", "sequence_s", "skew"),
    "curves": ("flops", "bandwidth", "step_s", "sequence_s", "skew"),
}


def _as_tables(value: object) -> object:
    """Check published tables separately, so that errors name them; find shipped ones by name."""
    if isinstance(value, str) and value in shipped_tables() and not Path(value).exists():
        return shipped_tables()[value]
    if value is None or isinstance(value, str | PublishedTables):
        return value
    if not isinstance(value, dict):
        raise ValueError(
            f"must be a folder, or a mapping of folder, backend, version, not {shown(value)}"
        )
    try:
        return PublishedTables.model_validate(value)
    except JaxinferError as error:
        raise ValueError(error) from None


Tables = Annotated[str | PublishedTables | None, BeforeValidator(_as_tables)]


class GroupCosts(Options):
    """Costs of one device group's steps that differ from the common ones in ``SimulateOptions``.

    Attributes:
        node: Node of the hardware file that has the group's GPUs.
    """

    flops: float | None = Field(default=None, gt=0, le=1)
    bandwidth: float | None = Field(default=None, gt=0, le=1)
    step_s: float | None = Field(default=None, ge=0)
    sequence_s: float | None = Field(default=None, ge=0)
    reserve_gb: float | None = Field(default=None, ge=0)
    tables: Tables = None
    skew: bool | None = None
    linear: LinearCosts | None = None
    phases: PhaseCosts | None = None
    curves: CurveCosts | None = None
    node: str | None = None

    @field_validator("node", mode="before")
    @classmethod
    def _one_node(cls, value: object) -> object:
        if isinstance(value, list):
            raise ValueError(f"a group stands on one node, not {value}: use several as stages")
        return value

    def model_post_init(self, context: Any, /) -> None:
        """Refuse costs of more than one kind."""
        _one_kind(self)


class SimulateOptions(Options):
    """Costs of all groups.

    Attributes:
        flops: Share of the GPU's peak FLOPs that kernels reach.
        bandwidth: Share of the GPU's memory bandwidth that kernels reach.
        step_s: Seconds that the engine adds to each step.
        sequence_s: Seconds that the engine adds for each sequence of a step.
        tables: Measured operators: a folder, published tables, or the name of shipped tables, such
            as ``h100``. They replace ``flops`` and ``bandwidth``.
        skew: Whether decodes with longer contexts than the mean of their step slow down its
            attention, as the tables' ``skew_fit.csv`` describes (default: if that file exists).
        linear: Coefficients of a linear form. They replace ``flops``, ``bandwidth``, ``step_s`` and
            ``sequence_s``.
        phases: Separate coefficients for prefill and decode. They replace the same options.
        curves: Times of whole steps from a CSV file. They replace the same options.
        reserve_gb: Memory of each GPU that is used neither for weights nor for KV, in 10^9 bytes
            (default: the size of the hidden states and logits of the largest step).
        hop_s: Seconds for which a stage is busy when it sends hidden states, in addition to the
            time of the link.
        fit: Error that the fits of Cronus' equations 2 and 3 minimise: ``relative``, as in our
            profiles, or ``absolute``, as in the paper.
        hardware: Hardware file with the nodes on which groups are placed; it defines links and
            GPUs.
        shared_experts: Instances that share the experts of each layer, like replicas of
            data-parallel attention. They step together.
        groups: Costs of single groups, which replace the common costs.
    """

    flops: float = Field(default=0.6, gt=0, le=1)
    bandwidth: float = Field(default=0.7, gt=0, le=1)
    step_s: float = Field(default=0.0, ge=0)
    sequence_s: float = Field(default=0.0, ge=0)
    hop_s: float = Field(default=0.0, ge=0)
    fit: Literal["relative", "absolute"] = "relative"
    reserve_gb: float | None = Field(default=None, ge=0)
    tables: Tables = None
    skew: bool | None = None
    linear: LinearCosts | None = None
    phases: PhaseCosts | None = None
    curves: CurveCosts | None = None
    hardware: str | None = None
    shared_experts: tuple[str, ...] = Field(default=(), strict=False)
    _where: str = PrivateAttr("")
    groups: Named[GroupCosts] = Field(default_factory=dict)

    def model_post_init(self, context: Any, /) -> None:
        """Refuse a node without a hardware file, and costs of more than one kind."""
        _one_kind(self)
        kind = measured_kind(self)
        for name, group in self.groups.items():
            if kind and not _own_kind(group):
                _refuse_unused(f"groups.{name}.", group, kind)
            if group.node is not None and self.hardware is None:
                raise OptionError(
                    f"groups.{name}.node is {group.node!r}, needs simulate.hardware, the file "
                    "that has it"
                )

    def of(self, group: str) -> "SimulateOptions":
        """Return the options of one group."""
        own = self.groups.get(group, GroupCosts())
        given = {name: value for name, value in own if value is not None and name != "node"}
        if _own_kind(own):
            # A group's own kind of costs replaces the general one.
            given |= {kind: getattr(own, kind) for kind in MEASURED}
        found = self.model_copy(update=given)
        if measured_kind(own):
            found._where = f"groups.{group}."
        return found

    @property
    def measured(self) -> str | None:
        """The kind of costs that replaces the roofline; None for the roofline."""
        return measured_kind(self)

    @property
    def where(self) -> str:
        """Name of the section that the costs come from, and a colon; empty for the roofline."""
        return f"simulate.{self._where}{self.measured}: " if self.measured else ""


def measured_kind(costs: GroupCosts | SimulateOptions) -> str | None:
    """Return the kind of costs that replaces the roofline; None for the roofline."""
    return next((kind for kind in MEASURED if getattr(costs, kind)), None)


def _own_kind(group: GroupCosts) -> bool:
    return bool(measured_kind(group) or group.flops or group.bandwidth)


def _one_kind(costs: GroupCosts | SimulateOptions) -> None:
    """Refuse options that another kind of costs makes useless."""
    given = [kind for kind in MEASURED if getattr(costs, kind)]
    if len(given) > 1:
        raise JaxinferError(f"both {given[0]} and {given[1]}: give one of them")
    if given:
        _refuse_unused("", costs, given[0])


def _refuse_unused(where: str, costs: GroupCosts | SimulateOptions, kind: str) -> None:
    for name in MEASURED[kind]:
        if name in costs.model_fields_set and getattr(costs, name) is not None:
            raise OptionError(f"{where}{name} has no effect with {kind}: give one of them")
