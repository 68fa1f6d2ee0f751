"""The run file's cluster: device groups, their instances, and the links between groups."""

from collections import Counter
from collections.abc import Mapping
from itertools import groupby
from typing import Any, Literal

from pydantic import Field, field_validator

from jaxinfer.config.engine import EngineOptions
from jaxinfer.config.ffn import check_ffn_groups, check_ffn_stages
from jaxinfer.config.groups import GroupConfig, check_shared
from jaxinfer.config.stages import StageConfig
from jaxinfer.errors import JaxinferError
from jaxinfer.options.validation import Named, OptionError, Options, did_you_mean
from jaxinfer.serving.instance_options import InstanceOptions

# The transport of KV between processes; see ``RunFile``.
TransportChoice = Literal["auto", "host", "transfer_server"]


class InstanceConfig(EngineOptions):
    """An instance: the engine's options, and its place in the cluster.

    Attributes:
        group: Group that holds the instance, if it has a single stage.
        stages: Pipeline stages, in order; sampled tokens then pass through the host, and
            ``launch_ahead`` is off.
        role: A word that the system reads and may change (``SetRole``). Figures state the seconds
            that the instance spent in each role.
        segments: Number of parts in which a stage's layers are compiled, for ``per_segment``. The
            KV of a part is sent as soon as the part is computed.
        computes: With ``false``, the instance has no weights and only stores pages for the
            instances that name it as ``eviction.tier``.
    """

    segments: int = Field(default=1, ge=1)
    computes: bool = True
    role: str = ""
    group: str | None = None
    stages: tuple[StageConfig, ...] = Field(default=(), strict=False)

    def model_post_init(self, context: Any, /) -> None:
        """Refuse combinations that cannot work."""
        super().model_post_init(context)
        if bool(self.group) == bool(self.stages):
            raise JaxinferError("needs either group or stages")
        kinds = {(stage.layers is None, stage.share is None) for stage in self.stages}
        if len(kinds) > 1 or (False, False) in kinds:
            raise OptionError("stages: give layers for all of them, or shares, or nothing")
        if "tensor_parallel_size" in self.model_fields_set:
            raise OptionError("tensor_parallel_size: an option of the group, not the instance")
        if len(self.stages) > 1 and self.launch_ahead and "launch_ahead" in self.model_fields_set:
            raise OptionError(
                "launch_ahead is True, must be false with several stages: tokens go to the host"
            )
        if self.is_spread:
            self._check_spread()
        elif self.half_batches != "never":
            raise OptionError(
                f"half_batches is {self.half_batches}, must be never without attention groups"
            )
        if not self.computes and not self.enable_prefix_caching:
            raise OptionError("computes: enable_prefix_caching is false, it must keep pages")
        if not self.computes and self.segments > 1:
            raise OptionError(f"segments is {self.segments}, must be 1 with computes: false")
        if not self.computes and self.ffn_groups:
            raise OptionError("computes is False, must be True with ffn: it would only keep pages")
        check_ffn_stages(self, self.stages, self.segments)

    def _check_spread(self) -> None:
        """Refuse options that require all KV heads of a stage to lie together."""
        if self.enable_prefix_caching:
            raise OptionError(
                "enable_prefix_caching is True, must be false with attention groups: each request "
                "has its KV heads elsewhere"
            )
        if self.segments > 1:
            raise OptionError(
                f"segments is {self.segments}, must be 1 with attention groups: no KV is handed off"
            )
        for number, stage in enumerate(self.stages):
            own = Counter([stage.group, *stage.attention_groups])
            for group, count in own.items():
                if count > 1:
                    raise OptionError(f"stages[{number}]: {group} stands {count} times in it")

    @property
    def is_spread(self) -> bool:
        """True if KV heads may be on groups other than the stages' own."""
        return any(stage.attention for stage in self.stages)

    @property
    def attention_groups(self) -> list[str]:
        """The attention groups of all stages, each once."""
        return [*dict.fromkeys(group for place in self.places for group in place.attention_groups)]

    @property
    def lenders(self) -> list[str]:
        """The groups that compute attention or FFN for its stages, each listed once."""
        return [*dict.fromkeys(group for place in self.places for group in place.lenders)]

    @property
    def ffn_groups(self) -> list[str]:
        """The groups that have the FFN of its stages."""
        return [place.ffn for place in self.places if place.ffn]

    @property
    def num_stages(self) -> int:
        """Number of pipeline stages."""
        return len(self.places)

    @property
    def places(self) -> tuple[StageConfig, ...]:
        """The instance's stages; a single one if only a group is given."""
        return self.stages or (StageConfig(group=self.group or ""),)


class LinkConfig(Options):
    """A link between two groups. Between CPU groups it is emulated, by holding data back.

    Attributes:
        between: Names of two groups.
        gb_s: Bandwidth in each direction, in 10^9 bytes per second, shared by transfers.
        latency_s: Seconds from the start of a transfer to its first byte.
    """

    between: tuple[str, str]
    gb_s: float = Field(gt=0)
    latency_s: float = Field(default=0.0, ge=0)

    @field_validator("between", mode="before")
    @classmethod
    def _as_tuple(cls, value: object) -> object:
        if not isinstance(value, list | tuple) or len(value) != 2:
            raise ValueError(f"must be the names of two groups, not {value!r}")
        return tuple(value)

    def seconds(self, num_bytes: int) -> float:
        """Return the seconds from the start of a transfer to its last byte."""
        return self.latency_s + num_bytes / (self.gb_s * 1e9)


class ClusterConfig(Options):
    """Groups, instances and links that fit together.

    Attributes:
        ray: Address of the Ray cluster that finds hosts for groups; None if no group asks for it.
        lent: For each attention or FFN group in another process, its number of devices; set only
            in the part of a cluster that one process has.
    """

    groups: Named[GroupConfig]
    instances: Named[InstanceConfig]
    links: tuple[LinkConfig, ...] = Field(default=(), strict=False)
    ray: str | None = None
    lent: Mapping[str, int] = Field(default_factory=dict)

    def model_post_init(self, context: Any, /) -> None:
        """Refuse unknown names and too few devices."""
        check_shared(self.groups)
        needed: Counter[str] = Counter()
        for name, instance in self.instances.items():
            for number, stage in enumerate(instance.places):
                place = f"stages[{number}].group" if instance.stages else "group"
                self._check_group(f"instances.{name}.{place}", stage.group)
                needed[stage.group] += self.groups[stage.group].stage_devices
        self._check_attention(needed)
        stages = {name: instance.places for name, instance in self.instances.items()}
        check_ffn_groups(self.groups, stages, needed)
        for name, group in self.groups.items():
            if needed[name] > group.devices:
                raise JaxinferError(
                    f"groups.{name}.devices is {group.devices}, its instances need {needed[name]}"
                )
            if not needed[name]:
                raise JaxinferError(f"groups.{name}: no instance stands on it")
        self._check_processes()
        self._check_weights()
        self._check_tiers()
        pairs = Counter(frozenset(link.between) for link in self.links)
        for pair, count in pairs.items():
            if count > 1:
                raise JaxinferError(f"links: {count} between {' and '.join(sorted(pair))}")
        for number, link in enumerate(self.links):
            for group_name in link.between:
                self._check_group(f"links[{number}].between", group_name)

    def _check_attention(self, needed: Counter[str]) -> None:
        """Check attention groups: each serves one instance and has no stages of its own."""
        users: dict[str, str] = {}
        for name, instance in self.instances.items():
            for number, stage in enumerate(instance.places):
                where = f"instances.{name}.stages[{number}].attention"
                for group in stage.attention_groups:
                    self._check_group(where, group)
                    if group in needed:
                        raise JaxinferError(f"{where}: a stage stands on group {group}")
                    if users.setdefault(group, name) != name:
                        raise JaxinferError(
                            f"{where}: group {group} is there for {users[group]}, "
                            "must be of one instance"
                        )
        for name in users:
            needed[name] = self.groups[name].devices
            for option in ("tensor_parallel_size", "mesh"):
                if getattr(self.groups[name], option) is not None:
                    raise JaxinferError(
                        f"groups.{name}.{option}: leave it out, each device of an attention group "
                        "has KV heads of its own"
                    )

    @property
    def load_format(self) -> str:
        """The ``load_format`` of all instances: see ``EngineOptions``.

        It is ``dummy`` in a process with only attention or FFN groups, which has no instance.
        """
        return next((i.load_format for i in self.instances.values()), "dummy")

    def _check_processes(self) -> None:
        """Refuse instances in several processes, unless all their groups have processes of their
        own.
        """
        for name, instance in self.instances.items():
            groups = {g for place in instance.places for g in (place.group, *place.lenders)}
            homes = {group for group in groups if self.groups[group].is_apart}
            if len(groups) < 2 or not homes:
                continue
            where, home = f"instances.{name}.stages", min(homes)
            if homes != groups:
                raise JaxinferError(
                    f"{where}: group {home} has a process of its own, must {min(groups - homes)} "
                    "have, too: all parts stand in one process, or all groups have their own"
                )
            runs = [group for group, _ in groupby(stage.group for stage in instance.stages)]
            if len(runs) > len(set(runs)):
                raise JaxinferError(
                    f"{where}: those on one group must follow one another, since each group has a "
                    "process of its own"
                )
            stages = {*runs}
            # Attention groups may return alone if one process has all the stages.
            alone = {*instance.attention_groups} if len(stages) == 1 else set()
            times = {group: self.groups[group].restart for group in sorted(homes - alone)}
            most = max(times, key=times.__getitem__)
            for group, restart in times.items():
                if restart != times[most]:
                    raise JaxinferError(
                        f"groups.{group}.restart is {restart}, must be {times[most]} as that of "
                        f"{most}: instances.{name} stands on both, which are started again together"
                    )

    def _check_weights(self) -> None:
        """Refuse instances with different weights: their KV would be incompatible."""
        formats = {instance.load_format for instance in self.instances.values()}
        if len(formats) > 1:
            raise JaxinferError("load_format is auto and dummy, must be the same of all instances")

    def _check_tiers(self) -> None:
        """Refuse tiers that compute, and instances that neither compute nor keep pages."""
        for name, tier in self.tiers.items():
            where = f"instances.{name}.eviction.tier"
            if tier not in self.instances:
                raise JaxinferError(
                    f"{where}: no instance {tier!r}: {did_you_mean(tier, self.instances)}"
                )
            if not self.instances[name].computes:
                raise JaxinferError(f"{where} is {tier}, must be null: a tier has none of its own")
            if self.instances[tier].computes:
                raise JaxinferError(f"{where} is {tier}, which must have computes: false")
        for name in self.instances.keys() - self.computing.keys() - {*self.tiers.values()}:
            raise JaxinferError(
                f"instances.{name}.computes is false, must be true unless another instance's "
                f"eviction.tier is {name}"
            )

    @property
    def tiers(self) -> dict[str, str]:
        """The tier of each instance that has one."""
        found = {name: each.eviction.tier for name, each in self.instances.items()}
        return {name: tier for name, tier in found.items() if tier is not None}

    @property
    def computing(self) -> dict[str, InstanceConfig]:
        """The instances that compute, which are those that a system sees."""
        return {name: each for name, each in self.instances.items() if each.computes}

    def _check_group(self, where: str, name: str) -> None:
        if name not in self.groups:
            raise JaxinferError(f"{where}: no group {name!r}: {did_you_mean(name, self.groups)}")

    def home(self, group: str) -> str:
        """Return the group that owns the devices: this one, or the one whose devices it shares."""
        return self.groups[group].shares or group

    def link(self, source: str, dest: str) -> LinkConfig | None:
        """Return the emulated link between two groups, or None."""
        ends = {source, dest}
        return next((link for link in self.links if set(link.between) == ends), None)

    @property
    def emulated(self) -> list[str]:
        """Descriptions of all emulated groups and links."""
        groups = [
            f"group {name}"
            + (f" {group.slowdown:g} times slower" if group.emulate else "")
            + (f" on {group.shares}'s devices" if group.shares else "")
            for name, group in self.groups.items()
            if group.emulate or group.shares
        ]
        return groups + [
            f"link {' - '.join(link.between)} of {link.gb_s:g} GB/s, {link.latency_s:g} s"
            for link in self.links
        ]


def instance_options(options: EngineOptions, num_stages: int) -> InstanceOptions:
    """Return the scheduling options of an engine with this number of pipeline stages."""
    ahead = options.launch_ahead and num_stages == 1
    return InstanceOptions(
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=options.max_num_batched_tokens,
        max_in_flight=options.max_in_flight or (2 if ahead else num_stages),
        launch_ahead=ahead,
        chunks_in_flight=options.chunks_in_flight,
        max_transfers_in_flight=options.max_transfers_in_flight,
        watermark=options.watermark,
        late_tokens=options.late_tokens,
        empty_waits=options.empty_waits,
        computes=not isinstance(options, InstanceConfig) or options.computes,
        tier=options.eviction.tier,
        tier_takes=options.eviction.tier_takes,
        micro_batches=options.micro_batches,
    )


def one_engine(options: EngineOptions) -> ClusterConfig:
    """Return the cluster of a run file without ``instances``: one engine on the first devices."""
    given: Mapping[str, Any] = {
        name: getattr(options, name)
        for name in options.model_fields_set
        if name != "tensor_parallel_size"
    }
    return ClusterConfig(
        groups={"engine": GroupConfig(devices=options.tensor_parallel_size)},
        instances={"engine": InstanceConfig(group="engine", **given)},
    )
