"""The harness of reproductions: which parts it makes, keeps, refuses and leaves out."""

import csv
from collections.abc import Callable
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from jaxinfer.errors import JaxinferError
from scripts.reproduce import making
from scripts.reproduce.claims import agrees, by_share
from scripts.reproduce.making import Maker
from scripts.reproduce.reproduction import Inputs, MissingInput, Part, Reproduction

CALLS: list[str] = []


def first(inputs: Inputs) -> Part:
    """The number in a file."""
    CALLS.append("first")
    number = int(inputs.path("number.txt").read_text())
    return Part([{"number": number}], [by_share("as the paper", 7.0, number, 0.1)])


def second(inputs: Inputs) -> Part:
    """Twice the first."""
    CALLS.append("second")
    twice = 2 * inputs.rows("first")[0]["number"]
    return Part([{"twice": twice}], [agrees("even", str(twice), True, "even")], {"two": Figure()})


def alone(inputs: Inputs) -> Part:
    """A claim without a table."""
    CALLS.append("alone")
    return Part(claims=[agrees("alone", "so", True, "so")])


def by_hand(inputs: Inputs) -> Part:
    """Stand in for a part that takes hours."""
    CALLS.append("by_hand")
    return Part([{"hours": 3}])


REPRODUCTION = Reproduction(
    "Paper",
    {"number.txt": "a number"},
    {"first": first, "second": second, "alone": alone, "by_hand": by_hand},
    timed=("alone",),
    by_name=("by_hand",),
)


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., list[str]]:
    """Makes parts in OUT from DATA, and says which functions were called for that."""
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "number.txt").write_text("7")

    def made(*parts: str, data: bool = True, overwrite: bool = False) -> list[str]:
        CALLS.clear()
        folder = tmp_path / "data" if data else None
        Maker("paper", REPRODUCTION, tmp_path / "out", folder, 1, overwrite).make(parts)
        return list(CALLS)

    return made


def claims(folder: Path) -> list[tuple[str, str, str]]:
    with (folder / "out" / "targets.csv").open(newline="") as file:
        return [(row["claim"], row["met"], row["made_by"]) for row in csv.DictReader(file)]


BY = "scripts.reproduce paper --part "


def test_all_parts_but_those_that_have_to_be_named(
    make: Callable[..., list[str]], tmp_path: Path
) -> None:
    assert make() == ["first", "second", "alone"]
    assert (tmp_path / "out" / "first.csv").read_text() == "number\n7\n"
    assert (tmp_path / "out" / "two.png").stat().st_size
    assert claims(tmp_path) == [
        ("as the paper", "yes", f"{BY}first"),
        ("even", "yes", f"{BY}second"),
        ("alone", "yes", f"{BY}alone"),
    ]
    assert make("by_hand") == ["by_hand"]


def test_a_part_makes_what_it_needs_once(
    make: Callable[..., list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert make("second", "first") == ["second", "first"]
    assert make("first", "second") == []
    assert capsys.readouterr().out.count("kept, made before") == 2


def test_other_data_make_all_that_has_read_them_again(
    make: Callable[..., list[str]], tmp_path: Path
) -> None:
    make()
    (tmp_path / "data" / "number.txt").write_text("8")
    with pytest.raises(JaxinferError, match=r"first\.csv: is there, made by other code or from"):
        make()
    with pytest.raises(JaxinferError, match=r"second\.csv: is there"):
        make("second")
    assert make("alone") == []
    assert make(overwrite=True) == ["first", "second"]
    assert claims(tmp_path)[:2] == [
        ("as the paper", "no", f"{BY}first"),
        ("even", "yes", f"{BY}second"),
    ]


def test_other_code_makes_all_again(
    make: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    make()
    monkeypatch.setattr(making, "digest_of_code", lambda: "another")
    with pytest.raises(JaxinferError, match="made by other code"):
        make()
    assert make(overwrite=True) == ["first", "second", "alone"]


def test_seconds_of_another_host_are_made_again(
    make: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    make()
    monkeypatch.setattr(making, "origin", lambda: {"machine": {"cpu": "another"}})
    assert make(overwrite=True) == ["alone"]


@pytest.mark.parametrize("file", ["first.csv", "two.png", "targets.csv"])
def test_a_part_whose_file_was_changed_is_not_kept(
    make: Callable[..., list[str]], tmp_path: Path, file: str
) -> None:
    make()
    (tmp_path / "out" / file).unlink()
    assert (
        make(overwrite=True)
        == {
            "first.csv": ["first"],
            "two.png": ["second"],
            "targets.csv": ["first", "second", "alone"],
        }[file]
    )


def test_what_it_has_not_made_is_not_overwritten(
    make: Callable[..., list[str]], tmp_path: Path
) -> None:
    (tmp_path / "out").mkdir()
    table = tmp_path / "out" / "first.csv"
    table.write_text("number\n1\n")
    with pytest.raises(JaxinferError, match="--overwrite makes it again"):
        make()
    assert table.read_text() == "number\n1\n"
    assert not CALLS


def test_claims_of_other_commands_are_left(make: Callable[..., list[str]], tmp_path: Path) -> None:
    make()
    targets = tmp_path / "out" / "targets.csv"
    targets.write_text(targets.read_text() + "mine,,,0.90,,so,consistency,yes,by hand\n")
    make("by_hand")
    (tmp_path / "data" / "number.txt").write_text("9")
    make("first", overwrite=True)
    assert claims(tmp_path)[0] == ("mine", "yes", "by hand")
    assert "mine,,,0.90,," in targets.read_text()
    assert len(claims(tmp_path)) == 4


def test_parts_without_their_inputs_are_left_out(
    make: Callable[..., list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert make(data=False) == ["first", "second", "first", "alone"]
    said = capsys.readouterr().out
    assert "first was left out: no --data with number.txt; it is a number" in said
    assert "second was left out: " in said
    with pytest.raises(MissingInput, match=r"no --data with number\.txt"):
        make("second", data=False)


def test_what_several_parts_share_is_made_once_and_read_by_each(tmp_path: Path) -> None:
    made = []

    def number(inputs: Inputs) -> int:
        made.append(1)
        return int(inputs.path("number.txt").read_text())

    def part(inputs: Inputs) -> Part:
        """A part."""
        return Part([{"number": inputs.shared(number)}])

    paper = Reproduction("Paper", {"number.txt": "a number"}, {"a": part, "b": part})
    (tmp_path / "number.txt").write_text("7")
    Maker("paper", paper, tmp_path / "out", tmp_path).make([])
    assert len(made) == 1
    (tmp_path / "number.txt").write_text("8")
    for name in ("a", "b"):
        with pytest.raises(JaxinferError, match=f"{name}.csv: is there"):
            Maker("paper", paper, tmp_path / "out", tmp_path).make([name])
