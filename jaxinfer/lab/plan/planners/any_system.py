"""Compares systems in one search: the cluster of each run file, with all values of its axes."""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from jaxinfer.config.run_file import put_option
from jaxinfer.errors import JaxinferError
from jaxinfer.lab.plan.candidate import Candidate, Search
from jaxinfer.lab.plan.file_parts import read_file, without_requests
from jaxinfer.lab.plan.problem import Problem
from jaxinfer.options.validation import Named, OptionError, Options, shown, within

# Returns a candidate's part, from a file's content and the common part.
PartOf = Callable[[Mapping[str, Any], Mapping[str, Any]], dict[str, Any]]
# Dotted keys of a run file, with the values to try.
Axes = dict[str, Annotated[list[Any], Field(min_length=1)]]


class AnySystemOptions(Options):
    """Options of ``AnySystem``.

    Attributes:
        files: Run files, each with its own axes. Their model and requests are used where ``run``
            has none; all must have the same requests.
        axes: Axes for all files: dotted keys with lists of values.
    """

    files: Named[Axes] = Field(min_length=1)
    axes: Axes = Field(default_factory=dict)

    def model_post_init(self, context: object, /) -> None:
        """Refuse an axis on which a value is given twice."""
        check_axes(self.files, self.axes)


def check_axes(files: Mapping[str, Axes], axes: Axes) -> None:
    """Refuse an axis on which a value is given twice, since its candidates would be equal.

    Raises:
        OptionError: an axis has the same value twice.
    """
    for where, own in (("axes", axes), *((f"files.{file}", each) for file, each in files.items())):
        for key, values in own.items():
            known = [(type(value) is bool, value) for value in values]
            for number, (_, value) in enumerate(known):
                if known[number] in known[:number]:
                    raise OptionError(f"{where}: {key} has {shown(value)} twice")


class AnySystem:
    """Tries all combinations of the axes of each file."""

    Options = AnySystemOptions

    def __init__(self, options: AnySystemOptions) -> None:
        self._options = options

    def plan(self, problem: Problem, search: Search) -> Candidate:
        """Return the best combination."""
        return search.best(list(self.candidates(problem.run)))

    def candidates(self, run: Mapping[str, Any] | None = None) -> Iterator[Candidate]:
        """Yield all candidates of the ``grid``.

        Args:
            run: common options; by default with the common model, too.
        """
        common = {"model": ""} if run is None else run
        try:
            yield from grid(
                self._options.files, self._options.axes, part=without_requests, run=common
            )
        except OptionError as error:
            raise within("planner", error) from None


def grid(
    files: Mapping[str, Axes],
    axes: Axes,
    points: Sequence[Mapping[str, Any]] = ({},),
    part: PartOf = without_requests,
    run: Mapping[str, Any] = {},
) -> Iterator[Candidate]:
    """Yield the combinations of all axes, in the files' order.

    Args:
        points: sets of values of further keys; each set is used with all combinations of the axes.
        part: makes a candidate's part from a file's contents and ``run``.

    Raises:
        OptionError: a file cannot be read, or an axis or a point names no option.
    """
    for file, name, data in named_files(files):
        base = part(data, run)
        of_file: Axes = {**axes, **files[file]}
        for point, values in product(points, product(*of_file.values())):
            chosen = {**point, **dict(zip(of_file, values, strict=True))}
            named = {key: _shown(value) for key, value in chosen.items()}
            # Compared by type, too: 1, true and "1" differ.
            own = _with(_with(base, point, "points"), chosen, "axes")
            yield Candidate({"file": name, **named}, own, (file, repr(chosen)))


def named_files(
    files: Iterable[str], where: str = "files"
) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield each file's path, name and contents.

    The name is the stem of the path, or the path itself if several files have that stem.

    Args:
        where: option that names the files, in errors.

    Raises:
        OptionError: a file cannot be read.
    """
    paths = list(files)
    stems = Counter(Path(path).stem for path in paths)
    for path in paths:
        stem = Path(path).stem
        try:
            yield path, stem if stems[stem] == 1 else path, read_file(path)
        except JaxinferError as error:
            raise within(where, error) from None


def _with(base: Mapping[str, Any], values: Mapping[str, Any], where: str) -> dict[str, Any]:
    part = dict(base)
    for key, value in values.items():
        try:
            put_option(part, key, value)
        except JaxinferError as error:
            raise OptionError(f"{where}: {key!r}: {error}") from None
    return part


def _shown(value: Any) -> str | int | float | None:
    return value if isinstance(value, str | int | float) else json.dumps(value, default=str)
