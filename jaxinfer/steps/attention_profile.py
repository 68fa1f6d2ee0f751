"""A profile of attention on devices with KV heads: points, and fits of Hetis' eqs. 3 and 4.

It is stored next to the profiles of whole steps, keyed by everything that decides the times.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from jaxinfer.serving.step_fit import AttentionFit
from jaxinfer.steps.profile import profile_folder, profile_path, write_record
from jaxinfer.steps.times import nonnegative


@dataclass(frozen=True)
class ShardPoints:
    """Seconds of one layer's decode attention in one shard, on an idle machine.

    Attributes:
        group: group that holds the shard.
        attention: (slices of KV heads over all requests, KV entries of all of them, seconds); empty
            if a stage has all its heads in one place.
        exchange: (slices, seconds) to send data there and back; empty on the stage's own group.
        dense: only on the stage's own group: (tokens, seconds) of one layer without attention, per
            bucket.
    """

    group: str
    attention: Sequence[tuple[int, int, float]]
    exchange: Sequence[tuple[int, float]] = ()
    dense: Sequence[tuple[int, float]] = ()

    def fit(self, slowdown: float = 1.0) -> AttentionFit:
        """Fit by least squares of the relative error, with no coefficient below zero.

        Args:
            slowdown: emulated slowdown of the device, relative to the measurement.
        """
        found = [slowdown * value for value in _coefficients(*self._attention)]
        return AttentionFit(*found, *_coefficients(*self._exchange))

    def dense_seconds(self, slowdown: float, tokens: float) -> float:
        """Return the seconds of one layer without attention: the least of buckets that hold the
        tokens.
        """
        fits = [seconds for most, seconds in self.dense if most >= tokens]
        return slowdown * min(fits, default=max((s for _, s in self.dense), default=0.0))

    def errors(self) -> tuple[float, float]:
        """Return the mean absolute percentage errors of eqs. 3 and 4, as fractions."""
        return _error(*self._attention), _error(*self._exchange)

    @property
    def _attention(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the numbers that times depend on, and the times."""
        points = np.array(self.attention, float).reshape(-1, 3)
        return np.column_stack([points[:, :2], np.ones(len(points))]), points[:, 2]

    @property
    def _exchange(self) -> tuple[np.ndarray, np.ndarray]:
        points = np.array(self.exchange, float).reshape(-1, 2)
        return np.column_stack([points[:, 0], np.ones(len(points))]), points[:, 1]


def _coefficients(x: np.ndarray, y: np.ndarray) -> list[float]:
    return nonnegative(x / y[:, None], np.ones_like(y))


def _error(x: np.ndarray, y: np.ndarray) -> float:
    if not len(y):
        return 0.0
    return float(np.abs(x @ _coefficients(x, y) / y - 1).mean())


@dataclass(frozen=True)
class AttentionProfile:
    """The points of all shards of one instance.

    Attributes:
        key: the setup that the times hold for.
    """

    key: dict[str, Any]
    shards: Sequence[ShardPoints]

    def fits(self, slowdowns: Mapping[str, float]) -> list[AttentionFit]:
        """Return the fit of each shard.

        Args:
            slowdowns: emulated slowdowns of the stages' own groups, see ``ShardPoints.fit``;
                attention groups were measured with theirs.
        """
        return [shard.fit(slowdowns.get(shard.group, 1.0)) for shard in self.shards]

    def dense(self, slowdowns: Mapping[str, float]) -> list[Callable[[float], float]]:
        """Return the dense times of each shard; see ``Shard``."""
        return [
            partial(shard.dense_seconds, slowdowns.get(shard.group, 1.0)) for shard in self.shards
        ]


def load_attention(key: dict[str, Any]) -> AttentionProfile | None:
    """Return the stored profile, if there is one."""
    path = attention_path(profile_path(key))
    return read_attention(path) if path.is_file() else None


def read_attention(path: Path) -> AttentionProfile | None:
    """Read a profile from its file; None if an older version wrote it."""
    stored = json.loads(path.read_text(encoding="utf-8"))
    if any("dense" not in shard for shard in stored["shards"]):
        return None
    shards = [
        ShardPoints(
            shard["group"],
            [(n, g, s) for n, g, s in shard["attention"]],
            [(n, s) for n, s in shard["exchange"]],
            [(n, s) for n, s in shard["dense"]],
        )
        for shard in stored["shards"]
    ]
    return AttentionProfile(stored["key"], shards)


def store_attention(profile: AttentionProfile) -> Path:
    """Store the profile for later runs."""
    path = attention_path(profile_path(profile.key))
    write_record(path, asdict(profile))
    return path


def profile_files(names: Iterable[str]) -> list[str]:
    """Return the existing files of profiles with these names: of whole steps, and of attention."""
    steps = [profile_folder() / f"{name}.json" for name in names]
    files = [file for path in steps for file in (path, attention_path(path)) if file.is_file()]
    return list(dict.fromkeys(map(str, files)))


def attention_path(path: Path) -> Path:
    """Return the file next to that of the profile of whole steps with the same key."""
    return path.with_name(f"{path.stem}.attention.json")
