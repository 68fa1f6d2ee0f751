"""A profile of one instance: points measured on an idle machine, and fits to them.

It is stored in ``~/.cache/jaxinfer/profiles``, keyed by everything that decides the times.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxinfer.errors import JaxinferError
from jaxinfer.files.kept import write_whole
from jaxinfer.serving.step_fit import (
    DecodeFit,
    MixedFit,
    PrefillFit,
    StepFit,
    least_squares,
)
from jaxinfer.steps.times import StepPoint, work_of_parts

FOLDER = Path("~/.cache/jaxinfer/profiles")


@dataclass(frozen=True)
class Quality:
    """Quality of a line's fit: R^2, and the mean absolute percentage error as a share."""

    r2: float
    mape: float


@dataclass(frozen=True)
class Profile:
    """Times of an instance's steps in seconds, on its own devices, without emulation.

    Attributes:
        key: conditions for which the times hold.
        prefills: (length, seconds of each stage) of prefills that run alone.
        mixed: (prefill context, decode context, seconds of each stage) of iterations with a full
            chunk. Both lists are empty if a run asked only for times of steps.
        points: all measured steps.
        ffn: (tokens, seconds) of one layer's FFN, per bucket, if it is on another group.
        own: all measured steps without the FFN, then.
    """

    key: dict[str, Any]
    prefills: list[tuple[int, tuple[float, ...]]]
    mixed: list[tuple[int, int, tuple[float, ...]]]
    points: list[StepPoint]
    ffn: Sequence[tuple[int, float]] = ()
    own: Sequence[StepPoint] = ()

    @property
    def has_fits(self) -> bool:
        """True if ``fit`` and ``quality`` have the data that they need."""
        return bool(self.prefills)

    def fit(self, slowdowns: Sequence[float]) -> StepFit:
        """Fit Cronus eqs. 2 and 3, and Aladdin's eq. 3, with each stage slowed down."""
        (prefill, _), (mixed, _) = self._lines(slowdowns)
        works = [(work_of_parts(point.parts), point.stages) for point in self.points]
        decodes = [
            ((work.single_context, work.singles, 1.0), float(np.dot(stages, slowdowns)))
            for work, stages in works
            if not work.chunks
        ]
        decode = least_squares(decodes, relative=True)
        return StepFit(
            PrefillFit(*prefill), MixedFit(*mixed), DecodeFit(*decode) if decode else None
        )

    def quality(self) -> tuple[Quality, Quality]:
        """Return the quality of eqs. 2 and 3."""
        (_, prefill), (_, mixed) = self._lines([1.0] * len(self.points[0].stages))
        return prefill, mixed

    def _lines(
        self, slowdowns: Sequence[float]
    ) -> tuple[tuple[list[float], Quality], tuple[list[float], Quality]]:
        prefill = _line(
            [[n, 1] for n, _ in self.prefills], [np.dot(t, slowdowns) for *_, t in self.prefills]
        )
        mixed = _line(
            [[p, d, 1] for p, d, _ in self.mixed], [np.dot(t, slowdowns) for *_, t in self.mixed]
        )
        return prefill, mixed


def _line(x: Sequence[Sequence[float]], y: Sequence[float]) -> tuple[list[float], Quality]:
    """Fit a line by least squares of the relative error, since it cuts short and long prompts."""
    xs, ys = np.asarray(x, float), np.asarray(y, float)
    found, *_ = np.linalg.lstsq(xs / ys[:, None], np.ones_like(ys), rcond=None)
    off = ys - xs @ found
    spread = float(((ys - ys.mean()) ** 2).sum())
    r2 = 1 - float((off**2).sum()) / spread if spread else 1.0
    return [float(c) for c in found], Quality(r2, float(np.abs(off / ys).mean()))


def load_profile(key: dict[str, Any], folder: Path | None = None) -> Profile | None:
    """Return the stored profile, if there is one."""
    path = profile_path(key, folder)
    return read_profile(path) if path.is_file() else None


def read_profile(path: Path) -> Profile:
    """Read a profile from its file."""
    stored = json.loads(path.read_text(encoding="utf-8"))
    return Profile(
        stored["key"],
        [(n, tuple(t)) for n, t in stored["prefills"]],
        [(p, d, tuple(t)) for p, d, t in stored["mixed"]],
        _points(stored["points"]),
        tuple((tokens, seconds) for tokens, seconds in stored.get("ffn", [])),
        tuple(_points(stored.get("own", []))),
    )


def _points(stored: Iterable[Any]) -> list[StepPoint]:
    return [StepPoint(tuple((a, b) for a, b in parts), tuple(s)) for parts, s in stored]


def store_profile(profile: Profile, folder: Path | None = None) -> Path:
    """Store the profile for later runs."""
    path = profile_path(profile.key, folder)
    record: dict[str, Any] = {
        "key": profile.key,
        "prefills": profile.prefills,
        "mixed": profile.mixed,
        "points": [(point.parts, point.stages) for point in profile.points],
    }
    if profile.ffn:
        record["ffn"] = profile.ffn
        record["own"] = [(point.parts, point.stages) for point in profile.own]
    write_record(path, record)
    return path


def write_record(path: Path, record: Mapping[str, Any]) -> None:
    """Write a record completely or not at all, since other processes may read it meanwhile."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps(record).encode())


def profile_folder() -> Path:
    """Return the folder of profiles.

    Raises:
        JaxinferError: the user has no home directory.
    """
    try:
        return FOLDER.expanduser()
    except RuntimeError:
        raise JaxinferError(
            f"{FOLDER}: is where profiles are kept, and this user has no home: set HOME to a folder"
        ) from None


def profile_path(key: dict[str, Any], folder: Path | None = None) -> Path:
    """Return the path of the profile with this key."""
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:20]
    return (folder or profile_folder()) / f"{digest}.json"
