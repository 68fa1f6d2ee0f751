"""A linear model of the time of attention where some KV heads of a stage lie."""

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class AttentionFit:
    """Hetis eqs. 3 and 4: seconds of one layer's decode attention in one shard of a stage.

    Attributes:
        per_pair: for each slice of KV heads, over all requests; ``per_entry``: for each KV entry of
            each of them.
        constant: where there is any.
        exchange_per_pair, exchange: likewise, of queries on their way there and of what comes
            back; 0 on the devices that have the layers.
    """

    per_pair: float
    per_entry: float
    constant: float
    exchange_per_pair: float = 0.0
    exchange: float = 0.0

    def seconds(self, pairs: float, entries: float) -> float:
        """Of one layer; nothing without pairs."""
        return self.busy(pairs, entries) + self.exchange if pairs else 0.0

    def busy(self, pairs: float, entries: float) -> float:
        """Of those, what device and link can do for nobody else."""
        if not pairs:
            return 0.0
        each = self.per_pair + self.exchange_per_pair
        return each * pairs + self.per_entry * entries + self.constant

    def of_steps(self, count: int) -> "AttentionFit":
        """Of so many steps that have all pairs and entries together."""
        return replace(self, constant=count * self.constant, exchange=count * self.exchange)
