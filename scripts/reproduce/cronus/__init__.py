"""Cronus on the modelled cluster: Tables 2 and 3, Figure 4, and the calibration."""

from dataclasses import replace
from typing import Any

import yaml

from scripts.reproduce.cronus.calibration import calibrate
from scripts.reproduce.cronus.tables import draw_figure_4, figure_4, table_2, table_3
from scripts.reproduce.cronus.targets import of_figure_4, of_table_2, of_table_3, ratios
from scripts.reproduce.reproduction import CONVERSATIONS, Inputs, Part, Reproduction, Work
from scripts.tables import CONFIGS

TRACE = "azure_conversation.csv"
CALIBRATION = CONFIGS / "cronus_calibration.yaml"
HEADING = (
    "# What `python -m scripts.reproduce cronus --part calibration` has found; "
    "docs/results/cronus.md\n# says from what.\n"
)


def requests(inputs: Inputs) -> Work:
    """Return the trace's first 1,000 requests, which all arrive at the start."""
    return [replace(item, arrival=0.0) for item in inputs.work(TRACE)[:1000]]


def costs() -> dict[str, Any]:
    """Return the calibrated costs that ship."""
    found: dict[str, Any] = yaml.safe_load(CALIBRATION.read_text(encoding="utf-8"))
    return found


def table2(inputs: Inputs) -> Part:
    """Table 2: requests per second of five approaches on four setups."""
    cells = table_2(costs(), requests(inputs), inputs.pool)
    return Part(cells, of_table_2(cells))


def table3(inputs: Inputs) -> Part:
    """Table 3: shares of each stage's capacity, in percent."""
    shares = table_3(costs(), requests(inputs))
    return Part(shares, of_table_3(shares))


def figure4(inputs: Inputs) -> Part:
    """Figure 4: P99 of TTFT and TBT, by interval between requests."""
    points = figure_4(costs(), requests(inputs), inputs.pool)
    return Part(points, pictures={"figure4": draw_figure_4(points)})


def below(inputs: Inputs) -> Part:
    """Figure 4: by how many percent Cronus is below the others, at most."""
    found = ratios(inputs.rows("figure4"), inputs.rows("table2"))
    return Part(found, of_figure_4(found))


def calibrated(inputs: Inputs) -> Part:
    """The calibrated costs, found again, as a file for configs/."""
    found = yaml.safe_dump(calibrate(requests(inputs)), sort_keys=False)
    path = inputs.out / CALIBRATION.name
    path.write_text(HEADING + found, encoding="utf-8")
    return Part([{"file": path.name}], files=[path.name])


REPRODUCTION = Reproduction(
    paper="Cronus",
    inputs={TRACE: CONVERSATIONS},
    parts={
        "table2": table2,
        "table3": table3,
        "figure4": figure4,
        "below": below,
        "calibration": calibrated,
    },
    by_name=("calibration",),
)
