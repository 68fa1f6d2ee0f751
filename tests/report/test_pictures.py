"""Formats of pictures: text that stays text, the same file for the same picture, links to it."""

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import matplotlib
import pytest
from click.testing import CliRunner
from matplotlib.figure import Figure

from jaxinfer import JaxinferError
from jaxinfer.commands.app import cli
from jaxinfer.report.comparison import write_comparison
from jaxinfer.report.pictures import FORMATS, picture_link, save_picture
from jaxinfer.report.plots import latencies, throughput_bars, timeline
from jaxinfer.report.records import RunRecord

CRONUS = Path(__file__).parents[2] / "configs" / "cronus" / "cronus.yaml"
STARTS = {"png": b"\x89PNG", "svg": b"<?xml", "pdf": b"%PDF"}


def figure() -> Figure:
    made = Figure(figsize=(2, 1))
    made.subplots().set_title("KV moved")
    return made


@pytest.mark.parametrize("kind", FORMATS)
def test_the_ending_decides(kind: str, tmp_path: Path) -> None:
    path = tmp_path / f"a.b.{kind}"
    save_picture(figure(), path)
    assert path.read_bytes().startswith(STARTS[kind])
    assert FORMATS.keys() == STARTS.keys()


@pytest.mark.parametrize("kind", FORMATS)
def test_a_picture_is_the_same_file_each_time(kind: str, tmp_path: Path) -> None:
    paths = [tmp_path / f"{number}.{kind}" for number in range(2)]
    for path in paths:
        save_picture(figure(), path)
    assert paths[0].read_bytes() == paths[1].read_bytes()
    assert b"Date" not in paths[0].read_bytes()
    assert b"<dc:date>" not in paths[0].read_bytes()


def test_text_stays_text(tmp_path: Path) -> None:
    before = dict(matplotlib.rcParams)
    save_picture(figure(), tmp_path / "p.svg")
    save_picture(figure(), str(tmp_path / "p.pdf"))
    assert re.search(r"<text [^>]*>KV moved</text>", (tmp_path / "p.svg").read_text())
    pdf = (tmp_path / "p.pdf").read_bytes()
    # Type 3 are outlines; a Type 0 font with FontFile2 is an embedded TrueType one.
    assert b"/Type3" not in pdf
    assert b"/FontFile2" in pdf
    assert dict(matplotlib.rcParams) == before


@pytest.mark.parametrize("name", ["p.jpg", "p", "png", "p.PDF"])
def test_other_endings_are_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(JaxinferError) as caught:
        save_picture(figure(), tmp_path / name)
    path = tmp_path / name
    assert str(caught.value) == f"picture {path}: must end in one of .png, .svg, .pdf"
    assert not path.exists()


@pytest.mark.parametrize("kind", FORMATS)
def test_all_pictures_of_a_run(kind: str, small_run: RunRecord, tmp_path: Path) -> None:
    runs = {"small": [small_run]}
    draws: list[Callable[[Path], Figure]] = [
        lambda path: timeline(small_run, path),
        lambda path: latencies(runs, path),
        lambda path: throughput_bars(runs, path),
    ]
    for draw in draws:
        draw(tmp_path / f"p.{kind}")
        assert (tmp_path / f"p.{kind}").read_bytes().startswith(STARTS[kind])


def test_a_pdf_is_linked_and_not_shown() -> None:
    assert picture_link("A b", "c.pdf") == "[A b](c.pdf)"
    assert picture_link("A b", "c.svg") == "![A b](c.svg)"
    assert picture_link("A b", "c.png") == "![A b](c.png)"


@pytest.mark.parametrize("kind", FORMATS)
def test_a_comparison_in_each_format(kind: str, small_run: RunRecord, tmp_path: Path) -> None:
    paths = write_comparison({"x": [small_run]}, tmp_path, "jaxinfer", kind)
    drawn = {path.name for path in paths if path.suffix == f".{kind}"}
    assert drawn == {f"{name}.{kind}" for name in ("throughput", "latency", "timeline-x")}
    text = paths[0].read_text(encoding="utf-8")
    mark = "" if kind == "pdf" else "!"
    shown = re.findall(rf"^(!?)\[.+\]\((.+\.{kind})\)$", text, re.MULTILINE)
    assert shown == [(mark, f"{n}.{kind}") for n in ("throughput", "latency", "timeline-x")]


SMALL = ["--set", "workload.synthetic=azure_code", "--set", "workload.limit=3"]
COMMANDS = {
    "simulate": ["simulate", str(CRONUS), *SMALL],
    "compare": ["compare", "--simulate", str(CRONUS), *SMALL],
}


@pytest.mark.parametrize("command", COMMANDS)
def test_the_commands_take_a_format(command: str, tmp_path: Path) -> None:
    given = [*COMMANDS[command], "--out", str(tmp_path / "out"), "--pictures", "pdf"]
    ran = CliRunner().invoke(cli, given)
    assert ran.exit_code == 0, ran.output
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"throughput.pdf", "latency.pdf", "timeline-cronus.pdf"} < names
    assert not any(name.endswith(".png") for name in names)


def test_where_nothing_is_drawn_it_is_refused() -> None:
    ran = CliRunner().invoke(cli, [*COMMANDS["simulate"], "--pictures", "svg"])
    assert str(ran.exception) == "--pictures is for --out FOLDER, where pictures are drawn"
    ran = CliRunner().invoke(cli, ["compare", "default", "--pictures", "svg"])
    assert str(ran.exception) == "--pictures is for run files, not for layouts"
    ran = CliRunner().invoke(cli, [*COMMANDS["simulate"], "--out", "x", "--pictures", "gif"])
    assert ran.exit_code == 2
    assert "'png', 'svg', 'pdf'" in ran.output


def test_a_replay_takes_a_format(
    small_run: RunRecord, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    both = (small_run, replace(small_run, name="simulated"))
    monkeypatch.setattr("jaxinfer.lab.validate.replay.replay", lambda real, runs: both)
    monkeypatch.setattr("jaxinfer.lab.validate.replay.fidelity", lambda *runs: "as real")
    monkeypatch.setattr("jaxinfer.lab.validate.replay.overruns", lambda run: [])
    given = ["check", "replay", "real", "--out", str(tmp_path / "out"), "--pictures", "svg"]
    ran = CliRunner().invoke(cli, given)
    assert ran.exit_code == 0, ran.output
    names = {path.name for path in (tmp_path / "out").glob("*.svg")}
    assert names == {
        "throughput.svg",
        "latency.svg",
        "timeline-small.svg",
        "timeline-simulated.svg",
    }


@pytest.mark.parametrize(("options", "kind"), [([], "png"), (["--pictures", "pdf"], "pdf")])
def test_a_profile_takes_a_format(
    options: list[str], kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two of three instances are alike, and are measured once."""
    engines = {"a": "large", "b": "small", "c": "large"}
    cluster = SimpleNamespace(engines=engines, slowdowns=lambda name: [1.0])
    drawn: list[tuple[Path, str]] = []
    measured: list[str] = []

    def profile_engines(given: Mapping[str, tuple[str, str]], update: object) -> dict[str, str]:
        measured.extend(engine for engine, _ in given.values())
        return {name: engine for name, (engine, _) in given.items()}

    for name, value in {
        "checkpoints.checkpoint.open_checkpoint": lambda *given: None,
        "runtime.cluster.load_cluster": lambda *given: cluster,
        "runtime.profiling.profile.profile_name": lambda engine, model: engine,
        "runtime.profiling.profile.profile_engines": profile_engines,
        "steps.profile.store_profile": lambda profile: Path(f"kept/{profile}.json"),
        "report.profile_plot.draw_profile": lambda name, found, slow, path: drawn.append(
            (path, found)
        ),
        "report.profile_plot.profile_table": lambda found: "table",
    }.items():
        monkeypatch.setattr(f"jaxinfer.{name}", value)
    run_file = CRONUS.parents[1] / "cpu" / "cronus.yaml"
    ran = CliRunner().invoke(cli, ["profile", str(run_file), "--out", str(tmp_path), *options])
    assert ran.exit_code == 0, ran.output
    assert sorted(measured) == ["large", "small"]
    assert drawn == [(tmp_path / f"{name}.{kind}", engine) for name, engine in engines.items()]
    for name, engine in engines.items():
        assert f"profile of {name}: kept/{engine}.json\n" in ran.output
