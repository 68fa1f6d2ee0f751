"""The README and the page of papers: short, complete, with the figures of the results."""

import csv
import re
from pathlib import Path

import pytest

from jaxinfer.systems.registry import SYSTEMS

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "README.md").read_text()
PAPERS = (ROOT / "docs" / "papers.md").read_text()
RESULTS = ROOT / "docs" / "results"
# The claim of each page's targets.csv that docs/papers.md has as the paper's headline.
HEADLINES = {
    "cronus": "Table 2, A100+A10 LLaMA3-8B, Cronus (requests/s)",
    "distserve": "66B code, 171/98: ratio to vLLM with its own kernels",
    "splitwise": "AA / A100, conv, iso-power",
    "tetriinfer": "LPHD, JCT at a cap of 16 (%)",
    "multivendor": "Fig. 9: gain in a request's tokens/s, 512+1024 at 3/s, %",
    "hetis": "13B and OPT-30B: the most by which requests/s are better than a pipeline's",
    "hexgen2": "Table 3, Llama-2-70B in setting 1, mean of the five (tokens/s)",
    "hexgen3": "estimated requests per dollar of HexGen-3 on unlike GPUs over HexGen-2, "
    "by our rooflines",
    "aladdin": "fewer GPUs than workers of four with the shortest queue, by what a process costs",
    "sharding": "decode, 64 rows (s)",
    "vidur_search": "the best of another trace costs up to twice as much",
}
# The last number of a range counts.
NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


def rows_of(page: str) -> list[dict[str, str]]:
    with (RESULTS / page / "targets.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def met_of_predicted(rows: list[dict[str, str]]) -> str:
    predicted = [row["met"] == "yes" for row in rows if row["kind"] == "predicted"]
    return f"{sum(predicted)} of {len(predicted)}"


def as_printed(cell: str, like: str, last: bool) -> str:
    """A number of a cell, rounded as another one is."""
    number = NUMBER.findall(cell)[-1 if last else 0]
    return f"{float(number):.{len(like.partition('.')[2])}f}"


def row_of(page: str) -> str:
    return next(line for line in PAPERS.splitlines() if f"][{page}]" in line and "/" in line)


@pytest.mark.parametrize("page", HEADLINES)
def test_a_papers_row_has_the_figures_of_its_page(page: str) -> None:
    rows = rows_of(page)
    assert f"| {met_of_predicted(rows)} |" in row_of(page)
    claim = next(row for row in rows if row["claim"] == HEADLINES[page])
    shown = re.search(rf"\[(\S+) / (\S+)\]\[{page}\]", row_of(page))
    assert shown
    paper, ours = shown.groups()
    assert paper == as_printed(claim["paper"], paper, last=False)
    assert ours == as_printed(claim["ours"], ours, last=page == "aladdin")


def test_the_sum_of_predicted_claims() -> None:
    rows = [row for path in RESULTS.glob("*/targets.csv") for row in rows_of(path.parent.name)]
    assert f"| [{met_of_predicted(rows)}](docs/results/README.md) |" in TEXT
    with_predictions = {
        path.parent.name
        for path in RESULTS.glob("*/targets.csv")
        if any(row["kind"] == "predicted" for row in rows_of(path.parent.name))
    }
    assert with_predictions == set(HEADLINES)


def test_all_systems_are_named() -> None:
    assert all(f"`{system}`" in PAPERS for system in SYSTEMS)


def test_it_is_short() -> None:
    assert len(TEXT.splitlines()) <= 80
    lines = [line for line in TEXT.splitlines() if not line.startswith("|")]
    assert all(len(line) <= 100 for line in lines)
