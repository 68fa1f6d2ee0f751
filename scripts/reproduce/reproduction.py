"""Reproductions: a paper's inputs, and the parts that are made from them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from jaxinfer.errors import JaxinferError
from jaxinfer.files.kept import key_of
from jaxinfer.files.process_pool import process_pool
from jaxinfer.workload.lengths import BenchRequest, read_workload
from scripts.reproduce.claims import Target
from scripts.reproduce.digests import digest_of_code, digests_of
from scripts.tables import Row

if TYPE_CHECKING:
    from concurrent.futures import ProcessPoolExecutor

    from matplotlib.figure import Figure

Work = Sequence[BenchRequest]
T = TypeVar("T")

# Inputs of several papers, and where they are published.
CONVERSATIONS, CODE = (
    f"Azure's 2023 {what} trace: {name} in "
    "https://github.com/Azure/AzurePublicDataset/tree/master/data"
    for what, name in (
        ("conversation", "AzureLLMInferenceTrace_conv.csv"),
        ("coding", "AzureLLMInferenceTrace_code.csv"),
    )
)
SHAREGPT = (
    "prompt and output lengths of ShareGPT's first turns, CSV in Vidur's columns: 10,000 rows in "
    "data/processed_traces of https://github.com/AKafakA/vidur_opt_scheduler, commit 20bdc49"
)
VIDUR_PROFILES = (
    "data/profiling of https://github.com/microsoft/vidur, commit 7d47513, each CSV file packed "
    "by gzip"
)
AICONFIGURATOR = (
    "folder with CARD_TABLE.csv.gz, packed CSV of CARD/vllm/0.14.0/TABLE.parquet in "
    "https://github.com/ai-dynamo/aiconfigurator, src/aiconfigurator/systems/data, commit 095f58a"
)


@dataclass(frozen=True)
class Part:
    """Results of one part of a reproduction.

    Attributes:
        rows: a table, which is written as CSV under the part's name; empty for none.
        claims: the paper's claims, with our results.
        pictures: pictures, by their file's name without ``.png``.
        beside: further tables, by their file's name without ``.csv``.
        files: names of further files that the part has written to ``--out``.
    """

    rows: Sequence[Row] = ()
    claims: Sequence[Target] = ()
    pictures: Mapping[str, Figure] = field(default_factory=dict)
    beside: Mapping[str, Sequence[Row]] = field(default_factory=dict)
    files: Collection[str] = ()


@dataclass(frozen=True)
class Reproduction:
    """A paper's results, in parts that can be made one by one.

    Attributes:
        paper: name of the paper for readers.
        inputs: descriptions of the files and folders in ``--data``, by name.
        parts: functions that make the parts, in the order of the output. ``--list`` shows the first
            line of their docstrings.
        timed: names of parts with seconds of a host; they are made again on another host.
        by_name: names of parts that are made only if ``--part`` names them, because they run the
            engine or take hours.
    """

    paper: str
    inputs: Mapping[str, str]
    parts: Mapping[str, Callable[[Inputs], Part]]
    timed: Collection[str] = ()
    by_name: Collection[str] = ()


class MissingInput(JaxinferError):
    """A file that a part needs is missing in ``--data``."""


class Inputs:
    """Inputs of parts: files, tables of other parts, and processes.

    Args:
        data: folder of ``--data``; None if none was given.
        out: folder of ``--out``.
        table: returns the rows of another part, which it makes if they are not kept.
        jobs: number of processes of ``pool``; by default one for each core.

    Attributes:
        read: names of the files and parts that were requested since the set was last cleared, as
            ``data/NAME`` and ``part/NAME``.
    """

    def __init__(
        self,
        reproduction: Reproduction,
        data: Path | None,
        out: Path,
        table: Callable[[str], list[Row]],
        jobs: int | None = None,
    ) -> None:
        self.read: set[str] = set()
        self.out, self.jobs = out, jobs
        self._reproduction, self._data, self._table = reproduction, data, table
        self._shared: dict[Callable[[Inputs], Any], tuple[Any, set[str]]] = {}
        self._open = ExitStack()
        self._pool: ProcessPoolExecutor | None = None

    def path(self, name: str) -> Path:
        """Return the path of a file or folder of ``--data``.

        Raises:
            MissingInput: it does not exist.
        """
        self.read.add(f"data/{name}")
        path = (self._data or Path()) / name
        if self._data is None or not path.exists():
            where = f"{path}: is not there" if self._data else f"no --data with {name}"
            raise MissingInput(f"{where}; it is {self._reproduction.inputs[name]}")
        return path

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Refuse folders of ``--data`` that lack a file which is read in this context.

        Raises:
            MissingInput: a file does not exist.
        """
        try:
            yield
        except FileNotFoundError as error:
            for name, words in self._reproduction.inputs.items():
                if self._data and self._data / name in Path(str(error.filename)).parents:
                    missing = f"{error.filename}: is not there; {name} is {words}"
                    raise MissingInput(missing) from None
            raise

    def work(self, name: str, count: int | None = None) -> list[BenchRequest]:
        """Return the requests of a trace in ``--data``, or the first ``count`` of them."""
        return list(read_workload(self.path(name), count))

    def rows(self, part: str) -> list[Row]:
        """Return the table of another part; text that looks like a number becomes a number."""
        self.read.add(f"part/{part}")
        return self._table(part)

    def shared(self, make: Callable[[Inputs], T]) -> T:
        """Return an input of several parts, made once; ``make`` receives these inputs."""
        with self.noting() as read:
            if make not in self._shared:
                self._shared[make] = make(self), read
        made, needed = self._shared[make]
        self.read |= needed
        return cast(T, made)

    @contextmanager
    def noting(self) -> Iterator[set[str]]:
        """Return a context in which ``read`` is a separate set."""
        before, self.read = self.read, set()
        try:
            yield self.read
        finally:
            self.read = before

    @property
    def pool(self) -> ProcessPoolExecutor:
        """Processes for simulations, started at the first use."""
        if self._pool is None:
            self._pool = self._open.enter_context(process_pool(self.jobs))
        return self._pool

    @property
    def kept(self) -> Path:
        """A folder for results that parts keep themselves, so that a killed run can continue."""
        folder = self.out / "kept"
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def code(self, *names: str) -> str:
        """Return a digest of all code and of these inputs, for results that a part keeps itself."""
        return key_of(digest_of_code(), {name: digests_of(self.path(name)) for name in names})

    def close(self) -> None:
        """End the processes."""
        self._open.close()
