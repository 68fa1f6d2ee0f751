"""Makes the parts of a reproduction, or keeps parts that the same code and data have made."""

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from jaxinfer.errors import JaxinferError
from jaxinfer.files.kept import key_of
from jaxinfer.report.origin import origin
from jaxinfer.report.pictures import save_picture
from scripts.reproduce.claims import read_claims, show_claims, write_claims
from scripts.reproduce.digests import digest_of_code, digests_of
from scripts.reproduce.reproduction import Inputs, MissingInput, Part, Reproduction
from scripts.tables import Row, read_csv, show_table, write_csv


class Maker:
    """Makes parts, and writes them to a folder.

    Args:
        name: name of the reproduction, in commands.
        reproduction: the reproduction.
        out: folder for the results.
        data: folder with its inputs; None if there is none.
        jobs: number of processes.
        overwrite: whether to replace parts that other code or data have made.
    """

    def __init__(
        self,
        name: str,
        reproduction: Reproduction,
        out: Path,
        data: Path | None = None,
        jobs: int | None = None,
        overwrite: bool = False,
    ) -> None:
        self.name, self.reproduction, self.out = name, reproduction, out
        self._data, self._overwrite = data, overwrite
        self._inputs = Inputs(reproduction, data, out, self._table, jobs)
        self._targets, self._notes = out / "targets.csv", out / ".kept.json"
        self._done: set[str] = set()

    def make(self, parts: Iterable[str]) -> None:
        """Make the requested parts, or all parts that have their inputs.

        Raises:
            MissingInput: a requested part lacks an input, or all parts do.
            JaxinferError: the folder has a part that other code or data have made.
        """
        asked = list(parts)
        wanted = asked or [p for p in self.reproduction.parts if p not in self.reproduction.by_name]
        self._refuse(wanted)
        self.out.mkdir(parents=True, exist_ok=True)
        lacking: dict[str, MissingInput] = {}
        try:
            for part in wanted:
                try:
                    self._show(part)
                except MissingInput as error:
                    if asked:
                        raise
                    lacking[part] = error
                    print(f"left out: {error}", flush=True)
        finally:
            self._inputs.close()
        commands = {self.made_by(part) for part in wanted}
        claims = [row for row in read_claims(self._targets) if row["made_by"] in commands]
        if claims:
            print("\n## Claims\n")
            show_claims(claims)
        if len(lacking) == len(wanted):
            raise next(iter(lacking.values()))
        for part, why in lacking.items():
            print(f"\n{part} was left out: {why}")

    def made_by(self, part: str) -> str:
        """Return the command that makes a part, as in ``targets.csv``."""
        return f"scripts.reproduce {self.name} --part {part}"

    def _show(self, part: str) -> None:
        print(f"\n## {part}: {summary(self.reproduction.parts[part])}\n", flush=True)
        rows = self._table(part)
        if rows:
            show_table(rows)

    def _table(self, part: str) -> list[Row]:
        """Return the rows of a part, which is made first if necessary."""
        path = self.out / f"{part}.csv"
        if part not in self._done:
            if self._is_current(part):
                print(f"{part}: kept, made before by the same code from the same data")
            else:
                self._refuse([part])
                self._make(part)
            self._done.add(part)
        return read_csv(path) if path.exists() else []

    def _make(self, part: str) -> None:
        with self._inputs.noting() as read, self._inputs.whole():
            made = self.reproduction.parts[part](self._inputs)
        files = self._write(part, made)
        command, parts = self.made_by(part), self.reproduction.parts
        write_claims(self._targets, command, made.claims, [self.made_by(each) for each in parts])
        note = {"read": sorted(read), "files": _digests(files), "claims": len(made.claims)}
        notes = self._noted() | {part: note | {"key": self._key(part, read)}}
        self._notes.write_text(json.dumps(notes, indent=1), encoding="utf-8")

    def _write(self, part: str, made: Part) -> list[Path]:
        files = [self.out / name for name in made.files]
        for name, rows in {part: made.rows, **made.beside}.items():
            if rows:
                files.append(self.out / f"{name}.csv")
                write_csv(files[-1], rows)
        for name, figure in made.pictures.items():
            files.append(self.out / f"{name}.png")
            save_picture(figure, files[-1])
        return files

    def _refuse(self, parts: Iterable[str]) -> None:
        """Raise an error if making a part would overwrite files of unknown origin.

        Raises:
            JaxinferError: see above.
        """
        if self._overwrite:
            return
        claimed = {row["made_by"] for row in read_claims(self._targets)}
        for part in parts:
            path = self.out / f"{part}.csv"
            there = path.exists() or part in self._noted() or self.made_by(part) in claimed
            if there and part not in self._done and not self._is_current(part):
                raise JaxinferError(
                    f"{path}: is there, made by other code or from other data: --overwrite makes "
                    "it again, another --out leaves it"
                )

    def _is_current(self, part: str) -> bool:
        """True if the same code has made the part's files from the same data."""
        note = self._noted().get(part)
        if note is None:
            return False
        command = self.made_by(part)
        claims = sum(row["made_by"] == command for row in read_claims(self._targets))
        needed = [name.partition("/")[2] for name in note["read"] if name.startswith("part/")]
        return (
            all(map(self._is_current, needed))
            and claims == note["claims"]
            and _digests([self.out / name for name in note["files"]]) == note["files"]
            and self._key(part, note["read"]) == note["key"]
        )

    def _noted(self) -> dict[str, Any]:
        if not self._notes.exists():
            return {}
        found: dict[str, Any] = json.loads(self._notes.read_text(encoding="utf-8"))
        return found

    def _key(self, part: str, read: Iterable[str]) -> str:
        """Return a digest of all code, of a part's inputs, and of the host if it has seconds."""
        digests: dict[str, Mapping[str, str]] = {}
        for name in sorted(read):
            kind, _, what = name.partition("/")
            if kind == "part":
                digests[name] = _digests([self.out / f"{what}.csv"])
            elif self._data:
                digests[name] = digests_of(self._data / what)
        timed = part in self.reproduction.timed
        return key_of(digest_of_code(), part, digests, origin()["machine"] if timed else "")


def summary(make: Callable[..., object]) -> str:
    """Return the first line of a function's docstring, without its full stop."""
    return (make.__doc__ or "").strip().partition("\n")[0].rstrip(".")


def _digests(files: Iterable[Path]) -> dict[str, str]:
    """Return a digest of each file by its name; missing files are left out."""
    return {path.name: key_of(digests_of(path)) for path in files if path.exists()}
