"""Steps as two halves in turn: where they are faster, thresholds, and whole runs.

The exchange of one half, and its attention on other devices, are hidden behind the dense layers of
the other half, but weights are read twice. A step without prompts has the share of heads on other
devices with which it is the shortest.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from matplotlib.figure import Figure

from jaxinfer.report.pictures import name_lines
from jaxinfer.report.plots import COLOURS
from jaxinfer.report.records import read_lines
from jaxinfer.serving.batch import ShardWork, Work
from jaxinfer.serving.features.half_batches import as_a_whole, in_turn
from jaxinfer.simulate.cluster import ModelledInstance
from scripts.reproduce.claims import Target, by_share
from scripts.reproduce.hetis.cases import (
    LARGE,
    OTHERS,
    PRIMARIES,
    SEVENTY,
    THIRTEEN,
    THIRTY,
    TWO,
    cluster,
    hardware,
    hetis,
    modelled,
    run,
)
from scripts.reproduce.reproduction import Inputs, Part
from scripts.tables import Row

# For one stage: its model, its group, and the groups that have only heads.
STAGES: dict[str, tuple[str, Any, Sequence[str]]] = {
    "13B, one A100, two 3090": (THIRTEEN, (("one", None),), TWO),
    "70B, four A100, four P100": (SEVENTY, (("a", None),), ("p",)),
}
SEQUENCES = (32, 64, 128, 256, 512, 1024)
ENTRIES = (250, 1000, 4000)
# For thresholds: seconds of a layer's exchange, and numbers of sequences.
EXCHANGES, MANY = (60e-6, 100e-6, 200e-6, 1e-3, 1.2e-3, 1.5e-3), 512
SHARES = [number / 50 for number in range(51)]
# Model, stages, groups for heads, and load.
RUNS: dict[str, tuple[str, Any, Sequence[str], tuple[float, int, str]]] = {
    "13B, 10 requests/s": (THIRTEEN, (("a", None),), OTHERS, (10.0, 500, "sharegpt")),
    "13B, all at once": (THIRTEEN, (("a", None),), OTHERS, (1e6, 500, "sharegpt")),
    "OPT-30B, 10 requests/s": (THIRTY, (("a", None),), OTHERS, (10.0, 500, "sharegpt")),
    "OPT-30B, all at once": (THIRTY, (("a", None),), OTHERS, (1e6, 500, "sharegpt")),
    "70B, 5 requests/s": (SEVENTY, PRIMARIES, ("p",), (5.0, 500, "sharegpt")),
    "70B, all at once": (SEVENTY, PRIMARIES, ("p",), (1e6, 500, "sharegpt")),
    "70B, long prompts, all at once": (SEVENTY, PRIMARIES, ("p",), (1e6, 500, "arxiv_4k")),
}
# Returns the seconds of a step, whole and as halves, from sequences, their KV entries, and the
# share of heads elsewhere.
Seconds = Callable[[int, float, float], tuple[float, float]]


@dataclass(frozen=True)
class HalvedStage:
    """A stage with steps of decodes that see equally many KV entries."""

    instance: ModelledInstance

    @property
    def heads(self) -> int:
        """Number of the model's heads."""
        return self.instance.shards[0].heads

    def work(self, sequences: int, entries: float, share: float) -> Work:
        """Return the work with a share of all heads elsewhere, equally many on each device."""
        others = len(self.instance.shards) - 1
        pairs = [(1 - share) * sequences * self.heads]
        pairs += [share * sequences * self.heads / others] * others
        shards = [ShardWork(round(n), round(n * entries)) for n in pairs]
        seen = round(sequences * entries)
        return Work(sequences, sequences, sequences, sequences, seen, [], sequences, shards)

    def seconds(self, sequences: int, entries: float, share: float) -> tuple[float, float]:
        """Return the seconds as a whole, and as halves if there are heads on other devices."""
        whole, half = (self.work(sequences // n, entries, share) for n in (1, 2))
        both = (whole, replace(whole, halves=[half, half]))
        as_whole, as_halves = (sum(self.instance.cost.stages(each)) for each in both)
        return as_whole, as_halves

    def layer(self, sequences: int, entries: float, share: float) -> tuple[float, float]:
        """Return the same for one layer in the middle of a step."""
        whole, half = (self.work(sequences // n, entries, share) for n in (1, 2))
        (spread,) = self.instance.cost.parts  # type: ignore[attr-defined]
        times = spread.layer(half)
        return as_a_whole(1, spread.layer(whole)), in_turn(2, times, times) - in_turn(
            1, times, times
        )

    def threshold(self, sequences: int, way: int, seconds: Seconds) -> float:
        """Return the tokens in flight from which a step is shorter with heads elsewhere, to 1 %."""
        tokens = float(sequences)
        # One head of each half on each group, and then more.
        one = 2 * (len(self.instance.shards) - 1) / (sequences * self.heads)
        while True:
            entries = tokens / sequences
            times = [seconds(sequences, entries, s)[way] for s in (one, 4 * one, *SHARES[1::5])]
            if min(times) < seconds(sequences, entries, 0.0)[0]:
                return tokens
            tokens *= 1.01

    def closed_form(self, sequences: int, way: int) -> float:
        """Return the tokens from which a layer's attention outlasts an exchange's unhidden part."""
        own, other, *_ = (shard.cost for shard in self.instance.shards)
        dense = self.instance.shards[0].dense
        assert own
        assert other
        assert dense
        shown = max(other.fit.exchange - way * dense(sequences / 2), 0.0)
        return shown / own.fit.per_entry / self.heads


def stage_of(name: str, exchange_s: float | None = None) -> HalvedStage:
    """Return a stage with the latency of its own link, or with another one."""
    model, layers, attention = STAGES[name]
    engine = LARGE | {"half_batches": "by_time"}
    with TemporaryDirectory() as folder:
        file = hardware(Path(folder), exchange_s and exchange_s / 2)
        return HalvedStage(modelled(cluster(model, layers, attention, hetis(), engine, file=file)))


def halves(inputs: Inputs) -> Part:
    """The shortest steps, whole and as halves, by sequences and their KV entries."""
    rows = []
    for name in STAGES:
        stage = stage_of(name)
        for sequences in SEQUENCES:
            for entries in ENTRIES:
                times = [stage.seconds(sequences, entries, share) for share in SHARES]
                whole = min((time, share) for (time, _), share in zip(times, SHARES, strict=True))
                cut = min((time, share) for (_, time), share in zip(times, SHARES, strict=True))
                rows.append(
                    {
                        "stage": name,
                        "sequences": sequences,
                        "KV entries of each": entries,
                        "whole (ms)": round(1e3 * whole[0], 2),
                        "elsewhere": whole[1],
                        "halves (ms)": round(1e3 * cut[0], 2),
                        "elsewhere as halves": cut[1],
                        "times as fast": round(whole[0] / cut[0], 3),
                    }
                )
    return Part(rows, [], {"halves": draw_halves()})


def thresholds(inputs: Inputs) -> Part:
    """Tokens from which heads leave, by exchange and number of sequences."""
    rows, targets = list[Row](), list[Target]()
    for name in STAGES:
        for exchange in EXCHANGES:
            stage = stage_of(name, exchange)
            expected = [stage.closed_form(MANY, way) for way in (0, 1)]
            layer = [stage.threshold(MANY, way, stage.layer) for way in (0, 1)]
            step = [stage.threshold(MANY, way, stage.seconds) for way in (0, 1)]
            us = round(1e6 * exchange)
            rows.append(
                {
                    "stage": name,
                    "exchange (us)": us,
                    "whole, closed form": round(expected[0]),
                    "a layer": round(layer[0]),
                    "a step": round(step[0]),
                    "halves, closed form": round(expected[1]),
                    "a layer of halves": round(layer[1]),
                    "a step of halves": round(step[1]),
                }
            )
            if expected[1]:
                claim = f"tokens from which heads leave a layer of halves: {name}, {us} us"
                targets.append(by_share(claim, round(expected[1]), layer[1], 0.2, "consistency"))
    return Part(rows, targets)


def half_runs(inputs: Inputs) -> Part:
    """Hetis without halves, and with halves where they take less time."""
    rows = []
    for load, (model, layers, attention, (rate, count, lengths)) in RUNS.items():
        for option in ("never", "by_time"):
            engine = LARGE | {"half_batches": option}
            config = cluster(model, layers, attention, hetis(), engine, None, rate, count, lengths)
            with TemporaryDirectory() as folder:
                found = run(config, Path(folder))
                steps = read_lines(Path(folder) / "1").steps
            cut = sum("halves" in step for step in steps) / len(steps)
            rows.append(
                {"load": load, "halves": option, **found, "steps as halves (%)": round(100 * cut)}
            )
    return Part(rows, [])


def draw_halves() -> Figure:
    """Draw the seconds of a step by the share of heads elsewhere, whole and as halves."""
    figure = Figure(figsize=(10.5, 3.6), layout="constrained")
    for ax, name in zip(figure.subplots(1, len(STAGES)), STAGES, strict=True):
        stage = stage_of(name)
        ends: dict[str, tuple[float, float, str]] = {}
        gains: list[float] = []
        for colour, sequences in zip(COLOURS, (128, 256, 512), strict=False):
            times = [stage.seconds(sequences, 1000, share) for share in SHARES]
            whole, halves = ([1e3 * each[i] for each in times] for i in (0, 1))
            ax.plot(SHARES, whole, color=colour)
            ax.plot(SHARES, halves, color=colour, linestyle="dashed")
            ends[f"{sequences} sequences"] = (SHARES[-1], halves[-1], colour)
            gains.append(min(whole) / min(halves))
        ax.set_title(
            f"{name}:\nhalves are up to {max(gains):.2f} times as fast", loc="left", fontsize=10
        )
        ax.set_xlabel("share of heads on other GPUs")
        ax.set_ylim(0, 1.3 * whole[0])
        name_lines(ax, ends)
    figure.axes[0].set_ylabel("time of a step (ms); dashed: as halves")
    figure.supxlabel("Each sequence has 1,000 tokens of KV", fontsize=9)
    return figure
