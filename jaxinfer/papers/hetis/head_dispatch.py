"""Dispatches a request's KV heads to devices (Hetis, sections 5.2 and 5.3).

A device is a shard of one stage; an item is one slice of KV heads of one request there. A device's
time is that of one layer's decode attention over all its items. The largest time of a stage's
devices counts, since a layer ends with its slowest device.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from jaxinfer.serving.step_fit import AttentionFit


@dataclass(frozen=True)
class DeviceLoad:
    """The work that a device has, and its free room.

    Attributes:
        pairs: number of slices, over all requests.
        entries: number of KV entries of all slices.
        free_pages: number of free pages, each for one slice.
        page_size: KV entries of a page.
        others: seconds for which the device works for other stages, which take turns with this
            stage.
        hidden: if a step is computed as two halves in turn, the seconds of each half's dense part,
            during which the other half's attention here costs nothing; otherwise None.
    """

    fit: AttentionFit
    pairs: int
    entries: float
    free_pages: int
    page_size: int = 1
    others: float = 0.0
    hidden: float | None = None

    @property
    def capacity(self) -> float:
        """Number of KV entries that the device's pool can hold."""
        return self.entries + self.free_pages * self.page_size

    @property
    def seconds(self) -> float:
        """Seconds of one layer's attention (eqs. 3 and 4); an idle device takes none.

        With halves, only two times count: the time for which the device is busy beyond both dense
        parts, and the time by which one half's attention and exchange exceed the other half's dense
        part.
        """
        if not self.pairs:
            return 0.0
        if self.hidden is None:
            return self.fit.seconds(self.pairs, self.entries) + self.others
        busy = self.fit.busy(self.pairs, self.entries) + self.fit.constant + self.others
        return max(busy / 2 + self.fit.exchange - self.hidden, busy - 2 * self.hidden, 0.0)

    def within(self, seconds: float) -> float:
        """Return how many of ``seconds`` are left for pairs and entries, after fixed times."""
        fit, hidden = self.fit, self.hidden
        if hidden is None:
            return seconds - fit.constant - fit.exchange - self.others
        busy = min(2 * (seconds + hidden - fit.exchange), seconds + 2 * hidden)
        return busy - 2 * fit.constant - self.others

    def plus(self, slices: int, entries: float, pages: int) -> "DeviceLoad":
        """Return the load with more slices, each of ``entries`` KV entries on ``pages`` pages."""
        return DeviceLoad(
            self.fit,
            self.pairs + slices,
            self.entries + slices * entries,
            self.free_pages - slices * pages,
            self.page_size,
            self.others,
            self.hidden,
        )

    def grown(self, slices: int) -> "DeviceLoad":
        """Return the load after ``slices`` slices on the device have each got one more page."""
        entries = self.entries + slices * self.page_size
        return replace(self, entries=entries, free_pages=self.free_pages - slices)


def dispatch(
    loads: Sequence[DeviceLoad], slices: int, entries: float, pages: int
) -> list[int] | None:
    """Choose how many slices of a request each device gets, to minimise the slowest one's time.

    One slice at a time goes to the fastest device with room. Slices of one request are equal, and
    no device gets faster by another slice, so this is optimal for one request (eq. 7 without its
    relaxation). The paper solves a linear program and does not say how it rounds.

    Args:
        entries: KV entries of each slice.
        pages: pages of each slice.

    Returns:
        The number of slices on each device; None if there is no room for all of them.
    """
    loads, counts = list(loads), [0] * len(loads)
    for _ in range(slices):
        after = [load.plus(1, entries, pages) for load in loads]
        room = [i for i, load in enumerate(after) if load.free_pages >= 0]
        if not room:
            return None
        chosen = min(room, key=lambda i: after[i].seconds)
        loads[chosen] = after[chosen]
        counts[chosen] += 1
    return counts


def dispatch_by_memory(loads: Sequence[DeviceLoad], slices: int, pages: int) -> list[int] | None:
    """Place each slice on the device with the most room, whatever time that takes."""
    free, counts = [load.free_pages for load in loads], [0] * len(loads)
    for _ in range(slices):
        chosen = max(range(len(free)), key=free.__getitem__)
        free[chosen] -= pages
        if free[chosen] < 0:
            return None
        counts[chosen] += 1
    return counts


def can_do(seconds: float, loads: Sequence[DeviceLoad]) -> bool:
    """Tell whether ``seconds`` would suffice for all slices on the devices, if placed again.

    The least such time is a lower bound of f* (section 5.3.1): any part of a slice may go wherever
    a pool holds it, its pairs and its entries separately. Each device takes the entries that it
    can, and pairs in the remaining time. If pairs are left over, they replace entries, first on the
    devices where that loses the fewest.
    """
    pairs, entries = float(sum(load.pairs for load in loads)), sum(load.entries for load in loads)
    trades = []
    for load in loads:
        fit = load.fit
        left = load.within(seconds)
        if left < 0:
            continue
        taken = min(load.capacity, left / fit.per_entry if fit.per_entry else math.inf)
        left = max(left - taken * fit.per_entry, 0.0)
        entries -= taken
        pair = fit.per_pair + fit.exchange_per_pair
        pairs -= left / pair if pair else pairs
        if pair and fit.per_entry:
            trades.append((pair / fit.per_entry, taken))
    for lost, most in sorted(trades):
        if pairs > 0:
            taken = min(pairs, most / lost)
            pairs -= taken
            entries += taken * lost
    return pairs <= 1e-9 and entries <= 1e-9


def placed_anew(loads: Sequence[DeviceLoad]) -> float:
    """Estimate the seconds if all slices were placed again, with equally many entries each."""
    pairs = sum(load.pairs for load in loads)
    each = sum(load.entries for load in loads) / pairs
    fits = [load.fit for load in loads]
    pairs_s = [fit.per_pair + fit.exchange_per_pair + fit.per_entry * each for fit in fits]
    costs = [max(cost, 1e-18) for cost in pairs_s]  # Attention may cost nothing on a device.

    def is_enough(seconds: float) -> bool:
        count = 0.0
        for load, cost in zip(loads, costs, strict=True):
            count += max(min(load.capacity / each, load.within(seconds) / cost), 0.0)
        return count >= pairs * (1 - 1e-9)

    # In this time, each device could attend to everything that its pool holds.
    low, high = 0.0, sum(pairs * cost for cost in costs)
    high += sum(2 * load.fit.constant + load.fit.exchange + load.others for load in loads)
    for _ in range(20):
        middle = (low + high) / 2
        low, high = (low, middle) if is_enough(middle) else (middle, high)
    return high


def as_halves(loads: Sequence[DeviceLoad], whole: float, half: float) -> Sequence[DeviceLoad]:
    """Return the loads of a stage's devices, its own first, as those of halves if that is faster.

    The best placement of heads differs between halves and whole steps. Times of both are therefore
    estimated as if all heads were placed again, and the faster one is chosen.

    Args:
        whole: seconds of a layer's dense part in a whole step.
        half: seconds of a layer's dense part in half a step.

    Returns:
        The unchanged loads, or those of halves.
    """
    extra = 2 * half - whole
    if max(load.seconds for load in loads) <= max(extra, 0.0):
        return loads
    # Nothing hides the own device's work.
    halves = [replace(load, hidden=half if number else 0.0) for number, load in enumerate(loads)]
    return halves if placed_anew(halves) + extra < placed_anew(loads) else loads
