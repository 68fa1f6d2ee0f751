"""Checks for stages whose FFN is on another group."""

from collections import Counter
from collections.abc import Mapping, Sequence

from jaxinfer.config.engine import EngineOptions
from jaxinfer.config.groups import GroupConfig
from jaxinfer.config.stages import StageConfig
from jaxinfer.errors import JaxinferError
from jaxinfer.options.validation import OptionError, did_you_mean


def check_ffn_stages(options: EngineOptions, stages: Sequence[StageConfig], segments: int) -> None:
    """Refuse options of an instance that cannot be combined with FFN groups.

    Raises:
        OptionError: an option cannot be combined; the message names it.
    """
    if not any(stage.ffn for stage in stages):
        if options.micro_batches > 1:
            raise OptionError(
                f"micro_batches is {options.micro_batches}, must be 1 without a stage with ffn"
            )
        return
    if any(stage.attention for stage in stages):
        raise OptionError(
            "stages: attention and ffn are not supported together: attention groups get KV heads "
            "from a group that has the FFN, too"
        )
    if not all(stage.ffn for stage in stages):
        raise OptionError("stages: give ffn for all of them, or for none")
    if options.layout is not None:
        raise OptionError(
            f"layout is {options.layout}, must be left out with ffn: both groups divide heads and "
            "columns"
        )
    if segments > 1:
        raise OptionError(f"segments is {segments}, must be 1 with ffn")


def check_ffn_groups(
    groups: Mapping[str, GroupConfig],
    instances: Mapping[str, Sequence[StageConfig]],
    needed: Counter[str],
) -> None:
    """Check that each FFN group computes nothing but one stage's FFN, on all of its devices.

    Args:
        instances: stages of each instance.
        needed: number of devices that stages and attention need of each group; this function adds
            the numbers of FFN groups.

    Raises:
        JaxinferError: a group computes something else, or has other devices; the message names it.
    """
    users: dict[str, str] = {}
    for name, stages in instances.items():
        for number, stage in enumerate(stages):
            if stage.ffn is None:
                continue
            place = f"instances.{name}.stages[{number}]"
            if stage.ffn not in groups:
                near = did_you_mean(stage.ffn, groups)
                raise JaxinferError(f"{place}.ffn: no group {stage.ffn!r}: {near}")
            if stage.ffn in users:
                raise JaxinferError(
                    f"{place}.ffn: group {stage.ffn} has the FFN of {users[stage.ffn]}, must be of "
                    "one stage"
                )
            if needed[stage.ffn]:
                raise JaxinferError(f"{place}.ffn: group {stage.ffn} has attention, must have none")
            users[stage.ffn] = place
            is_one = len(stages) == 1 and not groups[stage.group].is_apart
            for group in (stage.group, stage.ffn):
                _check_group(group, groups, is_one)
    for group in users:
        needed[group] = groups[group].devices
        if groups[group].stage_devices != groups[group].devices:
            raise JaxinferError(
                f"groups.{group}.tensor_parallel_size is {groups[group].tensor_parallel_size}, "
                f"must be {needed[group]}: all of its devices share each layer's FFN"
            )


def _check_group(name: str, groups: Mapping[str, GroupConfig], is_one: bool) -> None:
    """Refuse options of a group that do not go with FFN groups.

    Args:
        is_one: whether the instance is one stage, in the loop's process.
    """
    if groups[name].emulate and not is_one:
        raise JaxinferError(
            f"groups.{name}.emulate: leave it out with ffn, unless the instance has one stage, and "
            "no process of its own"
        )
    for option in ("mesh", "shares"):
        if getattr(groups[name], option) is not None:
            raise JaxinferError(f"groups.{name}.{option}: leave it out with ffn")
    if any(other.shares == name for other in groups.values()):
        raise JaxinferError(f"groups.{name}: with ffn, no other group may share its devices")
