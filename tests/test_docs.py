"""The docs: commands with options and files that exist, links, narrow prose."""

import re
import shlex
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import get_args

import click
import pytest
import yaml

from jaxinfer.commands.app import COMMANDS as NAMES
from jaxinfer.commands.app import cli
from jaxinfer.config.engine import EngineOptions
from jaxinfer.config.run_file import as_run_file, load_run_file
from jaxinfer.lab.plan.problem import load_options, load_problem
from jaxinfer.lab.plan.registry import PLANNERS
from jaxinfer.lab.plan.sweep.sweep_file import Sweep
from jaxinfer.models.layout_files import load_layout
from jaxinfer.serving.policies import KINDS
from jaxinfer.simulate.run import simulate
from jaxinfer.workload.arrivals import Arrivals
from jaxinfer.workload.distribution import Lengths
from jaxinfer.workload.lengths import read_workload
from jaxinfer.workload.parquet import RESULT_COLUMNS
from jaxinfer.workload.synthetic import Synthetic

ROOT = Path(__file__).parents[1]
READMES = [ROOT / "README.md", ROOT / "examples" / "README.md"]
DOCS = [*READMES, *sorted((ROOT / "docs").glob("*.md"))]
RESULTS = sorted((ROOT / "docs" / "results").glob("*.md"))
# What each command writes to.
OUTPUTS = ("output_path", "out", "destination")


def commands() -> Iterator[str]:
    """Yield the commands in blocks of their own, with lines joined at backslashes."""
    for path in DOCS:
        for line in path.read_text().replace("\\\n", " ").splitlines():
            if re.match(r" {4,}jaxinfer ", line):
                yield line.strip()


COMMANDS = list(commands())


def test_there_are_some() -> None:
    named = {shlex.split(command)[1] for command in COMMANDS}
    assert named == set(NAMES)
    checks = {shlex.split(line)[2] for line in COMMANDS if line.startswith("jaxinfer check ")}
    check = cli.get_command(click.Context(cli), "check")
    assert isinstance(check, click.Group)
    assert checks == set(check.list_commands(click.Context(check)))


@pytest.mark.parametrize("line", COMMANDS)
def test_a_command_of_the_docs(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    _, name, *arguments = shlex.split(line)
    command = cli.get_command(click.Context(cli), name)
    if name == "check":
        assert isinstance(command, click.Group)
        command = command.get_command(click.Context(command), arguments.pop(0))
    assert command
    # A copy: click takes the arguments out of its list.
    with command.make_context(name, list(arguments)) as context:
        given = context.params
    for output in OUTPUTS:
        if given.get(output):
            assert str(given[output]).startswith("runs/"), output
    paths = [word for word in arguments if word.startswith("configs/")]
    for path in paths:
        assert Path(path).exists(), path
        if path.startswith("configs/plan/"):
            load_problem(path, given.get("settings", ()))
        elif path.startswith("configs/sweep/"):
            assert list(load_options(Sweep, "sweep file", path, ()).candidates())
        elif path.endswith(".yaml"):
            load_run_file(path, given.get("settings", ()))
        if path.endswith(".py"):
            assert load_layout(path)
    if given.get("workload"):
        assert read_workload(given["workload"])
    for name in filter(None, (given.get("systems") or "").split(",")):
        assert Path(given["files"][0]).with_name(f"{name}.yaml").is_file()


def test_layouts_in_the_docs_are_loaded(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "sharding.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    for block in blocks:
        (tmp_path / "my.py").write_text(block)
        assert load_layout(str(tmp_path / "my.py")).parameters
    assert len(blocks) == 2


def test_the_first_run_file_in_the_docs() -> None:
    text = (ROOT / "docs" / "run-file.md").read_text()
    config = as_run_file(yaml.safe_load(text.split("```yaml\n")[1].split("```")[0]))
    assert (ROOT / str(config.workload.input)).is_file()
    assert str(config.workload.output).startswith("runs/")


def test_all_options_of_an_engine_are_in_the_docs() -> None:
    text = (ROOT / "docs" / "run-file.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE)
    assert set(EngineOptions.model_fields) <= set(rows)


def test_workloads_are_in_the_docs() -> None:
    page = (ROOT / "docs" / "run-file.md").read_text()
    section = page.split("\n## Workloads")[1].split("\n## ")[0]
    example = as_run_file(yaml.safe_load(section.split("```yaml\n")[1].split("```")[0]))
    assert len(example.requests()) == 1000
    kinds = get_args(Arrivals.model_fields["kind"].annotation)
    options = {name.rstrip("_") for name in (*Arrivals.model_fields, *Synthetic.model_fields)}
    for name in (*kinds, *options - {"kind"}, *Lengths.model_fields):
        assert f"`{name}`" in section or f"{{{name}:" in section or f"`{name}:" in section, name
    batches = page.split("### Parquet")[1]
    assert all(f"`{name}`" in batches for name in RESULT_COLUMNS)


def test_all_planners_are_in_the_docs() -> None:
    page = (ROOT / "docs" / "planning.md").read_text()
    for name, where in PLANNERS.items():
        assert f"| `{name}` |" in page
        module, _, planner = where.partition(":")
        for option in getattr(import_module(module), planner).Options.model_fields:
            assert re.search(f"`{option}[:`]", page), f"{name}.{option}"


def test_all_policies_are_in_the_docs() -> None:
    section = (ROOT / "docs" / "run-file.md").read_text().split("## Policies")[1].split("\n## ")[0]
    example = as_run_file(yaml.safe_load(section.split("```yaml\n")[1].split("```")[0]))
    for kind, policies in KINDS.items():
        assert getattr(example.engine.policies, kind)
        for name, policy in policies.items():
            assert f"`{name}`" in section, name
            for option in policy.Options.model_fields if isinstance(policy, type) else ():
                assert f"`{option}`" in section, f"{name}.{option}"


def test_prompts_of_lines_have_no_line_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    section = (ROOT / "docs" / "python.md").read_text().split("## Your own requests")[1]
    code = section.split("```python\n")[1].split("```")[0]
    encoded: list[str] = []
    llm = SimpleNamespace(
        tokenizer=SimpleNamespace(encode=encoded.append),
        make_requests=lambda *asked: [asked],
        run=lambda requests, on_output: list(requests),
    )
    monkeypatch.chdir(tmp_path)
    Path("prompts.txt").write_text("one\n two \nthree")
    exec(code, {"llm": llm, "params": None})
    assert encoded == ["one", " two ", "three"]


def test_git_ignores_where_they_write() -> None:
    assert "/runs/" in (ROOT / ".gitignore").read_text().splitlines()


@pytest.mark.parametrize("page", [*DOCS, *RESULTS], ids=lambda p: p.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in targets(page.read_text()):
        file, _, section = target.partition("#")
        path = page.parent / file if file else page
        assert path.exists(), target
        assert not section or section in anchors(path.read_text()), target


def targets(text: str) -> list[str]:
    """Return the targets of links and pictures, except those on the web."""
    inline = re.findall(r"\]\(([^)\s]+)\)", text)
    defined = re.findall(r"^\[[^\]]+\]: (\S+)", text, re.MULTILINE)
    return [target for target in [*inline, *defined] if "://" not in target]


def anchors(text: str) -> set[str]:
    """Return the anchors of a page's headings, as GitHub names them."""
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_links_are_found() -> None:
    text = "## A b, c\n[x](y.md#a-b-c), ![z](z.png), [w](https://w) and [v][v]\n\n[v]: v.md\n"
    assert targets(text) == ["y.md#a-b-c", "z.png", "v.md"]
    assert anchors(text) == {"a-b-c"}


def prose(text: str) -> Iterator[str]:
    """Lines of neither tables nor code nor pictures, and without links that stand alone."""
    code = False
    for line in text.splitlines():
        if line.lstrip().startswith("```"):
            code = not code
        elif not code and not re.match(r"\||!\[|\[[^\]]+\]: | {4,}jaxinfer ", line):
            yield line


@pytest.mark.parametrize("page", [*DOCS, *RESULTS], ids=lambda p: p.name)
def test_prose_is_narrow(page: Path) -> None:
    assert not [line for line in prose(page.read_text()) if len(line) > 100]


@pytest.mark.parametrize("page", [*DOCS, *RESULTS], ids=lambda p: p.name)
def test_every_block_of_code_ends(page: Path) -> None:
    fences = [line for line in page.read_text().splitlines() if line.lstrip().startswith("```")]
    assert len(fences) % 2 == 0
    assert all(line.strip() != "```" for line in fences[::2])
    assert all(line.strip() == "```" for line in fences[1::2])


@pytest.mark.parametrize("page", [*DOCS, *RESULTS], ids=lambda p: p.name)
def test_a_heading_is_no_paragraph(page: Path) -> None:
    text = "\n".join(prose(page.read_text()))
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    assert not [heading for heading in headings if len(heading) > 72]


def test_the_picture_of_the_architecture_is_true() -> None:
    picture = (ROOT / "docs" / "architecture.svg").read_text()
    assert "not built" not in picture
    for path in re.findall(
        r"\b(?:[a-z]\w+/)+(?:\w+\.py)?", re.sub(r"<svg[^>]*>|</\w+>", "", picture)
    ):
        assert (ROOT / "jaxinfer" / path).exists(), path
    for file in re.findall(r"(?<![\w/])\w+\.py", picture):
        assert (ROOT / "jaxinfer" / "serving" / file).exists(), file


def test_functions_named_in_the_architecture_exist() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    life = text.split("## The life of a request")[1].split("\n## ")[0]
    assert re.findall(r"^\| (\d) \|", life, re.MULTILINE) == [*"12345678"]
    named = re.findall(r"`([\w/]+\.py):(\w+)`", text)
    assert len(named) >= 40
    for file, name in named:
        code = (ROOT / "jaxinfer" / file).read_text()
        assert re.search(rf"^ *(?:def|class) {name}\b", code, re.MULTILINE), f"{file}:{name}"


def test_files_named_in_the_architecture_exist() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    of_serving = text.split("## Files of `serving/`")[1].split("\n## ")[0]
    for path in re.findall(r"`([\w/]+\.py)\b", text.replace(of_serving, "")):
        assert (ROOT / "jaxinfer" / path).is_file() or (ROOT / path).is_file(), path
    for name in re.findall(r"`(\w+\.py)`", of_serving):
        assert (ROOT / "jaxinfer" / "serving" / name).is_file(), name


def test_prose_is_told_from_the_rest() -> None:
    text = "a\n| b |\n```py\nc\n```\n- [d](e)\n![f](g)\n[h]: i\n    jaxinfer run\n"
    assert list(prose(text)) == ["a", "- [d](e)"]


@pytest.mark.slow
def test_who_leads_where_lengths_are_drawn() -> None:
    """Data parallelism by 1 %; and Cronus by 4 %, with what an engine adds."""
    text = (ROOT / "docs" / "results" / "cronus.md").read_text()
    block = text.split("## Lengths that are drawn")[1].split("```sh\n")[1].split("```")[0]
    _, *words = shlex.split(block.replace("\\\n", " "))
    settings = [words[at + 1] for at, word in enumerate(words) if word == "--set"]
    for given, lead in ((settings[:1], -0.010), (settings, 0.037)):
        rates = []
        for name in ("cronus", "data_parallel"):
            config = load_run_file(ROOT / "configs" / "cronus" / f"{name}.yaml", given)
            found = simulate(config, config.requests())
            rates.append(found.requests / found.wall_s)
        assert rates[0] / rates[1] - 1 == pytest.approx(lead, abs=0.002)
