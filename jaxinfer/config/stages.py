"""The run file's pipeline stages, and the groups that have their KV heads or their FFN."""

from pydantic import Field, field_validator

from jaxinfer.errors import JaxinferError
from jaxinfer.options.validation import Options


class AttentionConfig(Options):
    """A group, other than a stage's own, that stores KV heads and computes their attention.

    Attributes:
        group: Name of the group.
        num_pages: Pages of its pools for this stage, counted as if all the stage's KV heads lay in
            them. By default as many as the stage's own group has. In a simulation, by default as
            many as its memory holds, with more for the stages that have the fewest.
    """

    group: str
    num_pages: int | None = Field(default=None, ge=2)


class StageConfig(Options):
    """A pipeline stage.

    Attributes:
        group: Group that computes the stage.
        layers: Number of layers; without ``layers`` and ``share``, layers are divided in proportion
            to the measured speeds of the groups.
        share: Share of the layers, relative to the shares of the other stages.
        attention: Groups that may store the stage's KV heads, by name or as
            ``{group: x, num_pages: n}``. They have no weights; attention is computed where the
            heads lie. A group may serve several stages of one instance. The instance's KV shards
            are, for each stage in turn, its own group and then each device of these groups.
        ffn: Group that computes the FFN, or the experts, of the stage's layers (attention-FFN
            disaggregation). It has their weights and no KV; all else is on the stage's own group.
            See ``micro_batches``.
    """

    group: str
    layers: int | None = Field(default=None, ge=1)
    share: float | None = Field(default=None, gt=0)
    attention: tuple[AttentionConfig, ...] = Field(default=(), strict=False)
    ffn: str | None = None

    @field_validator("attention", mode="before")
    @classmethod
    def _by_group(cls, value: object) -> object:
        if not isinstance(value, list | tuple):
            return value
        return tuple({"group": each} if isinstance(each, str) else each for each in value)

    @property
    def attention_groups(self) -> tuple[str, ...]:
        """Names of the groups other than its own."""
        return tuple(each.group for each in self.attention)

    @property
    def lenders(self) -> tuple[str, ...]:
        """Names of the groups that compute a part of its layers for it."""
        return (*self.attention_groups, *filter(None, [self.ffn]))


def head_pages(group: str, num_pages: int, heads: int, devices: int = 1) -> int:
    """Return how many pages of one KV head each device's pool has, with the padding page.

    Args:
        num_pages: pages of the group, counted as if all the KV heads lay there.

    Raises:
        JaxinferError: a device would have none.
    """
    if not (each := (num_pages - 1) * heads // devices):
        raise JaxinferError(
            f"attention group {group}: num_pages {num_pages} makes {heads * (num_pages - 1)} pages "
            f"of one KV head, its {devices} devices need one each"
        )
    return each + 1
